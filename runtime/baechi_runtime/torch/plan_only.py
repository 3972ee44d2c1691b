"""A model's step for hardware that is not here: captured without values, so that no weight is in memory, and costed by its counts or by a
profile that is scaled. It is planned, never run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baechi_ext.capture.torch_counts import with_counts
from baechi_ext.capture.torch_joint import Binding
from baechi_ext.capture.torch_private import valueless
from baechi_ext.cost import Profile, attach_costs
from baechi_ext.cost.hardware import Hardware, costs_on
from baechi_ext.ir import Cluster, OpGraph
from baechi_runtime.drivers.costing import taking_up
from baechi_runtime.drivers.placement import Placement, place_in_parts
from baechi_runtime.drivers.train_request import HardwareRequest, TrainRequest
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.report.elsewhere import Elsewhere
from baechi_runtime.torch.backend import Captured, capture, capture_sizes, normalises, parts_of, sizes_of_parts
from baechi_runtime.torch.hardware_probe import hardware_of


def plan_only(asked: HardwareRequest) -> tuple[Placement, Elsewhere]:
    """The plan of a model's step for hardware that nobody needs to have, and what it rests on.

    Raises CaptureError, ProfileError or MismatchError for the request's costs, and what `place_in_parts` raises.
    """
    source = None if asked.measured_on is None else hardware_of(asked.measured_on)
    devices = _Devices(asked.request, hardware_of(asked.hardware), source)
    whole = devices.capture()
    captured, placement = place_in_parts(devices, whole, (devices.cluster(), None))
    placement = replace(placement, profile=None)  # nothing was measured here
    return placement, Elsewhere(devices.target, source, placement.single, captured.graph)


def valueless_graph(request: TrainRequest) -> OpGraph:
    """The graph of a model's step with the counts of its ops, captured without values. Raises CaptureError."""
    with valueless():
        _, graph, binding = capture(request)
    return with_counts(graph, binding)


@dataclass
class _Devices:
    """See backend.Splitting."""

    request: TrainRequest
    target: Hardware
    source: Hardware | None
    valueless: Any = field(default_factory=valueless)

    def capture(self) -> Captured:
        with self.valueless:
            step, graph, binding = capture(self.request)
        if self.request.cost_path is not None:
            graph = attach_costs(graph, Profile.load(self.request.cost_path, graph))
        return self._costed(step, graph, binding)

    def in_parts(self, captured: Captured, parts: int | Sequence[int]) -> Captured:
        sizes = sizes_of_parts(captured.step, parts)
        with self.valueless:
            normalises(captured, parts_of(self.request, captured.step, sizes))
            graph, binding = capture_sizes(self.request, captured.step, captured.binding, sizes)
        return self._costed(captured.step, graph, binding)

    def cluster(self) -> Cluster:
        cluster = self.target.cluster(self.request.num_devices)
        return taking_up(cluster if self.request.link is None else replace(cluster, default=self.request.link), self.request)

    def _costed(self, step: TrainingStep, graph: OpGraph, binding: Binding) -> Captured:
        costed = costs_on(with_counts(graph, binding), self.target, self.source)
        return Captured(costed, costed, Profile(costed.fingerprint, {}, "", 0, {}), step, binding)
