"""A group of worker processes, one per device: how they find each other and what they say. Tensors go through memory that the workers of a
machine share, which say by numbers in pipes what is there, or over torch.distributed; everything else goes as JSON through its key-value
store. So nothing that is received is ever executed.

A process group's threads end with whoever holds it last. One that gives a tensor back while python ends is killed there, and the whole
process with it (SIGABRT), so nobody holds a group that has been left.

The environment is torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), whoever started the workers.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, it holds the group that is there then: its functions have it for a default
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from baechi_ext.capture.torch_private import abort_process_group, take_groups_from_meshes
from baechi_ext.errors import ExecutionError, first_line
from baechi_runtime.host.interrupts import ended_at_once, leave_to_others
from baechi_runtime.torch.processes import environment, heartbeat
from baechi_runtime.torch.processes.crash_log import CrashLog
from baechi_runtime.torch.processes.lines import SHARED_MEMORY, Lines

COMMAND, ANSWER, CRASH_LOG = "command", "answer", "board"
_LAST_WORDS_SECONDS, _POLL_SECONDS = 1.0, 0.05
_ENDING_SECONDS = 5
_GIVEN_UP: list[dist.ProcessGroup | None] = []
"""Groups that were left by an error: their threads may wait for a peer, and nobody waits for them."""


@dataclass
class WorkerGroup:
    """This process's place in the group. Use as a context manager; leaving it takes the process group down."""

    rank: int
    size: int
    store: Store
    timeout_seconds: float
    crash_log: CrashLog
    """The crash log on which the workers of this machine say where they are."""
    local_size: int = 1
    """Workers on this one's machine, itself included."""
    tagged: bool = True
    """True if the step's tensors are told apart by tags, as over gloo; otherwise they are by their order. The same on all ranks."""
    commands: int = 0
    """Commands given so far (rank 0) or heard so far (others)."""
    lines: Lines | None = None
    """This worker's lines to all others, where all are on one machine that has such, and compute on the host."""
    process_group: dist.ProcessGroup | None = None
    """torch.distributed's, which the tensors go over; None stands for its default one."""
    quiet: Callable[[], None] = lambda: None
    """Ends the signs of life, or the listening to them."""

    @classmethod
    def join(cls, timeout_seconds: float, device: torch.device, *, share_memory: bool = True) -> "WorkerGroup":
        """Waits until all workers are there. Tensors on the host go through shared memory, or over gloo where that can't be or is not
        wanted; those on CUDA devices over NCCL: through one communicator, which is made here.

        Raises ExecutionError where they are not there in time, or the address is taken.
        """
        timeout = timedelta(seconds=timeout_seconds)
        environment.choose_interface()
        backend: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # It warns that transfers of one communicator keep to one order, which is what is wanted.
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
            # NCCL's own watch ends the process of a transfer that takes too long. StreamChannels, which say what is missing, come first.
            backend = {"backend": "cpu:gloo,cuda:nccl", "timeout": 2 * timeout, "device_id": device}
        try:
            # Whoever has folders to unlock, rank 0, is awaited by the others.
            with ended_at_once() if environment.worker_place()[0] else contextlib.nullcontext():
                store, rank, size = _met(timeout)
                store.set_timeout(timeout)
                dist.init_process_group(store=PrefixStore("gloo", store), rank=rank, world_size=size, **backend)
            own = PrefixStore("baechi", store)
            with _through_the_store():
                crash = _join_crash_log(own, rank, size)
                quiet = heartbeat.listen(own, timeout_seconds) if rank else heartbeat.give(own)
                if rank:
                    leave_to_others()
                local_size, tagged = int(os.environ.get("LOCAL_WORLD_SIZE", size)), device.type != "cuda"
                shares = share_memory and tagged and 1 < local_size == size and os.environ.get(SHARED_MEMORY) != "0"
                lines = Lines.join(own, rank, size, timeout_seconds) if shares else None
        except (RuntimeError, ValueError) as e:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ExecutionError(
                f"the workers could not meet at {address} within {timeout_seconds:g} s: {first_line(e)}; "
                "check whether the port is free and every worker was started"
            ) from e
        return cls(rank, size, own, timeout_seconds, crash, local_size, tagged, lines=lines, process_group=dist.group.WORLD, quiet=quiet)

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.quiet()
        if self.lines is not None:
            self.lines.close()
        self.process_group = None
        if kind is None:
            take_groups_from_meshes()
        else:
            _GIVEN_UP.append(dist.group.WORLD)
        if self.tagged:
            dist.destroy_process_group()
        elif kind is not None or not _ends(dist.destroy_process_group, self.timeout_seconds):
            # A transfer over NCCL without its peer never ends by itself, nor does leaving without a peer that stands still; nor might what
            # is done about it, or python, which waits for it.
            signal.alarm(_ENDING_SECONDS)
            _ends(abort_process_group, _LAST_WORDS_SECONDS)

    def command(self, value: dict[str, Any]) -> None:
        """Rank 0: gives all others a command."""
        self.commands += 1
        with _through_the_store():
            self.store.set(self._command_key(), json.dumps(value))

    def next_command(self) -> dict[str, Any]:
        """Others: waits for rank 0's next command, as long as it takes: rank 0 profiles and places meanwhile."""
        self.commands += 1
        key = self._command_key()
        with _through_the_store():
            self.store.wait([key], timedelta(days=1))
            command: dict[str, Any] = json.loads(self.store.get(key))
        return command

    def answer(self, value: dict[str, Any]) -> None:
        """Others: answers the last command."""
        self.store.set(self._answer_key(self.rank), json.dumps(value))

    def answers(self) -> list[dict[str, Any]]:
        """Rank 0: what each other rank answered to the last command, in their order.

        Raises ExecutionError where one failed, saying why, or does not answer in time.
        """
        found = []
        for rank in range(1, self.size):
            value = json.loads(self.hear_from(rank, self._answer_key(rank)))
            if "error" in value:
                raise self.first_failure() or ExecutionError(f"the worker of device {rank} failed: {value['error']}")
            self.store.delete_key(self._answer_key(rank))
            found.append(value)
        with _through_the_store():
            self.store.delete_key(self._command_key())  # all have read it, and the store would grow with every step
        return found

    def hear_from(self, rank: int, key: str) -> bytes:
        """Rank 0: the value of a key that another rank sets, waited for. Raises ExecutionError where it does not in time, or has said that
        it failed."""
        try:
            with _through_the_store():
                value: bytes = self.store.get(key)  # waits as long as a wait would, which would take the store another message
                return value
        except RuntimeError as e:
            raise self.first_failure() or ExecutionError(
                f"the worker of device {rank} did not answer within {self.timeout_seconds:g} s{self.whereabouts(rank)}; "
                "check whether it still runs, or raise --timeout"
            ) from e

    def settle(self) -> None:
        """Rank 0: waits until all others have answered the last command, whatever they say."""
        with contextlib.suppress(RuntimeError):
            self.store.wait([self._answer_key(rank) for rank in range(1, self.size)], timedelta(seconds=self.timeout_seconds))

    def whereabouts(self, rank: int) -> str:
        """Where a worker of this machine was seen last, in brackets; nothing where it is in no step, or on another machine."""
        where = self.crash_log.at(rank)
        return where and f" (it was last seen{where})"

    def first_failure(self) -> ExecutionError | None:
        """Rank 0: the error that another rank answered to the last command; a cause rather than its echo on a rank that lost its peer.

        A cause is waited for a little. None where no rank says that it failed.
        """
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while True:
            keys = {rank: self._answer_key(rank) for rank in range(1, self.size)}
            with _through_the_store():
                said = {rank: self._heard(rank) for rank, key in keys.items() if self.store.check([key])}
            failed = sorted((value.get("echo", False), rank, value["error"]) for rank, value in said.items() if "error" in value)
            if (failed and not failed[0][0]) or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return ExecutionError(f"the worker of device {failed[0][1]} failed: {failed[0][2]}") if failed else None

    def _command_key(self) -> str:
        return f"{COMMAND} {self.commands}"

    def _answer_key(self, rank: int) -> str:
        return f"{ANSWER} {self.commands} {rank}"

    def _heard(self, rank: int) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.store.get(self._answer_key(rank)))
        return answer


def _met(timeout: timedelta) -> tuple[Store, int, int]:
    """The store at which all workers are, the rank of this one, and how many there are."""
    descriptor = environment.meeting_place()
    if descriptor is None:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        return store, rank, size
    rank, size = environment.worker_place()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, size, True, timeout, multi_tenant=True, master_listen_fd=descriptor), rank, size


def _ends(function: Callable[[], None], seconds: float) -> bool:
    """Calls a function in a thread of its own; True if it ends in time, with whatever result."""

    def call() -> None:
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=seconds)
    return not thread.is_alive()


@contextlib.contextmanager
def _through_the_store() -> Iterator[None]:
    """Raises ExecutionError where the store is gone, and with it whoever started the workers."""
    try:
        yield
    except dist.DistNetworkError as e:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ExecutionError(f"nobody answers at {address} any more; check whether what started the workers still runs") from e


def _join_crash_log(store: Store, rank: int, size: int) -> CrashLog:
    """The crash log that all workers of a machine share: of whoever started them, or else of rank 0."""
    given = os.environ.get(environment.CRASH_LOG)
    if given is not None:
        return CrashLog.join(given, size)
    if rank == 0:
        crash = CrashLog.make(size)
        store.set(CRASH_LOG, crash.address or "")
        return crash
    return CrashLog.join(store.get(CRASH_LOG).decode(), size)
