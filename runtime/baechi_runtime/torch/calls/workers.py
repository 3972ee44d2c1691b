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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baechi_ext.capture.torch_autocast import without_autocast
from baechi_ext.capture.torch_fragments import OUTPUTS, CapturedCall
from baechi_ext.capture.torch_private import dense_parts, no_view
from baechi_ext.errors import BaechiError, ExecutionError, OptionError, ParityError
from baechi_ext.ir.plan import Plan
from baechi_ext.place.common import PlanResult
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator, Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.turns import PLACED, PLAIN, Turns
from baechi_runtime.report.call_report import INTERRUPTED
from baechi_runtime.torch.calls.capturing import CallStep
from baechi_runtime.torch.calls.graphed import GraphedFragment
from baechi_runtime.torch.calls.phases import PhasedFragment, Phases
from baechi_runtime.torch.calls.placing import place_call
from baechi_runtime.torch.lowering.devices import TorchDevice, cpu_workers
from baechi_runtime.torch.lowering.op_error import explained
from baechi_runtime.torch.lowering.ops import LoweredProgram, Slots, StepContext
from baechi_runtime.torch.processes import heartbeat
from baechi_runtime.torch.processes.channels import LostPeerError, Phase, channels_of, reason
from baechi_runtime.torch.processes.environment import is_worker, worker_place
from baechi_runtime.torch.processes.executor import ProcessExecutor, RankCapture, follow
from baechi_runtime.torch.processes.rank_part import logged
from baechi_runtime.torch.processes.sent_timeline import timeline_from_json, timeline_to_json
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from baechi_runtime.torch.streams.executor import StreamExecutor
from baechi_runtime.torch.threads.executor import ThreadExecutor

_LEAVING = timedelta(seconds=10)
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
        self.process = os.getpid()
        self.failed = False
        """True if a call failed: the others will not come to an end."""
        # Libraries find no default group: they would add up over it what each worker has for itself, or give each a part of the data.
        dist.group.WORLD = None

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
        with without_autocast():
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
        used = torch.tensor([time.process_time()], dtype=torch.float64)
        self._together(lambda: dist.all_reduce(used, group=self.group.process_group))
        return used.item()

    def agree(self, what: str, found: Iterable[str | int]) -> None:
        """Raises DriftError where another worker found something else, ExecutionError where one does not come in time."""
        own = torch.tensor([zlib.crc32(repr(tuple(found)).encode())])
        all_found = [torch.empty_like(own) for _ in range(self.group.size)]
        self._together(lambda: dist.all_gather(all_found, own, self.group.process_group))
        different = [rank for rank, other in enumerate(all_found) if not torch.equal(other, all_found[0])]
        if different:
            raise DriftError(
                f"{what} are not the same on worker 0 and worker {different[0]}; every worker runs the same script on the same data: "
                "seed what is random (torch.manual_seed) before the model and the DataLoader are made, and let no worker take a part "
                "of the data for itself"
            )

    def share(self, tensors: Sequence[Tensor], likes: Sequence[Tensor], source: int) -> list[Tensor]:
        """Give every worker the tensors that worker `source` has, with the same strides everywhere: those of `likes`, as far as these have
        no gaps. Elsewhere only their sizes, strides and types must be known."""
        here = source == self.group.rank
        found: dict[int, Tensor] = {}
        dense = [i for i, like in enumerate(likes) if like.layout == torch.strided]
        for dtype in dict.fromkeys(likes[i].dtype for i in dense):
            numbers = [i for i in dense if likes[i].dtype == dtype]
            sizes = [likes[i].numel() for i in numbers]
            row = torch.cat([tensors[i].reshape(-1) for i in numbers]) if here else torch.empty(sum(sizes), dtype=dtype)
            self._together(partial(dist.broadcast, row, source, self.group.process_group))
            for i, part in zip(numbers, row.split(sizes), strict=True):
                found[i] = _laid_out(tensors[i], likes[i], is_new=False) if here else _laid_out(part, likes[i], is_new=True)
        for i in found.keys() ^ range(len(likes)):
            found[i] = self._share_sparse(tensors[i] if here else None, likes[i], source)
        return [found[i] for i in range(len(likes))]

    def _share_sparse(self, tensor: Tensor | None, like: Tensor, source: int) -> Tensor:
        """The same of a gradient of an embedding with sparse=True; only worker `source` knows how many rows it has."""
        parts = () if tensor is None else dense_parts(tensor)
        mark = torch.zeros(2, dtype=torch.int64) if tensor is None else torch.tensor([len(parts[1]), tensor.is_coalesced()])
        count, is_coalesced = self.share([mark], [mark], source)[0].tolist()
        indices = torch.empty(like.sparse_dim(), count, dtype=torch.int64, device="meta")
        values = torch.empty(count, *like.shape[like.sparse_dim() :], dtype=like.dtype, device="meta")
        indices, values = self.share(parts, (indices, values), source)
        return tensor if tensor is not None else torch.sparse_coo_tensor(indices, values, like.shape, is_coalesced=bool(is_coalesced))

    def as_worker_0(self, *own: int) -> Sequence[int]:
        """Worker 0's numbers, of which each worker has its own."""
        marks = torch.tensor(own, dtype=torch.int64)
        return self.share([marks], [marks], 0)[0].tolist()

    def agree_on_turn(self, turns: Turns, mode: str) -> str:
        """Worker 0's mode of the step that begins; `turns` get to know whether it is decided there, or rests."""
        placed, decided, turns.rest = self.as_worker_0(mode == PLACED, bool(turns.decided), turns.rest)
        mode = PLACED if placed else PLAIN
        turns.decided = mode if decided else ""
        return mode

    def _together(self, exchange: Callable[[], Any]) -> None:
        try:
            exchange()
        except RuntimeError as e:
            raise LostPeerError(
                f"worker {self.group.rank} gave up waiting for another one ({reason(e)}); check whether all workers "
                "still run, and whether they make the same calls in the same order; where one alone does what takes longer than "
                f"{self.group.timeout_seconds:g} s, raise --timeout"
            ) from e

    def leave(self) -> None:
        """Leave at the end of the script. Worker 0, whose signs of life the others listen for, waits for them if all went well. A fork has
        nothing to leave."""
        if os.getpid() != self.process:
            return
        failed = self.failed or getattr(sys, "last_value", None) is not None
        rank, store = self.group.rank, self.group.store
        with suppress(RuntimeError):  # they come too late, or the store is gone, and with it whoever would have waited
            if rank:
                store.set(f"bye {rank}", "")
            elif not failed and self.group.size > 1:
                try:
                    store.wait([f"bye {other}" for other in range(1, self.group.size)], _LEAVING)
                except RuntimeError:  # one takes longer, and may
                    heartbeat.leave(store)
        dist.group.WORLD = self.group.process_group
        self.group.__exit__(RuntimeError if failed else None)


def several_workers() -> bool:
    """True if this process is one of several that torchrun, or --workers=process, started."""
    return bool(_JOINED) or (is_worker() and worker_place()[1] > 1)


def join_workers(num_devices: int, timeout_seconds: float) -> Workers:
    """This process's place among the workers; the same one every time.

    Raises OptionError where there are not as many workers as devices, or the script has a process group of its own; ExecutionError where
    the workers do not meet.
    """
    rank, size = (_JOINED[0].group.rank, _JOINED[0].group.size) if _JOINED else worker_place()
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
    trial = Trial(plan.placement, plan.priority, Simulator(timeline.graph, timeline.cluster))
    single = one_device_timeline(timeline.graph, timeline.cluster.devices[0].speed)
    return Placement(timeline.graph, None, PlanResult(plan, trial), single, None)


def _laid_out(value: Tensor, like: Tensor, *, is_new: bool) -> Tensor:
    """The numbers with the shape of `like`, and the strides that a copy of that has: a copy where they are a piece of something larger
    (`is_new`), or are laid out otherwise."""
    strides = torch.empty_like(torch.empty_strided(like.size(), like.stride(), device="meta")).stride()
    if not is_new and value.stride() == strides:
        return value
    return torch.empty_strided(like.size(), strides, dtype=value.dtype).copy_(value.view(like.size()) if is_new else value)


def _checksums(tensors: Iterable[Tensor]) -> list[int]:
    """A checksum of each tensor's content."""
    stored = (t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors)
    return [zlib.crc32(t.reshape(-1).view(torch.uint8).numpy().data) if t.numel() else 0 for t in stored]


@dataclass(frozen=True)
class _Handed:
    """Tensors that one worker hands to all others after a phase, by name."""

    source: int
    names: tuple[str | int, ...]
    likes: tuple[Tensor, ...]


class WorkerFragment(Phases):
    """This worker's share of a fragment of a module's call; all workers use theirs at the same time.

    Raises DriftError where the workers' inputs, incoming gradients, or every so many calls their parameters, differ.
    """

    def __init__(self, workers: Workers, timeline: Timeline, call: CapturedCall, fragment: int, step: CallStep) -> None:
        super().__init__(timeline, call, fragment, step)
        self._workers = workers
        part, binding, place = self._part, call.binding, timeline.placement
        self._within = part.forward_ops | part.backward_ops
        self._seeded = {int(v not in part.forward_ops): place[v] for v in binding.seeded_ops if v in self._within}
        """Phase -> where its random numbers are drawn."""
        self._ends = next(v for v in part.forward_ops if call.graph.ops[v].op == OUTPUTS)
        gradients: dict[int, dict[str | int, Tensor]] = {}
        for v in sorted(part.backward_ops):
            bound = binding.ops[v]
            name = binding.state_names[bound.parameters[0]] if bound.parameters else bound.input_gradient
            if name is not None:
                gradients.setdefault(place[v], {})[name] = bound.gradients[0].meta["val"]
        self._gradients_at = [_Handed(source, tuple(likes), tuple(likes.values())) for source, likes in sorted(gradients.items())]
        buffers: dict[int, list[str]] = {}
        for v in sorted(binding.buffer_writes.keys() & part.forward_ops):
            buffers.setdefault(place[v], []).extend(name for name, _ in binding.buffer_writes[v])
        self._buffers_at = [_Handed(source, tuple(names), ()) for source, names in sorted(buffers.items())]
        self._load()

    def _load(self) -> None:
        """All workers load a fragment at the same time."""
        self._calls = 0
        self._skipping: dict[frozenset[int], LoweredProgram] = {}
        group, device, timeline, binding, part = self._workers.group, self._workers.device, self._timeline, self._call.binding, self._part
        phases = [Phase(part.forward_ops, self._within), Phase(part.backward_ops, self._within)]
        forward, backward = self._channels = [channels_of(timeline, binding, group, device, phase) for phase in phases]
        hooks = {**forward.pre_hooks, **backward.pre_hooks}
        context = StepContext(timeline.graph, binding, self._step, forward, {}, None, hooks, state_in_slots=True)  # type: ignore[arg-type]
        marked = partial(logged, timeline=timeline, log=group.crash_log, rank=group.rank)
        self._lower(context, self._channels, [(group.rank, device)], marked)

    def _begin(self, phase: int) -> int:
        self._watch.begin(phase, lambda _, begin: begin())
        return time.monotonic_ns()

    def _run(self, phase: int, kept: list[Slots], args: Sequence[Tensor], skipped: frozenset[int]) -> tuple[float, ...]:
        """Bring the random state up to date, too."""
        workers, (slots,), (_, programs, _) = self._workers, kept, self._programs[0]
        self._agree(phase, args)
        start = time.process_time_ns()
        with explained(workers.device.name, self._timeline.graph):
            for post in self._channels[phase].at_start:
                post(slots)
            self._program(programs, phase, skipped).run(slots)
            self._channels[phase].finish()
        for write in programs[phase].writes:
            write(slots)
        busy_us = (time.process_time_ns() - start) / 1000
        for handed in self._buffers_at if phase == 0 else ():
            live = [args[self._argument_of[n]] for n in handed.names]
            for buffer, value in zip(live, workers.share(live, live, handed.source), strict=True):
                if value is not buffer:
                    buffer.data.copy_(value)
        if phase in self._seeded:
            (state,) = workers.share([torch.get_rng_state()], [torch.get_rng_state()], self._seeded[phase])
            torch.set_rng_state(state)
        return (busy_us,)

    def _program(self, programs: Sequence[LoweredProgram], phase: int, skipped: frozenset[int]) -> LoweredProgram:
        if not skipped:
            return programs[phase]
        if skipped not in self._skipping:
            self._skipping[skipped] = programs[phase].skipping(skipped)
        return self._skipping[skipped]

    def _agree(self, phase: int, args: Sequence[Tensor]) -> None:
        if phase == 1:
            tangents = self._step.tangents or ()
            self._workers.agree("the gradients of what a placed call returned", _checksums(t for t in tangents if t is not None))
            return
        self._workers.agree("the arguments of a placed call", _checksums(args[i] for i, _ in self._plain))
        if self._calls % _PARAMETERS_EVERY == 0:
            self._workers.agree("the parameters and buffers of a placed module", _checksums(args[i] for i in self._part.state))
        self._calls += 1

    def _outputs(self) -> list[Tensor]:
        likes = [node.meta["val"] for node in self._call.binding.ops[self._ends].outputs]
        return [no_view(t) for t in self._workers.share(self._step.outputs, likes, self._timeline.placement[self._ends])]

    def _gradients(self) -> dict[str | int, Tensor]:
        found: dict[str | int, Tensor] = {}
        for handed in self._gradients_at:
            own = [self._step.gradients[n] for n in handed.names] if handed.source == self._workers.group.rank else []
            found |= zip(handed.names, map(no_view, self._workers.share(own, handed.likes, handed.source)), strict=True)
        return found


def loaded_phases(executor: ThreadExecutor | Workers, timeline: Timeline, call: CapturedCall, fragment: int, step: CallStep) -> Phases:
    """A fragment of a placed call, or this worker's share of it, ready to run."""
    if isinstance(executor, Workers):
        return WorkerFragment(executor, timeline, call, fragment, step)
    if isinstance(executor, StreamExecutor) and executor.recorder is not None:
        return GraphedFragment(executor, timeline, call, fragment, step)
    return PhasedFragment(executor, timeline, call, fragment, step)
