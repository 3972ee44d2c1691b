"""Lines between the worker processes of one machine: short messages through pipes, and memory that a receiver shares with its senders.

Nothing has a name that could be left behind, and nothing is open to other users: a pipe or memory of another worker is opened as
/proc/PID/fd/NUMBER, which the system allows to processes of the same user alone. The end of a worker ends its pipes, which its peers
notice.
"""

import contextlib
import json
import mmap
import os
import select
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from baechi_runtime.torch.processes.crash_log import nameless

SHARED_MEMORY = "BAECHI_SHARED_MEMORY"
"""0: the workers of one machine send each other tensors over gloo, as those of several machines do."""
_MESSAGE = struct.Struct("<II")
_HELLO = 2**32 - 1
_AT_ONCE = 1 << 16
"""Bytes that are read at once: what a pipe holds, by default."""
_HELLO_SECONDS = 5.0
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"


class LostLineError(RuntimeError):
    """A worker at the other end of a line is gone, or late."""


@dataclass
class Lines:
    """One worker's lines to all others. A message is a number in a channel; the channels' numbers are the same for all workers, who open
    them in the same order."""

    rank: int
    timeout_seconds: float
    store: Store
    pids: dict[int, int]
    reads: dict[int, int]
    """Peer -> the pipe on which it is heard."""
    writes: dict[int, int]
    channels: int = 0
    _arrived: defaultdict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def join(cls, store: Store, rank: int, size: int, timeout_seconds: float) -> "Lines | None":
        """Lines between all workers, which are on one machine; None, for all of them, where the system does not let them have any."""
        own = {peer: os.pipe() for peer in range(size) if peer != rank}
        store.set(f"lines {rank}", json.dumps({"pid": os.getpid(), "place": _place(), "pipes": {p: w for p, (_, w) in own.items()}}))
        lines = cls(rank, timeout_seconds, store, {}, {peer: r for peer, (r, _) in own.items()}, {})
        for read in lines.reads.values():
            os.set_blocking(read, False)
        heard = lines._greeted(own)
        store.set(f"lines {rank} heard", str(int(heard)))
        for _, write in own.values():
            os.close(write)
        verdicts = [store.get(f"lines {peer} heard") == b"1" for peer in range(size)]
        if all(verdicts):
            return lines
        lines.close()
        return None

    def _greeted(self, own: dict[int, tuple[int, int]]) -> bool:
        """True if every peer's pipe could be opened, and every peer was heard."""
        if _place() == "":
            return False
        try:
            for peer in own:
                said = json.loads(self.store.get(f"lines {peer}"))
                if said["place"] != _place():
                    return False
                self.pids[peer] = said["pid"]
                self.writes[peer] = os.open(
                    f"/proc/{said['pid']}/fd/{said['pipes'][str(self.rank)]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                )
                self.tell(peer, 0, _HELLO)
            for peer in own:
                self.wait(peer, 0, _HELLO, _HELLO_SECONDS)
        except (OSError, LostLineError):
            return False
        return True

    def open_channel(self) -> int:
        """The number of a new channel."""
        self.channels += 1
        return self.channels

    def tell(self, peer: int, channel: int, number: int) -> None:
        """Sends a message. Raises LostLineError where the peer is gone, or takes none for too long."""
        message = _MESSAGE.pack(channel, number)
        try:
            os.write(self.writes[peer], message)
        except BlockingIOError:
            self._tell_late(peer, message)
        except OSError as e:
            raise LostLineError(f"worker {peer} is gone") from e

    def _tell_late(self, peer: int, message: bytes) -> None:
        """Sends it when there is room for it. What comes in is read meanwhile: the peer might wait for room, too."""
        deadline = time.monotonic() + self.timeout_seconds
        poll = select.poll()
        poll.register(self.writes[peer], select.POLLOUT)
        for read in self.reads.values():
            poll.register(read, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poll.poll(1000 * left))
            for sender, read in self.reads.items():
                if read in ready:
                    self._take_in(sender)
            if self.writes[peer] in ready:
                try:
                    os.write(self.writes[peer], message)
                    return
                except BlockingIOError:
                    continue
                except OSError as e:
                    raise LostLineError(f"worker {peer} is gone") from e
        raise LostLineError(f"worker {peer} took nothing for {self.timeout_seconds:g} s")

    def wait(self, peer: int, channel: int, number: int, seconds: float | None = None) -> None:
        """Waits for a message of a peer, and takes it. Raises LostLineError where it does not come in time, or the peer is gone. What comes
        from others is read meanwhile: they might wait for room, and the peer for them."""
        arrived = self._arrived[peer, channel]
        if number not in arrived:
            seconds = self.timeout_seconds if seconds is None else seconds
            poll, deadline, senders = select.poll(), time.monotonic() + seconds, {read: sender for sender, read in self.reads.items()}
            for read in senders:
                poll.register(read, select.POLLIN)
            self._take_in(peer)
            while number not in arrived:
                if (left := deadline - time.monotonic()) < 0 or not (ready := poll.poll(1000 * left)):
                    raise LostLineError(f"nothing came for {seconds:g} s")
                for read, _ in ready:
                    try:
                        self._take_in(senders[read])
                    except LostLineError:
                        if senders[read] == peer:
                            raise
                        poll.unregister(read)  # it may have come to its end
        arrived.discard(number)

    def _take_in(self, peer: int) -> None:
        """Reads what has come from a peer, if anything."""
        try:
            content = os.read(self.reads[peer], _AT_ONCE)
        except BlockingIOError:
            return
        if not content:
            raise LostLineError(f"worker {peer} is gone")
        for channel, number in _MESSAGE.iter_unpack(content):
            self._arrived[peer, channel].add(number)

    def pages(self, channel: int, size: int, peers: Sequence[int]) -> dict[int, mmap.mmap]:
        """Memory of this many bytes into which others write, by this worker's rank, and that into which it writes, by the peer's.

        Every worker has to ask. Raises LostLineError where a peer's memory can't be opened.
        """
        memory, own = nameless(f"baechi {channel}", max(size, 1))
        found = {self.rank: memory}
        self.store.set(f"pages {channel} {self.rank}", str(own))
        for peer in peers:
            self.store.wait([f"pages {channel} {peer}"], timedelta(seconds=self.timeout_seconds))
            number = int(self.store.get(f"pages {channel} {peer}"))
            try:
                descriptor = os.open(f"/proc/{self.pids[peer]}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as e:
                raise LostLineError(f"worker {peer} is gone") from e
            found[peer] = mmap.mmap(descriptor, 0)
            os.close(descriptor)
        return found

    def close(self) -> None:
        """Ends the lines."""
        for descriptor in (*self.reads.values(), *self.writes.values()):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.reads, self.writes = {}, {}


def tensor_at(memory: mmap.mmap, offset: int, like: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The tensor that begins there in shared memory, like another but for its strides, which leave no gaps."""
    if like.numel() == 0:
        return torch.empty(like.size(), dtype=like.dtype)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset).as_strided(like.size(), stride)


def _place() -> str:
    """The machine and the space of process numbers that this process is in; empty where the system has no such thing."""
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()} {os.readlink(_NAMESPACE)}" if hasattr(os, "memfd_create") else ""
    except OSError:
        return ""
