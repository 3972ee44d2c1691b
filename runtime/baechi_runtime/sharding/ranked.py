"""torch's own engines beside the plans of `auto`: each is predicted by a few real steps, and run where it is faster and computes the same.

Rank 0 drives; the others obey it, as they do for a plan (baechi_runtime.torch.processes.executor).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from baechi_ext.capture.parts import Parts
from baechi_ext.errors import CaptureError, ExecutionError
from baechi_ext.ir import Cluster
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.ranking import Engine
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.comparator import compare
from baechi_runtime.measure.parity_result import Parity, require_parity
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.report.progress import progress
from baechi_runtime.report.tables import as_size
from baechi_runtime.sharding.backend import Loaded, ShardBackend, Whole
from baechi_runtime.sharding.forecast import Forecast
from baechi_runtime.sharding.replicas import DDP, FSDP2, Rehearsal, largest_piece_bytes, replica_results
from baechi_runtime.sharding.report import ShardReport
from baechi_runtime.sharding.strategies import Predicted
from baechi_runtime.sharding.training import Strategy, reported
from baechi_runtime.torch import backend as torch_backend
from baechi_runtime.torch.backend import Captured, TorchBackend, normalises, parts_of, sizes_of_parts
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.measure import load_of_others
from baechi_runtime.torch.parity import SHARE_OF_PARTS, TOLERANCE_OF_PARTS, is_mean_of_parts, unplaced_results
from baechi_runtime.torch.processes.executor import Further, ProcessExecutor

T = TypeVar("T")
TITLES = {DDP: "DistributedDataParallel", FSDP2: "FSDP2"}
_REHEARSE, _CHECK, _LOAD, _STEP, _RUN = ("rehearse an engine", "check an engine", "load an engine", "run an engine's step", "run an engine")


def on_devices(request: TrainRequest, drive: Callable[[TorchBackend], T]) -> T | None:
    """See baechi_runtime.torch.backend; workers obey the commands for engines, too."""
    return torch_backend.on_devices(request, drive, _obeyed)


def _obeyed(request: TrainRequest, devices: Sequence[TorchDevice], rank: int, step: TrainingStep) -> Further:
    worker = _Worker(request, devices, rank, step)

    def obey(action: Callable[[dict[str, Any]], object], command: dict[str, Any]) -> dict[str, Any]:
        action(command)
        return {}

    actions: dict[str, Callable[[dict[str, Any]], object]] = {
        _REHEARSE: lambda command: worker.rehearsed(command["engines"], command["enough_us"]),
        _CHECK: lambda command: worker.results(command["engine"]),
        _LOAD: lambda command: worker.load(command["engine"]),
        _STEP: lambda command: worker.step(command["engine"]),
        _RUN: lambda command: worker.run(Predicted(command["engine"], [], Forecast(0.0))),
    }
    return {name: partial(obey, action) for name, action in actions.items()}


class _Worker:
    """A process's part in each engine. All call the same methods in the same order."""

    def __init__(self, request: TrainRequest, devices: Sequence[TorchDevice], rank: int, step: TrainingStep) -> None:
        self._request, self._devices, self._rank = request, devices, rank
        self.whole = Whole(step, step.batch or 0)
        self._loaded: dict[str, Loaded] = {}

    @cached_property
    def processes(self) -> ShardBackend:
        return ShardBackend(self._request, (len(self._devices),), self._devices, self._rank)

    def rehearsed(self, names: Sequence[str], enough_us: float) -> dict[str, Predicted]:
        """The engines' predicted steps."""
        return self.processes.replicated(self.whole, names, Rehearsal(True, enough_us / 1e6))

    def results(self, name: str) -> dict[str, Any]:
        """Loss, gradients and new values of one step of the engine."""
        return replica_results(name, self.whole.step, self.whole.batch)

    def load(self, name: str) -> None:
        """Makes the engine's step, to be timed beside others."""
        self._loaded[name] = self.processes.replica(self.whole, name)

    def step(self, name: str) -> tuple[float, float]:
        """The loss of a step that is loaded, and the microseconds of the slowest process."""
        return self.processes.run(self._loaded[name])

    def run(self, chosen: Predicted, whole_us: float = 0.0, parity: Parity | None = None) -> ShardReport:
        """The engine's steps, timed or trained by; rank 0's report counts."""
        strategy = Strategy(chosen, self.processes.replica(self.whole, chosen.name), parity)
        return reported(self.processes, self.whole, Forecast(whole_us), {chosen.name: strategy})


class EngineStep:
    """An engine's step, loaded on all workers of a group; rank 0's handle."""

    def __init__(self, together: Callable[[], tuple[float, float]]) -> None:
        self._together = together

    def run(self) -> tuple[torch.Tensor, StepTimes]:
        """See LoadedStep."""
        loss, us = self._together()
        return torch.tensor(loss), StepTimes(us, ())


class TorchEngines:
    """See Engines: those of a group of worker processes on one machine."""

    def __init__(self, backend: TorchBackend) -> None:
        self._request = backend.request
        executor = backend.executor
        if not isinstance(executor, ProcessExecutor):
            raise ExecutionError("torch's own engines run in worker processes; give --workers=process")
        self._executor = executor
        self._found: dict[str, Predicted] = {}
        self._worker: _Worker | None = None

    def _of(self, whole: Captured) -> _Worker:
        if self._worker is None:
            self._worker = _Worker(self._request, self._executor.devices, 0, whole.step)
        return self._worker

    def predicted(self, whole: Captured, placement: Placement, cluster: Cluster, enough_us: float) -> list[Engine]:
        """See Engines; none where the workers are on several machines."""
        group = self._executor.group
        if group.local_size < group.size:
            return []
        reasons = {name: self._why_not(name, whole.step, placement, cluster) for name in TITLES}
        if names := [name for name, why_not in reasons.items() if not why_not]:
            rehearse = partial(self._of(whole).rehearsed, names, enough_us)
            with progress(f"predicting a step by {' and by '.join(TITLES[name] for name in names)}"):
                self._found = self._executor.together(rehearse, do=_REHEARSE, engines=names, enough_us=enough_us)[0]
        return [
            Engine(name, title, self._found[name].forecast.step_us if name in self._found else None, reasons[name])
            for name, title in TITLES.items()
        ]

    def _why_not(self, name: str, step: TrainingStep, placement: Placement, cluster: Cluster) -> str:
        size = len(self._executor.devices)
        if step.batch is None or step.batch % size:
            return f"it gives each of {size} processes as much of a batch, and this one has {step.batch} examples"
        limit = min((device.memory_bytes for device in cluster.devices if device.memory_bytes is not None), default=math.inf)
        needed = _needed_bytes(name, step, placement, size)
        return f"it would hold {as_size(needed)} on each device, which has {as_size(limit)}" if needed > limit else ""

    def rehearsed_us(self, captured: Captured, placement: Placement) -> float:
        """See Engines."""
        executor, timeline = self._executor, placement.result.timeline
        with progress("predicting a step by the plan"), as_it_was(captured.step):
            loaded = executor.load(timeline, captured.binding, captured.step)
            return Rehearsal(as_profiled=True).placed_us(loaded, partial(load_of_others, executor))

    def refusal(self, whole: Captured, engine: Engine) -> str:
        """See Engines."""
        step, parts = whole.step, self._parts(whole)
        if whole.seeded_ops:
            return f"its processes would draw other random numbers for {whole.seeded_ops} ops (--dropout=0 leaves them out)"
        try:
            normalises(whole, parts)
        except CaptureError:
            return "it would normalise each part of the batch by itself (--batch_norm=per_part allows that)"
        with as_it_was(step):
            mean = is_mean_of_parts(step, parts)
        return "" if mean else "the loss is no mean over parts that count alike"

    def check(self, whole: Captured, engine: Engine) -> Parity:
        """See Engines."""
        own = partial(self._of(whole).results, engine.name)
        with progress(f"checking parity of {engine.title} with the unplaced step"):
            return self._parity(whole, self._executor.together(own, do=_CHECK, engine=engine.name)[0])

    def load(self, whole: Captured, engine: Engine) -> EngineStep:
        """See Engines."""
        worker, together, name = self._of(whole), self._executor.together, engine.name
        together(partial(worker.load, name), do=_LOAD, engine=name)
        return EngineStep(lambda: together(partial(worker.step, name), do=_STEP, engine=name)[0])

    def run(self, whole: Captured, engine: Engine, placement: Placement) -> ShardReport:
        """See Engines."""
        worker, together, parity = self._of(whole), self._executor.together, self.check(whole, engine)
        require_parity(parity)
        chosen = replace(self._found[engine.name], note="torch's own, by auto")
        run = partial(worker.run, chosen, placement.single.makespan_us, parity)
        return replace(together(run, do=_RUN, engine=engine.name)[0], notes=placement.result.notes)

    def _parity(self, whole: Captured, actual: dict[str, Any]) -> Parity:
        device, step, parts = self._executor.devices[0].torch_device, whole.step, self._parts(whole)
        with as_it_was(step):
            expected = self._executor.call(0, lambda: unplaced_results(step, device, parts if normalises(whole, parts) else None))
        return compare(expected, actual, TOLERANCE_OF_PARTS[device.type], share=SHARE_OF_PARTS)

    def _parts(self, whole: Captured) -> Parts:
        return parts_of(self._request, whole.step, sizes_of_parts(whole.step, len(self._executor.devices)))


def _needed_bytes(name: str, step: TrainingStep, placement: Placement, processes: int) -> float:
    """The bytes that each process would hold: parameters, gradients, the optimizer's state, what messages are made of, and its part of what
    a step on one device keeps beside these."""
    weights = sum(p.nbytes for p in step.module.parameters())
    buffers = sum(b.nbytes for b in step.module.buffers())
    state = weights * (1 + step.optimizer.slots)
    kept = max(0.0, max(placement.single.peak_memory_bytes) - state - buffers) / processes
    if name == FSDP2:
        return (state + weights) / processes + 2 * largest_piece_bytes(step.module) + buffers + kept
    return state + 2 * weights + buffers + kept
