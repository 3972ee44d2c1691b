"""A module's calls on worker processes, one per device: each runs the caller's whole script, and its device's share of every placed call.

What a call returns, the gradients, and the buffers that it changes go from the worker that computes them to all others, so that each
script goes on with the same numbers, as if it had run alone: its loss, optimizer, clipping and checkpoints need to know of nothing. The
price is that every worker holds all parameters and what the optimizer keeps for them; it is the activations that are spread.
"""

import atexit
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from baechi_ext.capture.torch_joint import BoundOp
from baechi_ext.capture.torch_module import CapturedCall
from baechi_ext.capture.torch_private import no_view
from baechi_ext.errors import BaechiError, ExecutionError, OptionError, ParityError
from baechi_ext.ir.plan import Plan
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline, simulate
from runtime.calls.phases import ModuleStep
from runtime.calls.placing import Placement, place_call
from runtime.processes.channels import Channels, LostPeerError
from runtime.processes.executor import ProcessExecutor, costs_of, follow, with_costs
from runtime.processes.worker_group import WorkerGroup, is_worker, worker_place
from runtime.program import in_two_phases, one_device_timeline
from runtime.script_report import INTERRUPTED
from runtime.thread_executor import StepTimes
from runtime.torch_devices import TorchDevice, cpu_workers
from runtime.torch_ops import LoweredProgram, Lowering, OpError, Slots, StepContext
from runtime.train_request import TrainRequest

W = TypeVar("W", bound="WorkerPhases")
_LEAVING_SECONDS = 10.0
_JOINED: "list[Workers]" = []


class Workers:
    """This process among the workers that run one script. Has the face of an executor, as far as a module's calls ask for it."""

    def __init__(self, group: WorkerGroup, devices: Sequence[TorchDevice]) -> None:
        self.group = group
        self.devices = tuple(devices)
        self.device = self.devices[group.rank]
        self.failed = False
        """Whether a call failed: the others will not come to an end."""

    def place(self, request: TrainRequest, captured: CapturedCall, step: ModuleStep) -> Placement:
        """See `place_call`: worker 0 decides, the others help it to measure and are told. All must come with the same call.

        Raises ParityError where they do not, ExecutionError where worker 0 finds no plan, or is interrupted.
        """
        self.agree_on(captured, step)
        group = self.group
        if group.rank:
            self.follow(captured, step)
            return told_placement(captured, self.told())
        try:
            with ProcessExecutor(group, self.devices) as executor:
                placement = place_call(request, executor, captured, step)
        except BaseException as e:
            group.command({"error": str(e) if isinstance(e, BaechiError) else type(e).__name__})
            raise
        group.command({"error": INTERRUPTED} if placement.result.interrupted else telling(placement.result))
        return placement

    def agree_on(self, captured: CapturedCall, step: ModuleStep) -> None:
        """Raises ParityError where the workers have captured different calls, or are to run them with other numbers."""
        self.agree("the graph of a placed call", (captured.graph.fingerprint,))
        self.agree("the arguments of a placed call", _checksums(step.inputs))
        self.agree("the parameters and buffers of a placed module", _checksums(step.live.values()))

    def follow(self, captured: CapturedCall, step: ModuleStep) -> None:
        """What workers other than 0 do while that one measures with a ProcessExecutor."""
        replica = partial(step.replica, "cpu")
        follow(self.group, self.device, captured.graph, captured.binding, replica)  # type: ignore[arg-type]

    def told(self) -> dict[str, Any]:
        """What worker 0 has decided. Raises ExecutionError where it came to nothing."""
        said = self.group.next_command()
        if "error" in said:
            raise ExecutionError(f"worker 0 could not place the call: {said['error']}")
        return said

    def cpu_seconds(self) -> float:
        """CPU time that all workers have used. All ask at the same time."""
        used = torch.tensor([sum(os.times()[:2])], dtype=torch.float64)
        self._together(lambda: dist.all_reduce(used))
        return used.item()

    def load(self, timeline: Timeline, captured: CapturedCall, step: ModuleStep) -> "WorkerPhases":
        """This worker's share of a placed call."""
        return WorkerPhases(self, timeline, captured, step)

    def agree(self, what: str, found: Iterable[str | int]) -> None:
        """Raises ParityError where another worker found something else, ExecutionError where one does not come in time."""
        own = torch.tensor([zlib.crc32(repr(tuple(found)).encode())])
        all_found = [torch.empty_like(own) for _ in range(self.group.size)]
        self._together(lambda: dist.all_gather(all_found, own))
        different = [rank for rank, other in enumerate(all_found) if not torch.equal(other, all_found[0])]
        if different:
            raise ParityError(
                f"{what} are not the same on worker 0 and worker {different[0]}; every worker runs the same script on the same data: "
                "seed what is random (torch.manual_seed) before the model and the DataLoader are made, and let no worker take a part "
                "of the data for itself"
            )

    def share(self, tensors: Sequence[Tensor], likes: Sequence[Tensor], source: int) -> list[Tensor]:
        """On every worker the tensors that worker `source` has, of which only sizes and types must be known elsewhere."""
        here = source == self.group.rank
        found: dict[int, Tensor] = dict(enumerate(tensors)) if here else {}
        for dtype in dict.fromkeys(like.dtype for like in likes):
            numbers = [i for i, like in enumerate(likes) if like.dtype == dtype]
            sizes = [likes[i].numel() for i in numbers]
            row = torch.cat([tensors[i].reshape(-1) for i in numbers]) if here else torch.empty(sum(sizes), dtype=dtype)
            self._together(lambda row=row: dist.broadcast(row, source))
            if not here:
                parts = zip(numbers, row.split(sizes), strict=True)
                found |= {i: part.clone().view(likes[i].shape) for i, part in parts}
        return [found[i] for i in range(len(likes))]

    def _together(self, exchange: Callable[[], Any]) -> None:
        try:
            exchange()
        except RuntimeError as e:
            raise LostPeerError(
                f"worker {self.group.rank} waited in vain for another one ({str(e).splitlines()[0][-120:]}); see whether all workers still "
                "run, and whether they make the same calls in the same order"
            ) from e

    def leave(self) -> None:
        """At the end of the script. Worker 0, whose signs of life the others listen for, waits for them where all went well."""
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
    """Whether this process is one of several that torchrun, or --workers=process, started."""
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


def telling(result: PlanResult) -> dict[str, Any]:
    """What `told_placement` takes."""
    timeline = result.timeline
    return {"plan": result.plan.to_json(), "costs": costs_of(timeline.graph), "started": list(timeline.started)}


def told_placement(captured: CapturedCall, said: Mapping[str, Any]) -> Placement:
    """The placement as worker 0 told it. Raises ExecutionError where this worker simulates it in another way."""
    graph = with_costs(captured.graph, said["costs"])
    plan = Plan.from_json(said["plan"], graph)
    rank_of = {v: i for i, v in enumerate(said["started"])}
    timeline = simulate(graph, plan.cluster, plan.placement, [rank_of[v] for v in range(len(graph))])
    if list(timeline.started) != said["started"]:
        raise ExecutionError("this worker simulates the plan in another order than worker 0; are all workers of one version?")
    return Placement(graph, None, PlanResult(plan, timeline), one_device_timeline(graph), None)


def _checksums(tensors: Iterable[Tensor]) -> list[int]:
    """A number for the content of each."""
    return [zlib.crc32(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if t.numel() else 0 for t in tensors]


@dataclass(frozen=True)
class _Handed:
    """What one worker hands to all others after a phase: so many tensors, by what they are called."""

    source: int
    names: tuple[str | int, ...]
    likes: tuple[Tensor, ...]


class WorkerPhases:
    """This worker's share of a module's call; the same face as PhasedStep, which all workers use at the same time."""

    def __init__(
        self, workers: Workers, timeline: Timeline, call: CapturedCall, step: ModuleStep, lock: "threading.Lock | None" = None
    ) -> None:
        """`lock` is held while a phase runs."""
        self._workers, self._timeline, self._call, self._step = workers, timeline, call, step
        self._lock = threading.Lock() if lock is None else lock
        binding, rank, device = call.binding, workers.group.rank, workers.device
        later = frozenset(range(len(binding.ops))) - binding.forward_ops
        self._channels = [self._made_channels(phase, ops) for phase, ops in enumerate((binding.forward_ops, later))]
        exchange = _Exchange(timeline, binding.forward_ops, self._channels)
        posts = self._channels[0].posts | self._channels[1].posts
        context = StepContext(timeline.graph, binding, step, exchange, {}, None, posts)  # type: ignore[arg-type]
        lowering = Lowering(context, device, rank)
        programs = [lowering.lower(program) for program in in_two_phases(timeline, binding.forward_ops)[rank]]
        marked = [workers.group.board.marked(program, timeline.graph, rank) for program in programs]
        self._programs = [self._watched(program, phase) for phase, program in enumerate(marked)]
        self._outputs_at, self._outputs = self._where_outputs_are()
        self._gradients = self._where_gradients_are()
        self._buffers = self._where_buffers_are()
        seeded = [(v not in binding.forward_ops, timeline.placement[v]) for v in binding.seeded_ops]
        self._seeded = dict(seeded)
        """Phase -> where its random numbers are drawn."""

    def loaded_as(self, kind: type[W]) -> W:
        """See PhasedStep.loaded_as; all workers load it at the same time."""
        return kind(self._workers, self._timeline, self._call, self._step, self._lock)

    def _made_channels(self, phase: int, ops: Collection[int]) -> Channels:
        """What this worker sends and receives by in a phase, which is of these ops."""
        return Channels(self._timeline, self._call.binding, self._workers.group, self._workers.device, ops)

    def _watched(self, program: LoweredProgram, phase: int) -> LoweredProgram:
        """What is run of this worker's program."""
        return program

    def _slots(self, size: int) -> Slots:
        """Of this worker, empty."""
        return [None] * size

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Slots], StepTimes]:
        """See PhasedStep.forward. Raises ParityError where the workers' inputs differ."""
        with self._lock:
            begin_ns = self._begin(0)
            self._workers.agree("the arguments of a placed call", _checksums(inputs))
            self._step.inputs = tuple(inputs)
            try:
                slots = self._slots(max(program.num_slots for program in self._programs))
                busy_us = self._run(0, slots)
                outputs = self._workers.share(self._step.outputs, self._outputs, self._outputs_at)
                return [no_view(t) for t in outputs], [slots], self._times(0, begin_ns, (busy_us,))
            finally:
                self._step.inputs = ()
                self._step.forget()

    def backward(self, tangents: Sequence[Tensor | None], kept: list[Slots]) -> tuple[dict[str | int, Tensor], StepTimes]:
        """See PhasedStep.backward."""
        with self._lock:
            begin_ns = self._begin(1)
            self._step.tangents = tangents
            try:
                busy_us = self._run(1, kept[0])
                gradients: dict[str | int, Tensor] = {}
                for handed in self._gradients:
                    own = [self._step.gradients[n] for n in handed.names] if handed.source == self._workers.group.rank else []
                    gradients |= zip(handed.names, self._workers.share(own, handed.likes, handed.source), strict=True)
                return {n: no_view(g) for n, g in gradients.items()}, self._times(1, begin_ns, (busy_us,))
            finally:
                kept[0].clear()
                self._step.forget()

    def _run(self, phase: int, slots: Slots) -> float:
        """Runs this worker's program of a phase, and brings buffers and random state up to date; for how long the device was busy."""
        start = time.process_time_ns()
        try:
            for post in self._channels[phase].at_start:
                post(slots)
            self._programs[phase].run(slots)
            self._channels[phase].finish()
        except OpError as e:
            raise ExecutionError(e.explain(self._workers.device.name, self._timeline.graph)) from e.cause
        busy_us = (time.process_time_ns() - start) / 1000
        for handed in self._buffers[phase]:
            live = [self._step.live[str(n)] for n in handed.names]
            for buffer, value in zip(live, self._workers.share(live, live, handed.source), strict=True):
                if value is not buffer:
                    buffer.data.copy_(value)
        if phase in self._seeded:
            (state,) = self._workers.share([torch.get_rng_state()], [torch.get_rng_state()], self._seeded[phase])
            torch.set_rng_state(state)
        return busy_us

    def _begin(self, phase: int) -> int:
        return time.monotonic_ns()

    def _times(self, phase: int, begin_ns: int, busy_us: tuple[float, ...]) -> StepTimes:
        """Of a phase that has ended just now."""
        return StepTimes((time.monotonic_ns() - begin_ns) / 1000, busy_us)

    def _where_outputs_are(self) -> tuple[int, list[Tensor]]:
        (v, bound), *_ = ((v, bound) for v, bound in enumerate(self._call.binding.ops) if bound.outputs)
        return self._timeline.placement[v], [node.meta["val"] for node in bound.outputs]

    def _where_gradients_are(self) -> list[_Handed]:
        found: dict[int, dict[str | int, Tensor]] = {}
        for v, bound in enumerate(self._call.binding.ops):
            name = self._gradient_of(bound)
            if name is not None:
                found.setdefault(self._timeline.placement[v], {})[name] = bound.gradients[0].meta["val"]
        return [_Handed(source, tuple(likes), tuple(likes.values())) for source, likes in sorted(found.items())]

    def _gradient_of(self, bound: BoundOp) -> str | int | None:
        return self._call.binding.state_names[bound.parameters[0]] if bound.parameters else bound.input_gradient

    def _where_buffers_are(self) -> tuple[list[_Handed], list[_Handed]]:
        """Of each phase."""
        binding = self._call.binding

        def handed(ops: Collection[int]) -> list[_Handed]:
            found: dict[int, list[str]] = {}
            for v in ops:
                found.setdefault(self._timeline.placement[v], []).extend(name for name, _ in binding.buffer_writes[v])
            return [_Handed(source, tuple(names), ()) for source, names in sorted(found.items())]

        writing = sorted(binding.buffer_writes)
        return handed([v for v in writing if v in binding.forward_ops]), handed([v for v in writing if v not in binding.forward_ops])


class _Exchange:
    """The channels of both phases: each tensor is sent and received in the phase that computes it."""

    def __init__(self, timeline: Timeline, forward: Collection[int], channels: Sequence[Channels]) -> None:
        self._tensors, self._forward, self._channels = timeline.graph.tensors, forward, channels

    def _of(self, tensor: int) -> Channels:
        return self._channels[self._tensors[tensor].producer not in self._forward]

    def giver(self, tensor: int, target: int) -> Callable[[Any], None]:
        """See `Exchange`."""
        return self._of(tensor).giver(tensor, target)

    def taker(self, tensor: int, target: int) -> Callable[[], Tensor]:
        """See `Exchange`."""
        return self._of(tensor).taker(tensor, target)

    def abort(self) -> None:
        """See Channels.abort."""
