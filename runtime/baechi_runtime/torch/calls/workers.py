"""A module's calls on worker processes, one per device: each runs the caller's whole script, and its device's share of every placed call.

What a call returns, the gradients, and the buffers that it changes go from the worker that computes them to all others, so that each
script goes on with the same numbers, as if it had run alone: its loss, optimizer, clipping and checkpoints need to know of nothing. The
price is that every worker holds all parameters and what the optimizer keeps for them; it is the activations that are spread.
"""

import atexit
import os
import sys
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baechi_ext.capture.torch_fragments import OUTPUTS, CapturedCall
from baechi_ext.capture.torch_joint import BoundOp
from baechi_ext.capture.torch_private import no_view
from baechi_ext.errors import BaechiError, ExecutionError, OptionError, ParityError
from baechi_ext.ir.plan import Plan
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.report.call_report import INTERRUPTED
from baechi_runtime.torch.calls.phases import CallStep, Phases
from baechi_runtime.torch.calls.placing import place_call
from baechi_runtime.torch.lowering.devices import TorchDevice, cpu_workers
from baechi_runtime.torch.lowering.op_error import OpError
from baechi_runtime.torch.lowering.ops import Exchange, Lowering, Slots, StepContext
from baechi_runtime.torch.lowering.program import in_phases
from baechi_runtime.torch.processes.channels import LostPeerError, Phase
from baechi_runtime.torch.processes.environment import is_worker, worker_place
from baechi_runtime.torch.processes.executor import ProcessExecutor, RankCapture, follow
from baechi_runtime.torch.processes.rank_part import logged
from baechi_runtime.torch.processes.sent_timeline import timeline_from_json, timeline_to_json
from baechi_runtime.torch.processes.shared_channels import channels_of
from baechi_runtime.torch.processes.worker_group import WorkerGroup

_LEAVING_SECONDS = 10.0
_PARAMETERS_EVERY = 50
"""Calls from one comparison of parameters to the next; inputs and incoming gradients are compared in every call."""
_JOINED: "list[Workers]" = []


class DriftError(ParityError):
    """Workers that run the same script have come to different numbers."""


class Workers:
    """This process among the workers that run one script. Has the interface of an executor, as far as a module's calls need it."""

    def __init__(self, group: WorkerGroup, devices: Sequence[TorchDevice]) -> None:
        self.group = group
        self.devices = tuple(devices)
        self.device = self.devices[group.rank]
        self.failed = False
        """True if a call failed: the others will not come to an end."""

    def place(self, request: TrainRequest, captured: CapturedCall, step: CallStep) -> Placement:
        """See `place_call`: worker 0 decides, the others help it to measure and are told. All must come with the same call.

        Raises ParityError where they do not, ExecutionError where worker 0 finds no plan, or is interrupted.
        """
        self.agree_on(captured, step)
        group = self.group
        if group.rank:
            self.follow(captured, step)
            return placement_from_json(captured, self.received())
        with self.telling(), ProcessExecutor(group, self.devices) as executor:
            placement = place_call(request, executor, captured, step)
        group.command({"error": INTERRUPTED} if placement.result.interrupted else placement_to_json(placement))
        return placement

    def agree_on(self, captured: CapturedCall, step: CallStep) -> None:
        """Raises ParityError where the workers have captured different calls, or are to run them with other numbers."""
        self.agree("the graph of a placed call", (captured.graph.fingerprint,))
        plain = [p.first_input + i for p in captured.fragments for i in range(p.num_args) if i not in p.state]
        self.agree("the arguments of a placed call", _checksums(step.inputs[number] for number in plain))
        self.agree("the parameters and buffers of a placed module", _checksums(step.live.values()))

    def follow(self, captured: CapturedCall, step: CallStep) -> None:
        """Workers other than 0: do their part while worker 0 measures with a ProcessExecutor."""
        replica = partial(step.replica, "cpu")
        follow(self.group, self.device, RankCapture(captured.graph, captured.binding, replica))  # type: ignore[arg-type]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Worker 0: tells the others where what is done inside fails."""
        try:
            yield
        except BaseException as e:
            self.group.command({"error": str(e) if isinstance(e, BaechiError) else type(e).__name__})
            raise

    def received(self) -> dict[str, Any]:
        """Worker 0's decision. Raises ExecutionError if it came to nothing."""
        value = self.group.next_command()
        if "error" in value:
            raise ExecutionError(f"worker 0 could not place the call: {value['error']}")
        return value

    def cpu_seconds(self) -> float:
        """CPU time that all workers have used. All ask at the same time."""
        used = torch.tensor([sum(os.times()[:2])], dtype=torch.float64)
        self._together(lambda: dist.all_reduce(used))
        return used.item()

    def load(self, timeline: Timeline, captured: CapturedCall, fragment: int, step: CallStep) -> "WorkerFragment":
        """This worker's share of a fragment of a placed call."""
        return WorkerFragment(self, timeline, captured, fragment, step)

    def agree(self, what: str, found: Iterable[str | int]) -> None:
        """Raises DriftError where another worker found something else, ExecutionError where one does not come in time."""
        own = torch.tensor([zlib.crc32(repr(tuple(found)).encode())])
        all_found = [torch.empty_like(own) for _ in range(self.group.size)]
        self._together(lambda: dist.all_gather(all_found, own))
        different = [rank for rank, other in enumerate(all_found) if not torch.equal(other, all_found[0])]
        if different:
            raise DriftError(
                f"{what} are not the same on worker 0 and worker {different[0]}; every worker runs the same script on the same data: "
                "seed what is random (torch.manual_seed) before the model and the DataLoader are made, and let no worker take a part "
                "of the data for itself"
            )

    def share(self, tensors: Sequence[Tensor], likes: Sequence[Tensor], source: int) -> list[Tensor]:
        """Give every worker the tensors that worker `source` has; elsewhere only their sizes and types must be known."""
        here = source == self.group.rank
        found: dict[int, Tensor] = dict(enumerate(tensors)) if here else {}
        for dtype in dict.fromkeys(like.dtype for like in likes):
            numbers = [i for i, like in enumerate(likes) if like.dtype == dtype]
            sizes = [likes[i].numel() for i in numbers]
            row = torch.cat([tensors[i].reshape(-1) for i in numbers]) if here else torch.empty(sum(sizes), dtype=dtype)
            self._together(partial(dist.broadcast, row, source))
            if not here:
                parts = zip(numbers, row.split(sizes), strict=True)
                found |= {i: part.clone().view(likes[i].shape) for i, part in parts}
        return [found[i] for i in range(len(likes))]

    def _together(self, exchange: Callable[[], Any]) -> None:
        try:
            exchange()
        except RuntimeError as e:
            raise LostPeerError(
                f"worker {self.group.rank} waited in vain for another one ({str(e).splitlines()[0][-120:]}); check whether all workers "
                "still run, and whether they make the same calls in the same order"
            ) from e

    def leave(self) -> None:
        """Leave at the end of the script. Worker 0, whose signs of life the others listen for, waits for them if all went well."""
        failed = self.failed or getattr(sys, "last_value", None) is not None
        if self.group.rank == 0 and not failed and self.group.size > 1:
            self._wait_for_the_others()
        elif self.group.rank:
            self._say_goodbye()
        self.group.__exit__(RuntimeError if failed else None)

    def _say_goodbye(self) -> None:
        try:
            self.group.store.set(f"bye {self.group.rank}", "")
        except RuntimeError:
            return  # the store is gone, and with it whoever would have waited

    def _wait_for_the_others(self) -> None:
        deadline = time.monotonic() + _LEAVING_SECONDS
        keys = [f"bye {rank}" for rank in range(1, self.group.size)]
        try:
            while not self.group.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.05)
        except RuntimeError:
            return


def several_workers() -> bool:
    """True if this process is one of several that torchrun, or --workers=process, started."""
    return is_worker() and worker_place()[1] > 1


def join_workers(num_devices: int, timeout_seconds: float) -> Workers:
    """This process's place among the workers; the same one every time.

    Raises OptionError where there are not as many workers as devices, or the script has a process group of its own; ExecutionError where
    the workers do not meet.
    """
    rank, size = worker_place()
    if size != num_devices:
        raise OptionError(f"{size} workers were started for {num_devices} devices; start one for each, or give devices={size}")
    if not _JOINED:
        if dist.is_initialized():
            raise OptionError(
                "this script has a process group of its own (torch.distributed.init_process_group), and placing needs one that all devices "
                "share; run the script without torchrun, or without its own process group"
            )
        devices = cpu_workers(size)
        group = WorkerGroup.join(timeout_seconds, devices[rank].torch_device)
        devices[rank].enter()
        _JOINED.append(Workers(group, devices))
        atexit.register(_JOINED[0].leave)
    return _JOINED[0]


def placement_to_json(placement: Placement) -> dict[str, Any]:
    """The message that `placement_from_json` takes."""
    return {"plan": placement.result.plan.to_json(), "timeline": timeline_to_json(placement.result.timeline)}


def placement_from_json(captured: CapturedCall, value: Mapping[str, Any]) -> Placement:
    """The placement that worker 0 sent. Raises ExecutionError where this worker simulates it in another way."""
    timeline = timeline_from_json(captured.graph, value["timeline"])
    plan = Plan.from_json(value["plan"], timeline.graph)
    return Placement(timeline.graph, None, PlanResult(plan, timeline), one_device_timeline(timeline.graph), None)


def _checksums(tensors: Iterable[Tensor]) -> list[int]:
    """A checksum of each tensor's content."""
    return [zlib.crc32(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data) if t.numel() else 0 for t in tensors]


@dataclass(frozen=True)
class _Handed:
    """Tensors that one worker hands to all others after a phase, by name."""

    source: int
    names: tuple[str | int, ...]
    likes: tuple[Tensor, ...]


class WorkerFragment(Phases):
    """This worker's share of a fragment of a module's call; all workers use theirs at the same time."""

    def __init__(self, workers: Workers, timeline: Timeline, call: CapturedCall, fragment: int, step: CallStep) -> None:
        super().__init__(timeline, call, fragment, step)
        self._workers = workers
        self._outputs_at, self._outputs = self._where_outputs_are()
        self._gradients = self._where_gradients_are()
        self._buffers = self._where_buffers_are()
        part = self._part
        self._within = part.forward_ops | part.backward_ops
        self._seeded = {int(v not in part.forward_ops): timeline.placement[v] for v in call.binding.seeded_ops if v in self._within}
        """Phase -> where its random numbers are drawn."""
        self._load()

    def _load(self) -> None:
        """All workers load a fragment at the same time."""
        self._calls = 0
        workers, timeline, call, fragment, part = self._workers, self._timeline, self._call, self._fragment, self._part
        binding, rank, device = call.binding, workers.group.rank, workers.device
        phases = [Phase(part.forward_ops, self._within), Phase(part.backward_ops, self._within)]
        self._channels = [channels_of(timeline, binding, workers.group, device, phase) for phase in phases]
        exchange = _Exchange(timeline, part.forward_ops, [self._watch.exchange(ends, p) for p, ends in enumerate(self._channels)])
        pre_hooks = {**self._channels[0].pre_hooks, **self._channels[1].pre_hooks}
        context = StepContext(timeline.graph, binding, self._step, exchange, {}, None, pre_hooks, state_in_slots=True)  # type: ignore[arg-type]
        lowering = Lowering(context, device, rank)
        here = in_phases(timeline, call.phases)[2 * fragment : 2 * fragment + 2]
        programs = [lowering.lower(programs[rank]) for programs in here]
        marked = [logged(program, timeline, workers.group.crash_log, rank) for program in programs]
        self._programs = [self._watch.program(program, phase) for phase, program in enumerate(marked)]
        self._state_slots = self._slots_of(lowering)

    def forward(self, args: Sequence[Tensor]) -> tuple[list[Tensor], list[Slots], StepTimes]:
        """See Phases. Raises DriftError where the workers' inputs, or every so many calls their parameters, differ."""
        with self._lock:
            begin_ns = self._begin(0)
            inputs = self._inputs(args)
            self._workers.agree("the arguments of a placed call", _checksums(inputs.values()))
            if self._calls % _PARAMETERS_EVERY == 0:
                self._workers.agree("the parameters and buffers of a placed module", _checksums(args[i] for i in self._part.state))
            self._calls += 1
            self._step.inputs = inputs
            try:
                slots = self._watch.slots(max(program.num_slots for program in self._programs))
                for slot, argument in self._state_slots:
                    slots[slot] = args[argument]
                busy_us = self._run(0, slots, args)
                outputs = self._workers.share(self._step.outputs, self._outputs, self._outputs_at)
                return [no_view(t) for t in outputs], [slots], self._watch.times(0, begin_ns, (busy_us,))
            finally:
                self._step.inputs = {}
                self._step.forget()

    def backward(self, tangents: Sequence[Tensor | None], kept: list[Slots]) -> tuple[dict[int, Tensor], StepTimes]:
        """See Phases. Raises DriftError where the gradients that come in differ."""
        with self._lock:
            begin_ns = self._begin(1)
            self._workers.agree("the gradients of what a placed call returned", _checksums(t for t in tangents if t is not None))
            self._step.tangents = tangents
            try:
                busy_us = self._run(1, kept[0], ())
                gradients: dict[int, Tensor] = {}
                for handed in self._gradients:
                    own = [self._step.gradients[n] for n in handed.names] if handed.source == self._workers.group.rank else []
                    arguments = [self._argument_of[n] for n in handed.names]
                    gradients |= zip(arguments, self._workers.share(own, handed.likes, handed.source), strict=True)
                return {n: no_view(g) for n, g in gradients.items()}, self._watch.times(1, begin_ns, (busy_us,))
            finally:
                kept[0].clear()
                self._step.forget()

    def _run(self, phase: int, slots: Slots, args: Sequence[Tensor]) -> float:
        """Run this worker's program of a phase, and bring buffers and random state up to date; for how long the device was busy."""
        start = time.process_time_ns()
        try:
            for post in self._channels[phase].at_start:
                post(slots)
            self._programs[phase].run(slots)
            self._channels[phase].finish()
        except OpError as e:
            raise ExecutionError(e.explain(self._workers.device.name, self._timeline.graph)) from e.cause
        for write in self._programs[phase].writes:
            write(slots)
        busy_us = (time.process_time_ns() - start) / 1000
        for handed in self._buffers if phase == 0 else ():
            live = [args[self._argument_of[n]] for n in handed.names]
            for buffer, value in zip(live, self._workers.share(live, live, handed.source), strict=True):
                if value is not buffer:
                    buffer.data.copy_(value)
        if phase in self._seeded:
            (state,) = self._workers.share([torch.get_rng_state()], [torch.get_rng_state()], self._seeded[phase])
            torch.set_rng_state(state)
        return busy_us

    def _begin(self, phase: int) -> int:
        self._watch.begin(phase, lambda _, begin: begin())
        return time.monotonic_ns()

    def _where_outputs_are(self) -> tuple[int, list[Tensor]]:
        ops, forward = self._call.binding.ops, self._part.forward_ops
        (v, bound), *_ = ((v, ops[v]) for v in forward if self._call.graph.ops[v].op == OUTPUTS)
        return self._timeline.placement[v], [node.meta["val"] for node in bound.outputs]

    def _where_gradients_are(self) -> list[_Handed]:
        found: dict[int, dict[str | int, Tensor]] = {}
        for v in sorted(self._part.backward_ops):
            bound = self._call.binding.ops[v]
            name = self._gradient_of(bound)
            if name is not None:
                found.setdefault(self._timeline.placement[v], {})[name] = bound.gradients[0].meta["val"]
        return [_Handed(source, tuple(likes), tuple(likes.values())) for source, likes in sorted(found.items())]

    def _gradient_of(self, bound: BoundOp) -> str | int | None:
        return self._call.binding.state_names[bound.parameters[0]] if bound.parameters else bound.input_gradient

    def _where_buffers_are(self) -> list[_Handed]:
        binding = self._call.binding
        found: dict[int, list[str]] = {}
        for v in sorted(binding.buffer_writes):
            if v in self._part.forward_ops:
                found.setdefault(self._timeline.placement[v], []).extend(name for name, _ in binding.buffer_writes[v])
        return [_Handed(source, tuple(names), ()) for source, names in sorted(found.items())]


class _Exchange:
    """The channels of both phases: each tensor is sent and received in the phase that computes it."""

    def __init__(self, timeline: Timeline, forward: Collection[int], channels: Sequence[Exchange]) -> None:
        self._tensors, self._forward, self._channels = timeline.graph.tensors, forward, channels

    def _of(self, tensor: int) -> Exchange:
        return self._channels[self._tensors[tensor].producer not in self._forward]

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        """See `Exchange`."""
        return self._of(tensor).giver(tensor, target, gone)

    def taker(self, tensor: int, target: int) -> Callable[[], Tensor]:
        """See `Exchange`."""
        return self._of(tensor).taker(tensor, target)
