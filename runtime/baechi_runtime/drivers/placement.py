"""A captured training step with its plan, made the same way for built-in models and scripts of every framework."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from baechi_ext.cost import Profile, scale_links
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.backend import Captured
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.files.run_folder import begin_run
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.report.progress import progress
from baechi_runtime.report.tables import search_news

if TYPE_CHECKING:
    from baechi_ext.hybrid.sharding import Sharding


@dataclass(frozen=True)
class Placement:
    """A step, profiled and placed."""

    graph: OpGraph
    """With the costs that the plan is predicted with."""
    profile: Profile | None
    """None on workers other than 0."""
    result: PlanResult
    single: Timeline
    """The prediction for one device."""
    probe: LinkProbe | None = None
    """None where the link was not probed: one that was given, or that an earlier run probed."""
    notes: tuple[str, ...] = ()

    def noting(self, note: str) -> "Placement":
        """The same with a further note on its plan."""
        return replace(self, result=replace(self.result, notes=(*self.result.notes, note)))

    def save(self, folder: Path, made_by: MadeBy) -> None:
        """Writes graph.json, profile.json and plan.json; files of an earlier run in the folder go."""
        begin_run(folder)
        self.graph.save(folder / "graph.json", made_by)
        if self.profile is not None:
            self.profile.save(folder / "profile.json", made_by)
        self.result.plan.save(folder / "plan.json", made_by)


def place(
    request: TrainRequest, captured: Captured, found: tuple[Cluster, LinkProbe | None], sharding: "Sharding | None" = None
) -> Placement:
    """The plan of a captured step on the devices that were `found`; the best one so far where its search was interrupted.

    Raises what baechi_runtime.drivers.pipeline's `plan` and `plan_hybrid` raise.
    """
    cluster, probe = found
    cluster = scale_links(cluster, request.comm_cost_factor)
    single = one_device_timeline(captured.alone)
    with progress(pipeline.announcement(captured.graph, cluster, request.plan)) as show:
        watched = request.plan.watched(lambda search: show(search_news(search)))
        if sharding is not None:
            result: PlanResult = pipeline.plan_hybrid(captured.graph, cluster, watched, sharding)
        else:
            result = pipeline.plan(captured.graph, cluster, watched)
    if sharding is None:
        result = pipeline.whole_if_faster(result, captured.graph, cluster, request.plan, single)
    together = result.splits or isinstance(result.plan, HybridPlan)
    return Placement(captured.graph if together else single.graph, captured.profile, result, single, probe, captured.notes)


def log_device_placement(placement: Placement) -> None:
    """Writes where each op is to stderr, a line each."""
    devices, ops = placement.result.timeline.cluster.devices, placement.graph.ops
    lines = [f"{op.id} -> {devices[d].name}\n" for op, d in zip(ops, placement.result.plan.placement, strict=True)]
    sys.stderr.write("".join(lines))
