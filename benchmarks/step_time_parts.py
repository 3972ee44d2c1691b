"""The row of `benchmarks.step_time` for a step over parts of its batch: the plan of `auto`, where BatchNorm may normalise each part by
itself, as it does beside it in DistributedDataParallel."""

from dataclasses import dataclass

from baechi_ext.ir import Cluster
from baechi_ext.place.common import PlanResult
from baechi_runtime.drivers import pipeline
from baechi_runtime.measure.parity_result import Parity, require_parity
from baechi_runtime.torch.backend import Captured, TorchBackend
from baechi_runtime.torch.lowering.executor import LoadedStep


@dataclass(frozen=True)
class Parted:
    """A plan of parts, loaded and checked."""

    result: PlanResult
    loaded: LoadedStep
    parity: Parity
    peak_bytes: tuple[int, ...]


def loaded_parts(backend: TorchBackend, captured: Captured, cluster: Cluster, count: int, request: pipeline.PlanRequest) -> Parted:
    """The step over `count` parts, placed. Raises what capturing, placing, checking and loading raise."""
    parted = backend.in_parts(captured, count)
    result = pipeline.plan(parted.graph, cluster, request)
    parity = backend.check(parted, result.timeline)
    require_parity(parity)
    return Parted(result, backend.load(parted, result.timeline), parity, backend.peak_bytes(parted, result.timeline))
