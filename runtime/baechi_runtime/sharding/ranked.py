"""torch's own engines, and the best sharding of layers, beside the plans of `auto`: each is predicted by a few real steps, and run where it
is faster and computes the same.

Rank 0 drives; the others obey it, as they do for a plan (baechi_runtime.torch.processes.executor).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from msgspec import structs

from baechi_ext.capture.parts import Parts
from baechi_ext.errors import CaptureError, ExecutionError, ShardError
from baechi_ext.ir import Cluster
from baechi_ext.shard.search import search
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.ranking import Engine
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.parity_result import Parity, require_parity
from baechi_runtime.measure.rehearsal import Rehearsal
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.report.progress import progress
from baechi_runtime.report.report import DDP, FSDP2, REPLICAS, ParityCheck, Sharded, StepParts
from baechi_runtime.report.tables import as_size
from baechi_runtime.sharding.backend import Captured as ShardCaptured
from baechi_runtime.sharding.backend import Loaded, ShardBackend, Whole
from baechi_runtime.sharding.binding import Searched, among_runnable
from baechi_runtime.sharding.forecast import Forecast
from baechi_runtime.sharding.replicas import largest_piece_bytes, rehearsed_us, replica_results
from baechi_runtime.sharding.report import ShardReport
from baechi_runtime.sharding.strategies import NO_SPLIT, PASE, Predicted, predicted
from baechi_runtime.sharding.training import Strategy, reported, save
from baechi_runtime.torch import backend as torch_backend
from baechi_runtime.torch.backend import Captured, TorchBackend, normalises, parts_of, sizes_of_parts
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.random_state import as_it_was, drawing_from, state_of
from baechi_runtime.torch.measure import load_of_others
from baechi_runtime.torch.parity import SHARE_OF_NORMALISED, SHARE_OF_PARTS, is_mean_of_parts, parity_of_parts, unplaced_results
from baechi_runtime.torch.processes.executor import Further, ProcessExecutor

T = TypeVar("T")
TITLES = {DDP: "DistributedDataParallel", FSDP2: "FSDP2", PASE: "the best sharding of layers by counted operations"}
_COMMANDS = ("rehearsed", "checked", "load", "step", "run")
"""The methods of a worker that all call together; the commands are these words behind "engines: "."""


def on_devices(request: TrainRequest, drive: Callable[[TorchBackend], T]) -> T | None:
    """See baechi_runtime.torch.backend; workers obey the commands for engines, too."""
    return torch_backend.on_devices(request, drive, _obeyed)


def _obeyed(request: TrainRequest, devices: Sequence[TorchDevice], rank: int, step: TrainingStep) -> Further:
    worker = _Worker(request, devices, rank, step)
    return {f"engines: {name}": getattr(worker, name) for name in _COMMANDS}


@dataclass(frozen=True, slots=True)
class _Rehearsed:
    """An engine's strategy, the microseconds that its step is predicted to take, and where it can't run, why."""

    strategy: Predicted
    step_us: float
    why_not: str = ""


class _Worker:
    """A process's part in each engine. All call the same methods in the same order."""

    def __init__(self, request: TrainRequest, devices: Sequence[TorchDevice], rank: int, step: TrainingStep) -> None:
        self._request = replace(
            request,
            sharding=(PASE,),
            plan=PlanRequest(),  # here and below: what is about placing, which splits of a step are refused with
            microbatches=1,
            batch_norm_per_part=False,
            compile=False,
            memory_fraction=1.0 if request.device_memory is None else request.memory_fraction,
            link=None,
            comm_cost_factor=1.0,
            cost_path=None,
            colocate_grads_with_ops=False,
            log_device_placement=False,
        )
        self._devices, self._rank = devices, rank
        self.whole = Whole(step)
        self._rehearsed: dict[str, _Rehearsed] = {}
        self._loaded: dict[str, Loaded] = {}
        self._random_states: dict[str, torch.Tensor] = {}

    @cached_property
    def processes(self) -> ShardBackend:
        return ShardBackend(self._request, self._devices, self._rank)

    @cached_property
    def _captured(self) -> ShardCaptured:
        return self.processes.capture()

    @cached_property
    def _searched(self) -> Searched:
        graph = self._captured.graph
        return among_runnable(search(graph.graph, self._captured.machine), graph, self.processes.shape)

    def rehearsed(self, names: Sequence[str], enough_us: float, limit: float | None) -> dict[str, _Rehearsed]:
        """The engines' predicted steps; each device may hold `limit` bytes."""
        rehearsal = Rehearsal(True, enough_us / 1e6)
        replicas = self.processes.replicated(self.whole, [name for name in names if name in REPLICAS], rehearsal)
        self._rehearsed = {name: _Rehearsed(found, found.forecast.step_us) for name, found in replicas.items()}
        if PASE in names:
            self._rehearsed[PASE] = self._best_sharding(rehearsal, enough_us, limit)
        return self._rehearsed

    def _best_sharding(self, rehearsal: Rehearsal, enough_us: float, limit: float | None) -> _Rehearsed:
        try:
            strategy = predicted(self._searched, self._captured.forecaster, PASE)
        except (CaptureError, ShardError) as e:  # on every process: all capture and search the same
            return _Rehearsed(Predicted(PASE, [], Forecast(StepParts())), 0.0, str(e))
        found, held = _Rehearsed(strategy, strategy.forecast.step_us), self._searched.of(strategy.configurations).held_bytes
        if not strategy.splits:
            return replace(found, why_not=NO_SPLIT)
        if limit is not None and held > limit:
            return replace(found, why_not=f"it would hold {as_size(held)} on each device, which has {as_size(limit)}")
        if found.step_us >= enough_us:
            return found
        loaded = self.processes.load(self.whole, strategy)
        with torch.random.fork_rng(devices=()):
            loaded.begin()  # else each process would drop out other numbers of one tensor
            step_us = rehearsed_us(rehearsal, loaded.once, self.processes.device, partial(load_of_others, self.processes))
        return replace(found, step_us=step_us)

    def checked(self, name: str) -> dict[str, Any] | Parity:
        """The parity of a sharded step; loss, gradients and new values of one step of torch's own, to be compared."""
        parity = self.processes.check(self.whole, self._rehearsed[name].strategy)
        return replica_results(name, self.whole.step) if parity is None else parity

    def load(self, name: str) -> None:
        """Makes the engine's step, to be timed beside others, which draw random numbers on some of the processes alone: it draws from a
        state of its own."""
        loaded = self._loaded[name] = self._ready(name)
        self._random_states[name] = torch.Generator().manual_seed(loaded.seed).get_state()

    def _ready(self, name: str) -> Loaded:
        return self.processes.load(self.whole, self._rehearsed[name].strategy)

    def step(self, name: str) -> tuple[float, float]:
        """The loss of a step that is loaded, and the microseconds of the slowest process."""
        with drawing_from(self._random_states[name], self.processes.device):
            found = self._loaded[name].run()
            self._random_states[name] = state_of(self.processes.device)
        return found

    def run(self, name: str, whole_us: float) -> Sharded:
        """The engine's steps, timed or trained by; rank 0's report counts."""
        chosen, plans = replace(self._rehearsed[name].strategy, note=f"{TITLES[name]}, by auto"), dict[str, str]()
        if name == PASE:
            plans = save(self.processes, self._captured, self._searched, {name: chosen})
        strategy = Strategy(chosen, self._ready(name), plan=plans.get(name))
        return reported(self.processes, self.whole, Forecast(StepParts(calls_us=whole_us)), {name: strategy})


class EngineStep:
    """An engine's step, loaded on all workers of a group; rank 0's handle."""

    def __init__(self, together: Callable[[], tuple[float, float]]) -> None:
        self._together = together

    def run(self) -> tuple[torch.Tensor, StepTimes]:
        """See PlacedStep."""
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
        self._parities: dict[str, Parity] = {}
        self._worker: _Worker | None = None

    def predicted(self, whole: Captured, placement: Placement, cluster: Cluster, enough_us: float) -> list[Engine]:
        """See Engines; none where the workers are on several machines."""
        group = self._executor.group
        if group.local_size < group.size:
            return []
        limit = min((device.memory_bytes for device in cluster.devices if device.memory_bytes is not None), default=None)
        kept, processes = max(placement.single.peak_memory_bytes), len(self._executor.devices)
        reasons = {name: why_not(name, whole.step, processes, kept, limit) for name in TITLES}
        names = [name for name, why_not in reasons.items() if not why_not]
        with progress(f"predicting a step by {', by '.join(TITLES[name] for name in names)}"):
            found = self._together(whole, "rehearsed", names=names, enough_us=enough_us, limit=limit)
        reasons |= {name: rehearsed.why_not for name, rehearsed in found.items()}
        return [
            Engine(name, title, None if reasons[name] else found[name].step_us, reasons[name]) for name, title in TITLES.items()
        ]

    def refusal(self, whole: Captured, engine: Engine) -> str:
        """See Engines."""
        if engine.name not in REPLICAS:
            parity = self.check(whole, engine)
            return "" if parity.passed else f"its step differs from the unplaced one, relatively by {parity.max_rel_diff:.2g}"
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
        name = engine.name
        if name not in self._parities:
            with progress(f"checking parity of {engine.title} with the unplaced step"):
                found = self._together(whole, "checked", name=name)
                self._parities[name] = found if isinstance(found, Parity) else self._parity(whole, found)
        return self._parities[name]

    def load(self, whole: Captured, engine: Engine) -> EngineStep:
        """See Engines."""
        self._together(whole, "load", name=engine.name)
        return EngineStep(lambda: self._together(whole, "step", name=engine.name))

    def run(self, whole: Captured, engine: Engine, placement: Placement) -> ShardReport:
        """See Engines."""
        parity = self.check(whole, engine)
        require_parity(parity)
        found: Sharded = self._together(whole, "run", name=engine.name, whole_us=placement.single.makespan_us)
        strategies = [structs.replace(s, parity=ParityCheck.of(parity)) for s in found.strategies]
        return ShardReport(structs.replace(found, strategies=strategies, notes=list(placement.result.notes)))

    def _together(self, whole: Captured, do: str, **given: Any) -> Any:
        """Have all workers call this method of theirs; what it returns here."""
        if self._worker is None:
            self._worker = _Worker(self._request, self._executor.devices, 0, whole.step)
        return self._executor.together(partial(getattr(self._worker, do), **given), do=f"engines: {do}", **given)[0]

    def _parity(self, whole: Captured, actual: dict[str, Any]) -> Parity:
        device, step, parts = self._executor.devices[0].torch_device, whole.step, self._parts(whole)
        per_part, share = (parts, SHARE_OF_NORMALISED) if normalises(whole, parts) else (None, SHARE_OF_PARTS)
        with as_it_was(step) as saved:
            expected = self._executor.call(0, lambda: unplaced_results(step, device, per_part))
            step.restore(saved)
            return self._executor.call(0, lambda: parity_of_parts(step, device, expected, actual, share))

    def _parts(self, whole: Captured) -> Parts:
        return parts_of(self._request, whole.step, sizes_of_parts(whole.step, len(self._executor.devices)))


def why_not(name: str, step: TrainingStep, processes: int, single_peak_bytes: float, limit: float | None) -> str:
    """The reason for which an engine is not even tried, if there is one: one device's peak is `single_peak_bytes`, and each device may hold
    `limit` bytes."""
    if name not in REPLICAS:
        return ""
    if step.batch is None or step.batch % processes:
        return f"it gives each of {processes} processes as much of a batch, and this one has {step.batch} examples"
    needed = _needed_bytes(name, step, processes, single_peak_bytes)
    return "" if limit is None or needed <= limit else f"it would hold {as_size(needed)} on each device, which has {as_size(limit)}"


def _needed_bytes(name: str, step: TrainingStep, processes: int, single_peak_bytes: float) -> float:
    """The bytes that each process would hold: parameters, gradients, the optimizer's state, what messages are made of, and its part of what
    a step on one device keeps beside these."""
    weights = sum(p.nbytes for p in step.module.parameters())
    buffers = sum(b.nbytes for b in step.module.buffers())
    state = weights * (1 + step.optimizer.slots)
    kept = max(0.0, single_peak_bytes - state - buffers) / processes
    if name == FSDP2:
        return (state + weights) / processes + 2 * largest_piece_bytes(step.module) + buffers + kept
    return state + 2 * weights + buffers + kept
