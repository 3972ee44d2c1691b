"""Fragments of placed calls whose two passes are a CUDA graph each, once they are warm: a launch instead of some microseconds of the host
for every op.

A graph reads and writes the same memory each time. So inputs and incoming gradients are copied into tensors of its own, outputs and
gradients out of them; parameters and buffers are read where they are. What the forward pass keeps for the backward pass is there until the
next forward pass: a call that comes before the backward pass of the last one runs op by op, as does one whose parameters have moved.
All that memory stays taken while a module is placed, so there are graphs only where the GPUs have plenty.
The caller's streams and the graph's wait for each other; the host goes on, as it does unplaced.
"""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from baechi_ext.capture.torch_fragments import CapturedCall
from baechi_ext.capture.torch_private import copy_together
from baechi_ext.errors import ExecutionError, first_line
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.measure.turns import disturb_timed
from baechi_runtime.torch.calls.capturing import CallStep
from baechi_runtime.torch.calls.phases import PhasedFragment
from baechi_runtime.torch.lowering.devices import CudaDevice, settle
from baechi_runtime.torch.lowering.op_error import OpError
from baechi_runtime.torch.lowering.ops import Slots
from baechi_runtime.torch.streams.executor import StreamExecutor, WalkTogether
from baechi_runtime.torch.streams.step_graph import too_large, why_not_captured
from baechi_runtime.torch.streams.walk import WARM_UP_STEPS, Walk
from baechi_runtime.torch.threads.executor import RunTogether

K = TypeVar("K")
FOREIGN = "it calls ops of others, whose Python a graph would run once"
_MOST_CAPTURES = 3
"""Parameters that move more often are taken to move with every step."""


class _Kept(list[Slots]):
    """The slots as a graph of the forward pass has left them for the backward pass. A list of its own, so that it can be held weakly."""

    __slots__ = ("__weakref__",)


@dataclass
class _Graphs:
    """Both passes, and the tensors that they read and write."""

    addresses: tuple[int, ...]
    """Those of the parameters and buffers."""
    inputs: dict[int, Tensor]
    """By argument."""
    forward: Callable[[], None] | None = None
    outputs: list[Tensor] = field(default_factory=list)
    slots: list[Slots] = field(default_factory=list)
    tangents: list[Tensor] = field(default_factory=list)
    backward: Callable[[], None] | None = None
    skipped: frozenset[int] = frozenset()
    """The ops that the backward pass is without."""
    gradients: dict[str | int, Tensor] = field(default_factory=dict)


class GraphedFragment(PhasedFragment):
    """A fragment on the CUDA devices of this process. `why_not` says why its passes are no graphs for good, where they are none."""

    def __init__(self, executor: StreamExecutor, timeline: Timeline, call: CapturedCall, fragment: int, step: CallStep) -> None:
        self.why_not = why_not_captured(timeline, call.binding, {}) or (FOREIGN if call.fragments[fragment].calls_others else "")
        self._graphs: _Graphs | None = None
        self._captures = 0
        self._read_out: list[torch.cuda.Event] = []
        """Those behind which callers have copied out of the graphs what the last replays left there."""
        self._kept: weakref.ref[_Kept] | None = None
        """That of the call whose backward pass is still to come."""
        super().__init__(executor, timeline, call, fragment, step)
        seeded = call.binding.seeded_ops
        self._origin = executor.devices[timeline.placement[seeded[0]] if seeded else 0]

    @property
    def note(self) -> str:
        """The outcome of capturing, in words."""
        if self.why_not:
            return f"no CUDA graphs of its passes: {self.why_not}"
        return f"CUDA graphs of its passes{'' if self._graphs else f', once they have run {WARM_UP_STEPS} times'}"

    def _load(self) -> None:
        super()._load()
        self._graphs, self._captures = None, 0

    def _refuse(self, why: str) -> None:
        """From now on the passes run op by op; what their graphs keep is freed."""
        self.why_not, self._graphs = why, None

    def _walk(self, phase: int, skipped: frozenset[int] = frozenset()) -> Walk:
        return cast(WalkTogether, self._together_without(phase, skipped)).walk

    @property
    def _is_warm(self) -> bool:
        backward = (self._together[1], *self._skipping.values())
        runs = max(cast(WalkTogether, together).walk.runs for together in backward)
        return min(runs, self._walk(0).runs) >= WARM_UP_STEPS

    def forward(self, args: Sequence[Tensor]) -> tuple[list[Tensor], list[Slots], StepTimes]:
        """See Phases."""
        with self._executor.turn, self._lock:
            graphs = self._graphs_for(args)
            if graphs is not None and graphs.forward is not None:
                begin_ns = time.monotonic_ns()
                given = [(own, args[i]) for i, own in graphs.inputs.items()]
                outputs = self._replayed(graphs.forward, given, dict(enumerate(graphs.outputs)))
                if outputs is not None:
                    kept = _Kept(slots.copy() for slots in graphs.slots)
                    self._kept = weakref.ref(kept)
                    return list(outputs.values()), kept, self._watch.times(0, begin_ns, self._walk(0).busy_us)
            del graphs  # what it keeps may be needed
            return super().forward(args)

    def backward(self, tangents: Sequence[Tensor | None], kept: list[Slots]) -> tuple[dict[int, Tensor], StepTimes]:
        """See Phases."""
        with self._executor.turn, self._lock:
            graphs, skipped = self._graphs, self._not_reached_from(tangents)
            if graphs is None or self._kept is None or self._kept() is not kept:
                return super().backward(tangents, kept)  # of a call op by op, or to be run once more (retain_graph=True)
            self._kept = None
            if graphs.backward is None and self._walk(1, skipped).runs >= WARM_UP_STEPS:
                self._capture_backward(graphs, skipped)
            if graphs.backward is not None and graphs.skipped == skipped:
                begin_ns = time.monotonic_ns()
                gradients = self._replayed(graphs.backward, list(zip(graphs.tangents, tangents, strict=True)), graphs.gradients)
                if gradients is not None:
                    times = self._watch.times(1, begin_ns, self._walk(1, skipped).busy_us)
                    kept.clear()
                    return {self._argument_of[name]: value for name, value in gradients.items()}, times
            del graphs
            return super().backward(tangents, kept)

    def _replayed(
        self, replay: Callable[[], None], given: Sequence[tuple[Tensor, Tensor | None]], results: Mapping[K, Tensor]
    ) -> dict[K, Tensor] | None:
        """Replays a pass for the values `given` for its own tensors (None: zeros), amid the work of the caller's streams; copies of its
        results. None, and nothing has run, where these find no memory. A caller may come on other streams than the one before, whose copies
        are waited for, too."""
        streams, compute = self._callers_streams(), self._origin.compute
        for stream in streams:
            stream.wait_stream(compute)
        with torch.no_grad():
            try:
                copies = {name: torch.empty_like(value) for name, value in results.items() if value.layout == torch.strided}
            except torch.OutOfMemoryError:
                self._refuse("there is no memory for copies of what they compute")
                return None
            for own, value in given:
                own.zero_() if value is None else own.copy_(value)
            for stream in streams:
                compute.wait_stream(stream)
            for event in self._read_out:
                compute.wait_event(event)
            with self._drawing_as_written():
                replay()
            for stream in streams:
                stream.wait_stream(compute)
            for device in {copy.device for copy in copies.values()}:
                here = [name for name, copy in copies.items() if copy.device == device]
                copy_together([copies[name] for name in here], [results[name] for name in here])
            found = {name: copies[name] if name in copies else value.clone() for name, value in results.items()}
        self._read_out = [stream.record_event() for stream in streams]
        return found

    def _graphs_for(self, args: Sequence[Tensor]) -> _Graphs | None:
        """The graphs for a call with these arguments; None where it has to run op by op."""
        waiting = self._kept is not None and self._kept() is not None
        if self.why_not or waiting or not self._is_warm or not self._watch.is_off:
            return None
        addresses = tuple(args[i].data_ptr() for i in self._part.state)
        graphs = self._graphs
        if graphs is not None and graphs.addresses == addresses:
            alike = all((args[i].shape, args[i].dtype) == (own.shape, own.dtype) for i, own in graphs.inputs.items())
            return graphs if alike else None
        graphs = self._graphs = None  # before others are made
        elsewhere = {args[i].device for i in self._part.state} - {device.torch_device for device, _, _ in self._programs}
        if elsewhere or self._captures == _MOST_CAPTURES:
            self._refuse(f"its parameters are on {elsewhere.pop()}" if elsewhere else "its parameters move")
        elif large := too_large(self._timeline, self._executor.devices[: len(self._timeline.cluster)], self._copied_bytes(args)):
            self._refuse(large)
        if self.why_not:
            return None
        self._captures += 1
        self._graphs = self._captured_forward(addresses, args)
        return self._graphs

    def _copied_bytes(self, args: Sequence[Tensor]) -> dict[torch.device, float]:
        """On each device the bytes of the gradients that the graph of the backward pass has, and of their copies for the caller."""
        copied: dict[torch.device, float] = defaultdict(float)
        for value in (args[i] for i in self._part.state if args[i].requires_grad):
            copied[value.device] += 2.0 * value.nbytes
        return copied

    def _captured_forward(self, addresses: tuple[int, ...], args: Sequence[Tensor]) -> _Graphs | None:
        home = next((a.device for a in args if a.is_cuda), self._origin.torch_device)
        graphs = _Graphs(addresses, {i: torch.empty_like(args[i], device=home, requires_grad=False) for i, _ in self._plain})

        def work() -> None:
            with torch.no_grad():
                self._step.inputs = {number: graphs.inputs[i] for i, number in self._plain}
                for own in self._programs:
                    cast(CudaDevice, own[0]).take_turn()
                    graphs.slots.append(self._filled(*own, args))
                self._walk(0).give(graphs.slots)
                graphs.outputs = list(self._step.outputs)
                for own, slots in zip(self._programs, graphs.slots, strict=True):
                    cast(CudaDevice, own[0]).take_turn()
                    self._write_buffers(*own, slots, args)

        graphs.forward = self._captured(self._together[0], work)
        return None if graphs.forward is None else graphs

    def _capture_backward(self, graphs: _Graphs, skipped: frozenset[int]) -> None:
        graphs.skipped = skipped
        differentiable = zip(graphs.outputs, self._part.differentiable, strict=True)
        graphs.tangents = [torch.empty_like(output) for output, is_differentiable in differentiable if is_differentiable]

        def work() -> None:
            self._step.tangents = graphs.tangents
            self._walk(1, skipped).give([slots.copy() for slots in graphs.slots])
            graphs.gradients = dict(self._step.gradients)

        graphs.backward = self._captured(self._together_without(1, skipped), work)

    def _captured(self, together: RunTogether, work: Callable[[], None]) -> Callable[[], None] | None:
        """The graph of a pass; None where it can be none, and `why_not` says why."""
        settle(self._executor.devices)
        disturb_timed()
        try:
            return cast(WalkTogether, together).captured(work, self._origin)
        except ExecutionError as e:
            cause = e.__cause__.cause if isinstance(e.__cause__, OpError) else e.__cause__
            if not isinstance(cause, RuntimeError):
                raise
            self._refuse(first_line(cause, type(cause).__name__))
            return None
        finally:
            self._step.inputs = {}
            self._step.forget()
