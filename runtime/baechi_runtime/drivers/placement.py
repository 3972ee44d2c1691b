"""A captured training step with its plan, made the same way for built-in models and scripts of every framework: of the whole batch, or of
parts of it that have ops of their own, whichever is predicted to be faster."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from baechi_ext.capture.parts import shared_sizes
from baechi_ext.cost import Profile, scale_links
from baechi_ext.errors import CaptureError, InfeasibleError
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.backend import Captured, PlacingBackend, Splitting
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.files.checkpoint_folder import CheckpointFolder
from baechi_runtime.files.run_folder import save_plan
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.report.progress import one_line, progress
from baechi_runtime.report.tables import as_time

if TYPE_CHECKING:
    from baechi_ext.hybrid.sharding import Sharding

C = TypeVar("C", bound=Captured)
_NEAR = 0.02
"""A plan so little above what devices that are all at work all the time would take leaves nothing to look for."""
_IN_DOUBT = 1.25
"""Predictions that differ by less do not tell which of two plans is faster: of parts they are too short, mostly by up to a
quarter more than those of the whole batch (docs/speed.md)."""


@dataclass(frozen=True)
class Placement:
    """A step, profiled and placed."""

    graph: OpGraph
    """With the costs that the plan is predicted with."""
    profile: Profile | None
    """None on workers other than 0."""
    result: PlanResult
    single: Timeline
    """The prediction for one device: device 0, at its speed, with the others idle."""
    probe: LinkProbe | None = None
    """None where the link was not probed: one that was given, or that an earlier run probed."""
    notes: tuple[str, ...] = ()
    rehearsed_us: float | None = None
    """A step as a few real ones predict it; None where none were run."""

    def noting(self, note: str) -> "Placement":
        """The same with a further note on its plan."""
        return replace(self, result=replace(self.result, notes=(*self.result.notes, note)))

    def save(self, folder: Path, made_by: MadeBy) -> None:
        """Writes graph.json, profile.json and plan.json; files of an earlier run in the folder go."""
        save_plan(folder, self.result.plan, self.graph, self.profile, made_by)


def place(
    request: TrainRequest, captured: Captured, found: tuple[Cluster, LinkProbe | None], sharding: "Sharding | None" = None
) -> Placement:
    """The plan of a captured step on the devices that were `found`; the best one so far where its search was interrupted.

    Raises what baechi_runtime.drivers.pipeline's `plan` and `plan_hybrid` raise.
    """
    cluster, probe = found
    graph, cluster = captured.graph, scale_links(cluster, request.comm_cost_factor)
    single = one_device_timeline(captured.alone, cluster.devices[0].speed)
    if sharding is None:
        result = pipeline.plan_watched(graph, cluster, request.plan, pipeline.plan)
        result = pipeline.whole_if_faster(result, graph, cluster, request.plan, single)
    else:
        result = pipeline.plan_watched(graph, cluster, request.plan, partial(pipeline.plan_hybrid, sharding=sharding))
    together = result.splits or isinstance(result.plan, HybridPlan)
    return Placement(graph if together else single.graph, captured.profile, result, single, probe, captured.notes)


def on_one_device(cluster: Cluster) -> tuple[str, ...]:
    """A note where steps on one device are not those of the fastest."""
    first, fastest = cluster.devices[0], cluster.devices[cluster.fastest]
    if first.speed == fastest.speed:
        return ()
    return (f"'one device' is {first.name}, the first; {fastest.name} is {fastest.speed / first.speed:.3g} times as fast",)


def place_in_parts(
    backend: Splitting[C],
    whole: C,
    found: tuple[Cluster, LinkProbe | None],
    sharding: "Sharding | None" = None,
    rehearse: Callable[[C, Placement], Placement] | None = None,
) -> tuple[C, Placement]:
    """The captured step that is to run, and its plan: `whole`, or the step over the parts that the request's `microbatches` want.

    Parts that the user asks for are what runs. Left to the search (None), there is one for each device, in proportion to its speed, where
    that is faster: by the predictions or, where these are near each other and there is `rehearse`, by a few steps of both, where these tell
    (LEAST_GAIN). The plan's notes say what the other takes, or why there is none. A training that goes on from a checkpoint keeps its
    parts. An interrupt of either search is one of the result. `Placement.single` is the whole batch's. Raises what `place` raises,
    `in_parts` for parts that the user asks for, and what `rehearse` raises.
    """
    parts = _wanted(backend.request)
    if parts is not None and parts != 1:
        return _in_parts(backend, whole, parts, found)
    placement = place(backend.request, whole, found, sharding)
    if parts == 1 or placement.result.interrupted or isinstance(placement.result.plan, HybridPlan):
        return whole, placement
    step_us = placement.result.predicted_step_us
    if is_near_least(placement, found[0]):
        return whole, placement
    sizes = auto_sizes(whole, found[0])
    if len(sizes) == 1:
        return whole, placement
    try:
        captured, parted = _in_parts(backend, whole, sizes, found)
    except (CaptureError, InfeasibleError) as e:
        return whole, placement.noting(f"the batch stays whole: {e}")
    parted_us, named = parted.result.predicted_step_us, f"{len(sizes)} parts ({', '.join(map(str, sizes))} examples)"
    faster, other = parted_us < step_us, "it is predicted to take {}"
    in_doubt = max(parted_us, step_us) < _IN_DOUBT * min(parted_us, step_us) and not parted.result.interrupted
    if rehearse is not None and in_doubt:
        placement, parted = rehearse(whole, placement), rehearse(captured, parted)
        step_us, parted_us = placement.rehearsed_us or 0.0, parted.rehearsed_us or 0.0
        tells = min(step_us, parted_us) < (1 - pipeline.LEAST_GAIN) * max(step_us, parted_us)
        faster = parted_us < step_us if tells else faster
        other = f"a few steps took {{}}, and these {as_time(parted_us if faster else step_us)}"
        other += "" if tells else f"; less than {pipeline.LEAST_GAIN:.0%} apart, so the predictions decide"
    if faster:
        return captured, parted.noting(f"the batch goes in {named}; whole {other.format(as_time(step_us))}")
    kept = placement.noting(f"the batch stays whole; in {named} {other.format(as_time(parted_us))}")
    return whole, replace(kept, result=replace(kept.result, interrupted=parted.result.interrupted))


def rehearsed(backend: PlacingBackend[C, Any], captured: C, placement: Placement) -> Placement:
    """The same with `rehearsed_us`. Raises ExecutionError."""
    if placement.rehearsed_us is not None:
        return placement
    with progress("predicting a step by a few of the plan"):
        return replace(placement, rehearsed_us=backend.rehearsed_us(captured, placement.result.timeline))


def auto_sizes(whole: Captured, cluster: Cluster) -> tuple[int, ...]:
    """The sizes of the parts that are tried where nobody names any: one for each device, in proportion to its speed."""
    return shared_sizes(whole.batch or 0, [device.speed for device in cluster.devices])


def _wanted(request: TrainRequest) -> int | Sequence[int] | None:
    """The parts that the request wants; of a training that goes on, where nobody names any, those that it was begun with: the losses are
    then those of a training that was never interrupted."""
    run = request.run
    if run is not None and run.keeps_parts and run.resume and run.checkpoint is not None:
        found = CheckpointFolder(run.checkpoint).last()
        if found is not None:
            return found.training.get("microbatches") or 1
    return request.microbatches


def _in_parts(backend: Splitting[C], whole: C, parts: int | Sequence[int], found: tuple[Cluster, LinkProbe | None]) -> tuple[C, Placement]:
    captured = backend.in_parts(whole, parts)
    placement = place(backend.request, captured, found)
    return captured, replace(placement, single=one_device_timeline(whole.alone, found[0].devices[0].speed))


def is_near_least(placement: Placement, cluster: Cluster) -> bool:
    """True if a plan leaves nothing to look for: it takes hardly longer than all ops where all devices are at work all the time."""
    least_us = placement.graph.total_compute_us() / sum(device.speed for device in cluster.devices)
    return len(cluster) == 1 or placement.result.predicted_step_us <= least_us * (1 + _NEAR)


def log_device_placement(placement: Placement) -> None:
    """Writes where each op is to stderr, a line each."""
    devices, ops = placement.result.timeline.cluster.devices, placement.graph.ops
    lines = [one_line(f"{op.id} -> {devices[d].name}") + "\n" for op, d in zip(ops, placement.result.plan.placement, strict=True)]
    sys.stderr.write("".join(lines))
