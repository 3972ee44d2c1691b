"""Channels: the ways of a placed step's tensors from one worker process to another; the classes differ in what carries them.

Over torch.distributed with tags (gloo), which are the tensors' numbers in the graph: a gloo send is a rendezvous even for a few bytes: it
ends when the receiver has posted the same tag. So sends never block (a thread waits for them, and drops what has arrived), and a receive is
posted at the step's start as long as there is memory for its buffer, at the latest before the op that runs when the tensor is predicted to
leave its sender: one that is not posted in time costs both ends a round of messages while they compute. Every blocking wait is for a tensor
whose op stands earlier in the one global order, and nothing can wait in a circle.

Without tags (NCCL) tensors are told apart by their order alone. So all transfers of a step stand in one order, that in which their
senders' ops are predicted to end and, of one op, of its sends; and every rank starts its ends of transfers in that order: a send after its
op, a receive before the first op here that is predicted to end after the sender's op. Even where a transfer holds up all that its two ranks
start later, computing included, nothing can wait in a circle: of the transfers that are not done, the first in the order has no other
before it at either end, so both ends come to it. It may therefore share one communicator and one stream with all others of its rank.

Through memory that the workers of one machine share each tensor that comes to a device in a step has a place of its own there, into which
its sender copies it, and from which its readers read it: one copy, and one message through a pipe that says so. A sender may write into a
place again once its receiver's run is over, which the receiver says at the end of each run; so a sender waits only for runs before its own,
and nothing can wait in a circle.
"""

import queue
import threading
import time
import weakref
from abc import abstractmethod
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import ExecutionError, first_line
from baechi_ext.simulate import Timeline, Transfer
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.ops import TOKEN, Exchange
from baechi_runtime.torch.lowering.program import Send, cut
from baechi_runtime.torch.processes.lines import Lines, LostLineError, tensor_at
from baechi_runtime.torch.processes.worker_group import WorkerGroup

_POLL_SECONDS = 5e-5
_OVER = 2**32 - 1
"""The message that a run is over, so that its places may be written again; a tensor's number is far below."""
_ALIGNED_TO = 64


class LostPeerError(ExecutionError):
    """A transfer failed because its other end is gone or late: an echo of what happened there."""


@dataclass(frozen=True)
class Phase:
    """A part of a step that is run by itself: its ops, and those that may read what it sends."""

    ops: Collection[int]
    readers: Collection[int]


class Channels(Exchange):
    """One worker's ends of all transfers of one placed step, or of one phase of it; see `Exchange`."""

    at_start: Sequence[Callable[[Any], None]] = ()
    """Receives to post before the program begins, where it has no op to post them before."""
    pre_hooks: Mapping[int, tuple[Callable[[Any], None], ...]] = {}
    """Op -> the receives to post before it."""
    extra_bytes = 0
    """Bytes that are kept for received tensors beyond the time for which the plan has them in memory."""

    def __init__(self, timeline: Timeline, binding: Binding, group: WorkerGroup, phase: Phase | None = None) -> None:
        self._rank = group.rank
        self._whereabouts = group.whereabouts
        self._timeout = timedelta(seconds=group.timeout_seconds)
        self._timeline = timeline
        self._phase = phase
        self._ids = [op.id for op in timeline.graph.ops]
        self._tensors = timeline.graph.tensors
        self._placement = timeline.placement
        nodes = {key: node for node, key in binding.home.items()}
        keys = [(tensor.producer, tensor.name) for tensor in self._tensors]
        self._meta = {t: nodes[key].meta["val"] for t, key in enumerate(keys) if key in nodes}

    @abstractmethod
    def finish(self) -> None:
        """Waits until all that was sent has arrived."""

    def _coming_to(self, target: int) -> list[Transfer]:
        """The transfers to a device, in the phase."""
        return [x for x in self._timeline.transfers if x.target == target and (self._phase is None or self._is_in(self._phase, x))]

    def _is_in(self, phase: Phase, transfer: Transfer) -> bool:
        tensor = self._tensors[transfer.tensor]
        read = any(self._placement[r] == transfer.target and r in phase.readers for r in tensor.readers)
        # An order that crosses devices moves nothing; see in_phases.
        return read and tensor.producer in phase.ops and transfer.tensor in self._meta

    def _like(self, tensor: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """A tensor as it is in the graph, and the strides with which it is sent: those, or without gaps where it is part of something
        larger there."""
        like = self._meta.get(tensor, TOKEN)
        return like, torch.empty_like(torch.empty_strided(like.size(), like.stride(), device="meta")).stride()

    def _in_vain(self, tensor: int, reason: str) -> LostPeerError:
        """The error to raise where a tensor does not come."""
        producer = self._tensors[tensor].producer
        source = self._placement[producer]
        return LostPeerError(
            f"device {self._rank} gave up waiting for the output of op {self._ids[producer]!r} from device {source} "
            f"({reason}){self._whereabouts(source)}; check whether that worker still runs, or raise --timeout"
        )

    def _unsent(self, reason: str) -> LostPeerError:
        """The error to raise where a tensor can't be sent."""
        return LostPeerError(f"device {self._rank} could not send a tensor ({reason}); check whether all workers still run")


def in_order_of_ends(timeline: Timeline) -> list[int]:
    """The ops as they are predicted to end: a topological order, and on each device the order of its program."""
    return sorted(timeline.started, key=timeline.end_us.__getitem__)


def reason(error: RuntimeError) -> str:
    """The end of what an error says, gloo's advice to whoever reports it left out."""
    return first_line(error).partition(" This is typically")[0][-120:]


class Going:
    """Tensors that are being sent. Each is held until it has arrived, no longer: gloo tells that only to a waiter, so a thread waits."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failures: list[RuntimeError] = []

    def add(self, value: torch.Tensor, work: dist.Work, gone: Callable[[], None] | None = None) -> None:
        """`gone` is called when the value has arrived."""
        if self._thread is None:
            arguments = (self._items, self._timeout, self._failures)
            self._thread = threading.Thread(target=_wait_for_each, args=arguments, name="baechi sends", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._items.put, None)
        self._items.put((value, work, gone))

    def drain(self) -> None:
        """Returns when all has arrived. Raises the RuntimeError of what could not be sent."""
        if self._thread is not None:
            done = threading.Event()
            self._items.put(done)
            done.wait()
        if self._failures:
            raise self._failures[0]


def _wait_for_each(items: "queue.SimpleQueue[Any]", timeout: timedelta, failures: list[RuntimeError]) -> None:
    """Waits for one work after the other, in the order they were started; after a failure for none: their peer is gone, or late."""
    while (item := items.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
        elif not failures:
            try:
                item[1].wait(timeout)
                if item[2] is not None:
                    item[2]()
            except RuntimeError as e:
                failures.append(e)
        del item


class PostedChannels(Channels):
    """Channels by which a receiver has to post each receive."""

    def __init__(self, timeline: Timeline, binding: Binding, group: WorkerGroup, device: TorchDevice, phase: Phase | None = None) -> None:
        super().__init__(timeline, binding, group, phase)
        self._group, self._tagged = group, group.tagged
        self._device = device.torch_device
        self._coming: dict[int, tuple[torch.Tensor, dist.Work]] = {}
        self._going = Going(self._timeout)
        posts = self._posts_of_tagged() if self._tagged else ordered_pre_hooks(timeline, self._rank)
        self.pre_hooks = {v: tuple(map(self._poster, tensors)) for v, tensors in posts.items()}

    def _posts_of_tagged(self) -> dict[int, list[int]]:
        """Op -> the tensors whose receives are posted before it, where there are tags."""
        timeline, phase = self._timeline, self._phase
        here = {v: i for i, v in enumerate(v for v in timeline.device_order()[self._rank] if phase is None or v in phase.ops)}
        coming = [x.tensor for x in sorted(self._coming_to(self._rank), key=lambda x: (x.start_us, x.tensor))]
        if not here:
            self.at_start = tuple(map(self._poster, coming))
            return {}
        starts = [timeline.start_us[v] for v in here]
        sent_us = {x.tensor: x.start_us for x in timeline.transfers if x.target == self._rank}
        # At the last op that starts no later than the transfer does, and no later than at its first reader.
        latest = [
            min([max(0, bisect_right(starts, sent_us[t]) - 1), *(here[r] for r in self._tensors[t].readers if r in here)]) for t in coming
        ]
        limit = timeline.cluster.devices[self._rank].memory_bytes
        room = float("inf") if limit is None else limit - timeline.peak_memory_bytes[self._rank]
        ops, posts = list(here), defaultdict(list)
        for t, position in zip(coming, early_pre_hooks(latest, [self._tensors[t].bytes for t in coming], room), strict=True):
            posts[ops[position]].append(t)
        return posts

    def _poster(self, tensor: int) -> Callable[[Any], None]:
        (meta, stride), tag, source = self._like(tensor), self._tag(tensor), self._placement[self._tensors[tensor].producer]

        def post(_: Any) -> None:
            buffer = torch.empty_strided(meta.size(), stride, dtype=meta.dtype, device=self._device)
            self._coming[tensor] = buffer, cast(dist.Work, dist.irecv(_flat(buffer), source, self._group.process_group, tag))

        return post

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        (_, stride), tag = self._like(tensor), self._tag(tensor)

        def give(value: torch.Tensor) -> None:
            value = value.resolve_conj().resolve_neg()  # memory is sent, and no lazy bits
            if value.stride() != stride:
                value = torch.empty_strided(value.size(), stride, dtype=value.dtype, device=value.device).copy_(value)
            self._keep(value, cast(dist.Work, dist.isend(_flat(value), target, self._group.process_group, tag)), gone)

        return give

    def _keep(self, value: torch.Tensor, work: dist.Work, gone: Callable[[], None] | None) -> None:
        """Keeps what is being sent until it has arrived."""
        self._going.add(value, work, gone)

    def _tag(self, tensor: int) -> int:
        return tensor if self._tagged else 0

    def taker(self, tensor: int, target: int) -> Callable[[], torch.Tensor]:

        def take() -> torch.Tensor:
            buffer, work = self._coming.pop(tensor)
            try:
                self._await(tensor, work)
            except RuntimeError as e:
                raise self._in_vain(tensor, reason(e)) from e
            return buffer

        return take

    def _await(self, tensor: int, work: dist.Work) -> None:
        """Returns when what computes here may read the tensor; raises RuntimeError where it does not come."""
        work.wait(self._timeout)

    def finish(self) -> None:
        """See Channels."""
        try:
            self._going.drain()
        except RuntimeError as e:
            raise self._unsent(reason(e)) from e


class StreamChannels(PostedChannels):
    """Channels between CUDA devices: NCCL does the transfers of a rank on a stream of its own, in the order in which they are started. The
    host waits for none of them. That stream waits for what the compute stream was given before an end of a transfer was started, the
    compute stream for a received tensor right before its first use. torch's allocator knows that both streams use these tensors, so one
    that is freed is used again only after its transfer. A step ends when all of its sends are done."""

    def __init__(self, timeline: Timeline, binding: Binding, group: WorkerGroup, device: TorchDevice) -> None:
        super().__init__(timeline, binding, group, device)
        self._clock = device
        self._waits: list[tuple[int, torch.cuda.Event]] = []
        """Each tensor that the compute stream waits for, and where it has it."""
        self._sent: deque[dist.Work] = deque()
        """Sends that are not known to be done, in their order. Some releases of torch keep what is sent as long as these."""

    def _keep(self, value: torch.Tensor, work: dist.Work, gone: Callable[[], None] | None) -> None:
        while self._sent and self._sent[0].is_completed():
            self._sent.popleft()
        self._sent.append(work)

    def _await(self, tensor: int, work: dist.Work) -> None:
        work.wait()  # with a time-out it would hold up the host
        self._waits.append((tensor, self._clock.mark()))

    def finish(self) -> None:
        """Waits until all has been received and sent. Raises LostPeerError, naming the first tensor that does not come in time."""
        seconds = self._timeout.total_seconds()
        for tensor, end in self._waits:
            if not self._in_time(end.query):
                raise self._in_vain(tensor, f"nothing came for {seconds:g} s")
        for work in self._sent:
            if not self._in_time(work.is_completed):
                raise self._unsent(f"nobody took a tensor for {seconds:g} s")
        self._waits.clear()
        self._sent.clear()

    def _in_time(self, is_done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not is_done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def ordered_pre_hooks(timeline: Timeline, rank: int) -> dict[int, list[int]]:
    """Op of `rank` -> the tensors whose receives are posted before it, in the order of all transfers (see above)."""
    tensors = timeline.graph.tensors
    coming: dict[int, list[int]] = {}
    for program in cut(timeline):
        for instruction in program:
            if isinstance(instruction, Send) and instruction.target == rank:
                coming.setdefault(tensors[instruction.tensor].producer, []).append(instruction.tensor)
    pre_hooks: dict[int, list[int]] = {}
    ready: list[int] = []
    for v in in_order_of_ends(timeline):
        if timeline.placement[v] != rank:
            ready += coming.get(v, ())
        elif ready:
            pre_hooks[v], ready = ready, []
    return pre_hooks


def early_pre_hooks(latest: Sequence[int], sizes: Sequence[float], room_bytes: float) -> list[int]:
    """Where to post each receive, at the earliest: those that are posted before they must be never hold more than `room_bytes`.

    `latest` are the positions where they must be posted, in order. Position 0 is the step's start.
    """
    pre_hooks = []
    first, held = 0, 0.0
    for i, size in enumerate(sizes):
        held += size
        while held > room_bytes and first < i:
            held -= sizes[first]
            first += 1
        if held > room_bytes:
            pre_hooks.append(latest[i])
        else:
            pre_hooks.append(min(latest[first - 1], latest[i]) if first else 0)
    return pre_hooks


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as one row."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class SharedChannels(Channels):
    """One worker's ends of all transfers of one placed step, or of one phase of it."""

    def __init__(self, timeline: Timeline, binding: Binding, group: WorkerGroup, lines: Lines, phase: Phase | None = None) -> None:
        super().__init__(timeline, binding, group, phase)
        self._lines = lines
        self._number = lines.open_channel()
        places = [self._places(device) for device in range(group.size)]
        self._places_at, sizes = [found for found, _ in places], [size for _, size in places]
        self._sources = sorted({x.source for x in self._coming_to(self._rank)})
        self._targets = [d for d in range(group.size) if any(x.source == self._rank for x in self._coming_to(d))]
        self._in_use: set[int] = set()
        """The devices whose last run may not be over."""
        # What a phase leaves for a later one is kept while this one may run again.
        self._copies = phase is not None
        self.extra_bytes = sizes[self._rank]
        try:
            self._pages = lines.pages(self._number, sizes[self._rank], self._targets)
        except LostLineError as e:
            raise self._unsent(str(e)) from e
        except OSError as e:
            raise ExecutionError(
                f"device {self._rank} has no memory to share for the {self.extra_bytes} bytes that come to it ({e.strerror}); "
                "raise what limits it (ulimit -n, or memory), or set BAECHI_SHARED_MEMORY=0"
            ) from e

    def _places(self, device: int) -> tuple[dict[int, int], int]:
        """Where each tensor that comes to a device begins, and how many bytes they all take."""
        begins, end = {}, 0
        for tensor in sorted({x.tensor for x in self._coming_to(device)}):
            begins[tensor] = end
            like, _ = self._like(tensor)
            end += -(-like.numel() * like.element_size() // _ALIGNED_TO) * _ALIGNED_TO
        return begins, end

    def _place(self, tensor: int, device: int) -> torch.Tensor:
        return tensor_at(self._pages[device], self._places_at[device][tensor], *self._like(tensor))

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        place, tell, number, in_use = self._place(tensor, target), self._lines.tell, self._number, self._in_use

        def give(value: torch.Tensor) -> None:
            try:
                if target in in_use:
                    self._lines.wait(target, number, _OVER)
                    in_use.discard(target)
                place.copy_(value)
                tell(target, number, tensor)
            except LostLineError as e:
                raise self._unsent(str(e)) from e
            if gone is not None:
                gone()

        return give

    def taker(self, tensor: int, target: int) -> Callable[[], torch.Tensor]:
        source = self._placement[self._tensors[tensor].producer]
        wait, number, place = self._lines.wait, self._number, self._place

        def take() -> torch.Tensor:
            try:
                wait(source, number, tensor)
            except LostLineError as e:
                raise self._in_vain(tensor, str(e)) from e
            value = place(tensor, target)
            return value.clone() if self._copies else value

        return take

    def finish(self) -> None:
        """See Channels; what was sent is there."""
        try:
            for source in self._sources:
                self._lines.tell(source, self._number, _OVER)
            for target in self._in_use:  # a run that sent nothing there
                self._lines.wait(target, self._number, _OVER)
        except LostLineError as e:
            raise self._unsent(str(e)) from e
        self._in_use.update(self._targets)


def channels_of(timeline: Timeline, binding: Binding, group: WorkerGroup, device: TorchDevice, phase: Phase | None = None) -> Channels:
    """The channels of a step, or of a phase of it: shared memory where all workers have lines to each other, and room for all that comes to
    them in a step; otherwise torch.distributed. The same on all workers."""
    if device.torch_device.type != "cpu":
        return StreamChannels(timeline, binding, group, device)
    if group.lines is not None and _has_room(timeline):
        return SharedChannels(timeline, binding, group, group.lines, phase)
    return PostedChannels(timeline, binding, group, device, phase)


def _has_room(timeline: Timeline) -> bool:
    """True if every device has memory for all that comes to it in a step beside the step's peak."""
    coming = [0.0] * len(timeline.cluster)
    for transfer in timeline.transfers:
        coming[transfer.target] += timeline.graph.tensors[transfer.tensor].bytes
    limits = (device.memory_bytes for device in timeline.cluster.devices)
    return all(limit is None or peak + more <= limit for limit, peak, more in zip(limits, timeline.peak_memory_bytes, coming, strict=True))
