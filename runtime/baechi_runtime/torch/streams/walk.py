"""The programs of several devices as one, in the order of the plan: what one host thread gives to all of them, and tensors on their way
between them. The host waits for none of these: streams do, for events."""

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from baechi_ext.errors import BaechiError
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.turns import disturb_timed
from baechi_runtime.torch.lowering.devices import CudaDevice
from baechi_runtime.torch.lowering.op_error import OpError, OpFailure
from baechi_runtime.torch.lowering.ops import Action, LoweredProgram, Segment, Slots
from baechi_runtime.torch.lowering.program import moves_nothing

WARM_UP_STEPS = 3
"""The first step makes what ops make once (workspaces, optimizer states); in the others ops are timed, the second time as the host was seen
to take its time. The fourth may be a graph."""
_HELD, _HELD_US = 32, 2000.0
"""Ops that a device is held back for, and microseconds that these take the host, at most, so that the host is ahead of it: a stream takes
some 1,000 kernels, of at least 2 us each, before its host has to wait."""
_FIRST_US = 100.0
"""The host's time for an op that it has not been seen to give."""
_LONGEST_US = 50_000.0
"""No device is held back for longer: kernels that are loaded only now wait for it, and would be taken for a slow host."""
Copy = tuple[torch.Tensor, torch.cuda.Event]
"""A tensor, and the event behind which it is there."""
_Given = tuple[int, int | None, Action]
"""A device, an op of it (None: no op's), and what is done for that."""


class Handovers:
    """An Exchange whose copies begin as soon as a tensor is computed. The sender keeps it until the copy is predicted to be done, and then
    waits for that on its own stream; with `phases` until the phase is over."""

    def __init__(self, timeline: Timeline, devices: Sequence[CudaDevice], *, phases: bool = False) -> None:
        self._timeline, self._devices = timeline, devices
        self._here: dict[tuple[int, int], Copy] = {}
        self._going: dict[tuple[int, int], Copy] = {}
        self.pre_hooks: dict[int, tuple[Action, ...]] = {}
        if not phases:
            self._let_go_when_predicted()

    def _let_go_when_predicted(self) -> None:
        order, start_us = self._timeline.device_order(), self._timeline.start_us
        position = {v: i for ops in order for i, v in enumerate(ops)}
        for sent in self._timeline.transfers:
            here = order[sent.source]
            made_at = position[self._timeline.graph.tensors[sent.tensor].producer]
            after = max(made_at + 1, bisect_left(here, sent.end_us, key=start_us.__getitem__))
            if after < len(here) and not moves_nothing(self._timeline.graph.tensors[sent.tensor]):
                hook = partial(self._let_go, sent.source, (sent.tensor, sent.target))
                self.pre_hooks[here[after]] = (*self.pre_hooks.get(here[after], ()), hook)

    def _let_go(self, source: int, sent: tuple[int, int], _: Any = None) -> None:
        _, done = self._going.pop(sent)
        self._devices[source].compute.wait_event(done)

    def begin(self) -> None:
        """Before a step, or a phase of one, with all devices idle; what a failed one left is dropped."""
        self._here.clear()
        self._going.clear()
        for device in self._devices:
            device.begin()

    def end(self) -> None:
        """After it: what comes next on each device comes after its copies."""
        for (tensor, target) in list(self._going):
            self._let_go(self._source(tensor), (tensor, target))

    def _source(self, tensor: int) -> int:
        return self._timeline.placement[self._timeline.graph.tensors[tensor].producer]

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[torch.Tensor], None]:
        """A function that begins to send a value of `tensor` to device `target`. `gone` is not called: the host does not know."""
        key, source, taker = (tensor, target), self._devices[self._source(tensor)], self._devices[target]
        here, going = self._here, self._going
        if moves_nothing(self._timeline.graph.tensors[tensor]):

            def tell(token: torch.Tensor) -> None:
                here[key] = token, source.compute.record_event()

            return tell

        def give(value: torch.Tensor) -> None:
            copy, done = taker.take_in(value, source)
            here[key], going[key] = (copy, done), (value, done)

        return give

    def taker(self, tensor: int, target: int) -> Callable[[], torch.Tensor]:
        """A function that returns the value of `tensor` on device `target`, whose stream waits for it."""
        key, here, wait = (tensor, target), self._here, self._devices[target].compute.wait_event

        def take() -> torch.Tensor:
            value, done = here.pop(key)
            wait(done)
            return value

        return take


class OpTimer:
    """Times the ops of a device. It is held back for some of them at a time, so that it does not wait for the host in the midst of one:
    for twice as long as these took the host before, by op."""

    def __init__(self, device: CudaDevice, seen_us: Mapping[int, float] | None = None) -> None:
        self._device = device
        self._seen_us = seen_us or {}
        self._holds: dict[int, float] = {}
        self._hosts: dict[int, float] = {}
        self._marks: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def timed(self, program: LoweredProgram) -> LoweredProgram:
        """The program, each of its ops timed."""
        first, ops = -1, 0
        for op in (segment.op for segment in program.segments):
            host_us = self._seen_us.get(op, _FIRST_US)
            if first < 0 or ops == _HELD or self._holds[first] + 2 * host_us > 2 * _HELD_US:
                first, ops = op, 0
                self._holds[first] = 0.0
            ops += 1
            self._holds[first] = min(self._holds[first] + 2 * host_us, _LONGEST_US)
        segments = (Segment(s.op, (), (), partial(self._run, s), ()) for s in program.segments)
        return replace(program, segments=tuple(segments))

    def _run(self, segment: Segment, slots: Slots) -> None:
        device = self._device
        if segment.op in self._holds:
            device.synchronize()  # what is held back already would fill its queue
            device.hold(self._holds[segment.op])
        begin = time.perf_counter_ns()
        for action in segment.arrivals:
            action(slots)
        arrived_ns = time.perf_counter_ns() - begin
        start, begin = device.mark(), time.perf_counter_ns()
        for action in (*segment.views, segment.compute, *segment.after):
            action(slots)
        self._hosts[segment.op] = (arrived_ns + time.perf_counter_ns() - begin) / 1000
        self._marks[segment.op] = start, device.mark()

    def times(self) -> dict[int, tuple[float, float]]:
        """Once the device is done: op -> microseconds that it takes the device, waits left out, and those that it takes the host."""
        return {op: (self._device.elapsed_us(*marks), self._hosts[op]) for op, marks in self._marks.items()}

    def busy_us(self) -> float:
        """The microseconds of all ops."""
        return sum(us for us, _ in self.times().values())


class Walk:
    """One way through the programs of all devices. Each device's slots are its own; all slots of a step go together. The runs after the
    first are timed, op by op, until the steps are warm."""

    def __init__(self, timeline: Timeline, handovers: Handovers, programs: Sequence[LoweredProgram], devices: Sequence[CudaDevice]) -> None:
        self._timeline, self._handovers, self._programs, self._devices = timeline, handovers, programs, devices
        self._parts = any(d.share > 1 for d in devices)
        self.runs = 0
        self._host_us = {v: op.issue_us for v, op in enumerate(timeline.graph.ops) if op.issue_us}
        """The least microseconds that each op was seen to take the host."""
        self.busy_us = (0.0,) * len(programs)
        """Microseconds that each device took for its ops when they were timed: their sum, waits left out."""
        self._actions = self._actions_of(programs)

    def _actions_of(self, programs: Sequence[LoweredProgram]) -> list[_Given]:
        """The programs' instructions, in the order of the plan."""
        segments = {segment.op: segment for program in programs for segment in program.segments}
        actions: list[_Given] = []
        for s in (segments[v] for v in self._timeline.started if v in segments):
            d = self._timeline.placement[s.op]
            actions += [(d, s.op, action) for action in (*s.arrivals, *s.views, s.compute, *s.after)]
        actions += [(d, None, action) for d, program in enumerate(programs) for action in program.epilogue]
        return self._on_their_streams(actions)

    def _on_their_streams(self, actions: list[_Given]) -> list[_Given]:
        """The actions, and where parts of one GPU take turns, the change from one part's stream to the other's."""
        if not self._parts:
            return actions
        found: list[_Given] = []
        current = -1
        for device, op, action in actions:
            if device != current:
                current = device
                found.append((device, op, self._devices[device].take_turn))
            found.append((device, op, action))
        return found

    def run(self, slots: Sequence[Slots]) -> Sequence[float]:
        """Runs the programs, and waits for the devices; returns `busy_us`. Raises OpFailure where an op fails."""
        self.runs += 1
        if self.runs <= WARM_UP_STEPS:
            disturb_timed()
        if 1 < self.runs <= WARM_UP_STEPS:
            self.time_ops(slots)
        else:
            with self._explained():
                self.give(slots)
                self.synchronize()
        return self.busy_us

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OpError as e:
            where = 0 if e.op is None else self._timeline.placement[e.op]
            raise OpFailure(e.explain(self._devices[where].name, self._timeline.graph)) from e.cause

    def synchronize(self) -> None:
        for device in self._devices:
            device.synchronize()

    def give(self, slots: Sequence[Slots]) -> None:
        """Gives the devices all of the step's work. Raises OpError, naming the op, for whatever an instruction raises; the project's own
        errors pass."""
        self._give(self._actions, slots)

    def _give(self, actions: Sequence[_Given], slots: Sequence[Slots]) -> None:
        self._handovers.begin()
        device, op = 0, None
        try:
            with torch.no_grad():
                for device, op, action in actions:  # noqa: B007 - read where an instruction fails
                    action(slots[device])
        except BaechiError:
            raise
        except Exception as e:
            raise OpError(op, e, self._programs[device].live(slots[device])) from e
        self._handovers.end()

    def time_ops(self, slots: Sequence[Slots]) -> dict[int, tuple[float, float]]:
        """Runs them op after op; see OpTimer.times. Raises OpFailure."""
        timers = [OpTimer(device, self._host_us) for device in self._devices]
        actions = self._actions_of([timer.timed(program) for timer, program in zip(timers, self._programs, strict=True)])
        with self._explained():
            self._give(actions, slots)
            self.synchronize()
        self.busy_us = tuple(timer.busy_us() for timer in timers)
        times = {op: times for timer in timers for op, times in timer.times().items()}
        self._host_us = {op: min(host_us, self._host_us.get(op, host_us)) for op, (_, host_us) in times.items()}
        return times
