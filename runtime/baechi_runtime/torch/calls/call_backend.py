"""A script's training call as a backend: on threads of this process, or on worker processes that all run the script."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from baechi_ext.capture.parts import NORMALISED
from baechi_ext.capture.torch_private import dispatched
from baechi_ext.errors import BaechiError, CaptureError, ParityError
from baechi_ext.ir import Cluster
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers.backend import Captured, PlacingBackend
from baechi_runtime.drivers.comparison import UNPLACED
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.measure.parity_result import Parity, require_parity
from baechi_runtime.measure.recording import RUNS
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.backend import costed, devices_of, kind_of_executor
from baechi_runtime.torch.calls.capturing import TrainingCall, call_of_fragments, limits_of
from baechi_runtime.torch.calls.parallelize import executor_of
from baechi_runtime.torch.calls.placed_function import LoadedFragment
from baechi_runtime.torch.calls.recording import WARM_UP, CallRecorder
from baechi_runtime.torch.calls.verify import goes_by_doubles, in_double, normalised_by_part, restore
from baechi_runtime.torch.calls.workers import Workers, loaded_phases
from baechi_runtime.torch.cluster import find_cluster
from baechi_runtime.torch.lowering.devices import on_core_of
from baechi_runtime.torch.lowering.random_state import RandomState
from baechi_runtime.torch.measure import how_measured, measure_on, measured_peak_bytes
from baechi_runtime.torch.parity import GRADIENT_OF, NEW_VALUE_OF, OUTPUT, Masks, in_doubles, judged
from baechi_runtime.torch.processes.executor import Executor, ProcessExecutor
from baechi_runtime.torch.processes.sent_timeline import timeline_from_json, timeline_to_json
from baechi_runtime.torch.threads.executor import ThreadExecutor

HANDED_OUT = (
    "with --workers=process a placed step hands outputs, gradients and buffers to every worker, which its prediction does not count; eager "
    "and single run in worker 0 alone and hand out nothing"
)
T = TypeVar("T")
Results = dict[str, Tensor]
"""Outputs and gradients, by name."""
Run = Callable[..., Sequence[Tensor]]
Arguments = Sequence[Sequence[Tensor]]
"""Those of each fragment."""


class ComparedCall:
    """The script's call and its backward pass, as it is and placed, from gradients of its outputs that are the same for all. The gradients
    that come out are handed over, not added to those of the parameters.
    """

    def __init__(self, call: TrainingCall) -> None:
        self.call = call
        self._args = [tuple(a.detach().requires_grad_(a.requires_grad) for a in f.args) for f in call.fragments]
        self._written = {(k, i): self._args[k][i].detach().clone() for k, p in enumerate(call.captured.fragments) for i in p.written}
        self._random = RandomState()
        outputs = self._forward([f.module for f in call.fragments], self._args)
        self._tangents = _tangents({key: v for key, v in outputs.items() if v.requires_grad and v.dtype.is_floating_point})

    def plain(self) -> Results:
        """Run the call as it is."""
        return self._run([f.module for f in self.call.fragments], self._args)

    def placed(self, loaded: Sequence[LoadedFragment]) -> Results:
        return self._run([lambda *args, one=one: one.run(args) for one in loaded], self._args)

    def _run(self, runs: Sequence[Run], given: Arguments) -> Results:
        return self._with_gradients(self._forward(runs, given), given)

    def _forward(self, runs: Sequence[Run], given: Arguments) -> dict[tuple[int, int], Tensor]:
        made: dict[tuple[int, int], Tensor] = {}
        for k, (fragment, run) in enumerate(zip(self.call.fragments, runs, strict=True)):
            args = [made.get(fragment.links[i], a) if i in fragment.links else a for i, a in enumerate(given[k])]
            made |= {(k, i): v for i, v in enumerate(run(*args))}
        return made

    def _with_gradients(self, outputs: dict[tuple[int, int], Tensor], given: Arguments) -> Results:
        sources: dict[str, Tensor] = {}
        for k, (fragment, part) in enumerate(zip(self.call.fragments, self.call.captured.fragments, strict=True)):
            own = ((i, given[k][i]) for i in part.reached_by if i not in fragment.links and given[k][i].requires_grad)
            sources |= {self._name(k, i): value for i, value in own}
        roots = [(outputs[key], t.to(outputs[key].dtype)) for key, t in self._tangents.items()]
        values = torch.autograd.grad([r for r, _ in roots], list(sources.values()), [t for _, t in roots], allow_unused=True)
        gradients = {f"{GRADIENT_OF}{n}": g for n, g in zip(sources, values, strict=True) if g is not None}
        return {f"{OUTPUT}{i} of fragment {k}": v.detach() for (k, i), v in outputs.items()} | gradients

    def rewind(self) -> None:
        """Put buffers and random state back to what they were before the call."""
        for k, args in enumerate(self._args):
            restore(args, {i: v for (f, i), v in self._written.items() if f == k}, self._random)

    def parity(self, loaded: "Loaded", *, relaxed: bool) -> Parity:
        """The parity of outputs, gradients and buffers with those of the call as it is, from the same state; unless random numbers are
        `relaxed`, raises ParityError where these or the random state differ."""
        captured, step, graphs = loaded.call.captured, loaded.call.step, [one.graph for one in loaded.fragments]
        tolerance, share = limits_of(captured.fragments, step.live, parted=bool(captured.parts))
        masks = Masks()
        self.rewind()
        with dispatched(masks.noted):
            expected = self._run(graphs, self._args) | self._new_values(self._args)
        after = RandomState()
        self.rewind()
        found = self.placed(loaded.fragments) | self._new_values(self._args)
        drew_the_same = after.is_now()
        exact = partial(self._exact, graphs, masks) if masks.are_all and goes_by_doubles(self._args[0], tolerance) else lambda: None
        parity = judged(expected, found, tolerance, share, exact)
        if not relaxed:
            require_parity(parity)
            if not drew_the_same:
                raise ParityError("the placed call drew other random numbers than the unplaced one")
        return parity

    def _exact(self, graphs: Sequence[Run], masks: Masks) -> Results | None:
        """The results of the call as it is, in double precision; None where that can't be had."""
        self.rewind()
        doubles = [tuple(map(in_double, args)) for args in self._args]
        return in_doubles(lambda: self._run(graphs, doubles) | self._new_values(doubles), masks)

    def _new_values(self, given: Arguments) -> Results:
        """Copies of what the call changes."""
        return {f"{NEW_VALUE_OF}{self._name(*key)}": given[key[0]][key[1]].detach().clone() for key in self._written}

    def _name(self, fragment: int, argument: int) -> str:
        name = self.call.captured.fragments[fragment].state.get(argument, f"argument {argument}")
        return f"{name} in fragment {fragment}" if fragment else name


def _tangents(outputs: Mapping[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
    """Gradients to begin with: 1 for a scalar, such as a loss; random numbers for other outputs, as ones give many ops a gradient of 0."""
    generator = torch.Generator().manual_seed(0)

    def tangent(output: Tensor) -> Tensor:
        if output.dim() == 0:
            return torch.ones_like(output)
        return torch.randn(output.shape, generator=generator, dtype=output.dtype).to(output.device)

    return {key: tangent(value.detach()) for key, value in outputs.items()}


@dataclass(frozen=True)
class CapturedStep(Captured):
    """See Captured."""

    call: TrainingCall

    @property
    def notes(self) -> tuple[str, ...]:
        return (NORMALISED,) if any(part.normalised for part in self.call.captured.fragments) else ()


@dataclass(frozen=True)
class Loaded:
    """A plan of the call, ready to run."""

    call: TrainingCall
    executor: ThreadExecutor | Workers
    timeline: Timeline
    fragments: Sequence[LoadedFragment]
    number: int | None = None
    """Its number among the plans loaded on all workers; None where this process runs it alone."""


def with_call(request: TrainRequest, compared: ComparedCall, workers: Workers | None, drive: Callable[["CallBackend"], T]) -> T | None:
    """The value of `drive` for the devices that run the call: threads of this process, or the workers, which all come here with the same
    call; worker 0 drives, for the others it is None.

    Raises ParityError where the workers came with different calls, ExecutionError where one fails.
    """
    if workers is None:
        return drive(CallBackend(request, compared, executor_of(devices_of(request), request.timeout_seconds, graphs=request.as_graphs)))
    compared.rewind()
    workers.agree_on(compared.call.captured, compared.call.step)
    backend = WorkersBackend(request, compared, workers)
    if workers.group.rank:
        backend.follow()
        return None
    with workers.telling():
        value = drive(backend)
    workers.group.command({"do": "end"})
    return value


class CallBackend(PlacingBackend[CapturedStep, Loaded]):
    """Threads of this process; eager runs in the caller's own, on the core of device 0."""

    unplaced = "eager, one device"

    def __init__(self, request: TrainRequest, compared: ComparedCall, executor: ThreadExecutor) -> None:
        self.request, self.kind, self.peaks_measured_by = request, kind_of_executor(request), how_measured(executor)
        self._compared, self._call, self._executor = compared, compared.call, executor

    def capture(self) -> CapturedStep:
        return self._costed(self._executor, self._call)

    def _costed(self, executor: Executor, call: TrainingCall) -> CapturedStep:
        found = costed(self.request, executor, call.captured.graph, call.captured.binding, call.step)
        return CapturedStep(found.graph, found.alone, found.profile, call)

    def cluster(self) -> tuple[Cluster, LinkProbe | None]:
        return find_cluster(self.request, self._executor)

    def in_parts(self, captured: CapturedStep, parts: int | Sequence[int]) -> CapturedStep:
        return self._costed(self._executor, self._call_in_parts(parts))

    def _call_in_parts(self, parts: int | Sequence[int]) -> TrainingCall:
        call = call_of_fragments(self.request, self._call.fragments, self._call.step.name, parts)
        if not call.captured.parts:
            raise CaptureError(f"the batch can't be split: {call.captured.why_whole}")
        return call

    def load(self, captured: CapturedStep, timeline: Timeline, *, alone: bool = False) -> Loaded:
        return _loaded(captured.call, timeline, self._executor)

    def check(self, captured: CapturedStep, timeline: Timeline, *, alone: bool = False) -> Parity:
        return self._compared.parity(_loaded(captured.call, timeline, self._executor), relaxed=self.request.relaxed_random)

    def peak_bytes(self, captured: CapturedStep, timeline: Timeline, *, alone: bool = False) -> tuple[int, ...]:
        return measured_peak_bytes(self._executor, timeline, captured.call.captured.binding, captured.call.step)  # type: ignore[arg-type]

    def measure(self, captured: CapturedStep, loaded: Mapping[str, Loaded], num_steps: int, on_step: Callable[[int], None]) -> Measurement:

        def eager() -> StepTimes:
            with on_core_of(self._executor.devices[0]):
                return _times(self._compared.plain)

        variants = {name: partial(_times, partial(self._compared.placed, one.fragments)) for name, one in loaded.items()}
        return measure_on(self._executor, {UNPLACED: eager, **variants}, num_steps=num_steps, on_step=on_step)

    def record(self, captured: CapturedStep, loaded: Loaded) -> MeasuredStep:
        """Raises CaptureError for a call of several fragments, each of which is a step of its own."""
        if len(loaded.fragments) > 1:
            raise CaptureError("the call is of several fragments, with Python between them")
        recorded = _recorded(self._compared, loaded).measured(loaded.timeline.graph, self.kind)
        if recorded is None:
            raise CaptureError("a worker did not say what it noted")
        return recorded

    def notes(self, loaded: Loaded) -> Sequence[str]:
        return ()


class WorkersBackend(CallBackend):
    """The workers of a script: each runs its share of every placed call, and worker 0 alone the call as it is, or on one device."""

    def __init__(self, request: TrainRequest, compared: ComparedCall, workers: Workers) -> None:
        super().__init__(request, compared, executor_of(workers.devices[:1], workers.group.timeout_seconds))
        self.peaks_measured_by = "none"
        self._workers = workers
        self._loaded: list[Loaded] = []
        self._failure: BaechiError | None = None

    def capture(self) -> CapturedStep:
        with ProcessExecutor(self._workers.group, self._workers.devices) as executor:
            captured = self._costed(executor, self._call)
            self._cluster = find_cluster(self.request, executor)
        return captured

    def in_parts(self, captured: CapturedStep, parts: int | Sequence[int]) -> CapturedStep:
        call = self._call_in_parts(parts)
        self._tell({"do": "split", "parts": parts})
        with ProcessExecutor(self._workers.group, self._workers.devices) as executor:
            return self._costed(executor, call)

    def cluster(self) -> tuple[Cluster, LinkProbe | None]:
        return self._cluster

    def load(self, captured: CapturedStep, timeline: Timeline, *, alone: bool = False) -> Loaded:
        if alone:
            return super().load(captured, timeline, alone=True)
        self._tell_of(captured, timeline, "load")
        return self._load(captured.call, timeline)

    def _load(self, call: TrainingCall, timeline: Timeline) -> Loaded:
        loaded = replace(_loaded(call, timeline, self._workers), number=len(self._loaded))
        self._loaded.append(loaded)
        return loaded

    def check(self, captured: CapturedStep, timeline: Timeline, *, alone: bool = False) -> Parity:
        if alone:
            return super().check(captured, timeline, alone=True)
        self._tell_of(captured, timeline, "check")
        try:
            return self._compared.parity(_loaded(captured.call, timeline, self._workers), relaxed=self.request.relaxed_random)
        except ParityError:
            raise
        except BaechiError as e:
            self._failure = e
            raise

    def peak_bytes(self, captured: CapturedStep, timeline: Timeline, *, alone: bool = False) -> tuple[int, ...]:
        """Nothing: each worker would have to count its own."""
        return ()

    def measure(self, captured: CapturedStep, loaded: Mapping[str, Loaded], num_steps: int, on_step: Callable[[int], None]) -> Measurement:
        self._tell({"do": "measure", "numbers": {name: one.number for name, one in loaded.items()}, "num_steps": num_steps})
        runs = {name: partial(self._compared.placed, one.fragments) for name, one in loaded.items()}
        return self._in_turn({UNPLACED: self._compared.plain, **runs}, num_steps, on_step)

    def _in_turn(
        self, runs: Mapping[str, Callable[[], Any]], num_steps: int, on_step: Callable[[int], None] = lambda i: None
    ) -> Measurement:
        def together(name: str) -> StepTimes:
            """A step that begins on all workers at once, from the same state: worker 0 also runs steps alone, which change buffers."""
            self._compared.rewind()
            self._workers.agree("whose turn it is", (name,))
            return _times(runs[name])

        return measure_on(self._workers, {name: partial(together, name) for name in runs}, num_steps=num_steps, on_step=on_step)

    def record(self, captured: CapturedStep, loaded: Loaded) -> MeasuredStep:
        if loaded.number is not None and len(loaded.fragments) == 1:
            self._tell({"do": "record", "number": loaded.number})
        return super().record(captured, loaded)

    def notes(self, loaded: Loaded) -> Sequence[str]:
        return (HANDED_OUT,)

    def _tell(self, command: Mapping[str, Any]) -> None:
        """The others do not go on where one has failed: raises what it failed with."""
        if self._failure is not None:
            raise self._failure
        self._workers.group.command(dict(command))

    def _tell_of(self, captured: CapturedStep, timeline: Timeline, do: str) -> None:
        self._tell({"do": do, "timeline": timeline_to_json(timeline), "parted": captured.call is not self._call})

    def _run_of(self, number: int | None) -> Callable[[], Any]:
        """This worker's part of a step that worker 0 times."""
        return _nothing if number is None else partial(self._compared.placed, self._loaded[number].fragments)

    def follow(self) -> None:
        """Workers other than 0: do as worker 0 does, until its end. Raises ExecutionError where it fails."""
        workers, compared, calls = self._workers, self._compared, [self._call]
        workers.follow(self._call.captured, self._call.step)
        while (command := workers.received())["do"] != "end":
            if command["do"] == "split":
                calls.append(self._call_in_parts(command["parts"]))
                workers.follow(calls[1].captured, calls[1].step)
            elif command["do"] == "load":
                call = calls[command["parted"]]
                self._load(call, timeline_from_json(call.captured.graph, command["timeline"]))
            elif command["do"] == "check":
                call = calls[command["parted"]]
                loaded = _loaded(call, timeline_from_json(call.captured.graph, command["timeline"]), workers)
                compared.rewind()
                with suppress(ParityError):  # worker 0 reports it
                    compared.placed(loaded.fragments)
            elif command["do"] == "measure":
                numbers = {UNPLACED: None, **command["numbers"]}
                self._in_turn({name: self._run_of(number) for name, number in numbers.items()}, command["num_steps"])
            else:
                _recorded(compared, self._loaded[command["number"]])


def _loaded(call: TrainingCall, timeline: Timeline, executor: ThreadExecutor | Workers) -> Loaded:
    phases = [loaded_phases(executor, timeline, call.captured, k, call.step) for k in range(len(call.fragments))]
    parts = zip(call.captured.fragments, phases, call.fragments, strict=True)
    loaded = [LoadedFragment(part, one, normalised_by_part(fragment.module, part.normalised)) for part, one, fragment in parts]
    return Loaded(call, executor, timeline, loaded)


def _recorded(compared: ComparedCall, loaded: Loaded) -> CallRecorder:
    """Run the call until its recorder has all it records."""
    (fragment,), call = loaded.fragments, loaded.call
    recorder = CallRecorder(loaded.executor, fragment.placed, loaded.timeline, call.captured, call.step.live)
    for _ in range(WARM_UP + RUNS + 1):
        compared.rewind()
        compared.placed([replace(fragment, recorder=recorder)])
    return recorder


def _nothing() -> None:
    """The part of worker 0's own steps that the others have."""


def _times(run: Callable[[], Any]) -> StepTimes:
    begin = time.perf_counter_ns()
    run()
    return StepTimes((time.perf_counter_ns() - begin) / 1000, ())
