"""A crash log on which every worker process notes the op it is at, so that whoever outlives it can say where it died or stands still, and
what memory its part of the plan takes.

It is memory that the workers of a machine share, a file without a name, so nothing is left of it when they are gone. A note is a copy of
some bytes: there is no lock, and nobody waits.
"""

import contextlib
import mmap
import os
import secrets
import weakref
from collections.abc import Callable

_HEAD, _ROW, _SIZE = 32, 168, 8
"""Bytes of the token, of a worker's row, and of the number at the end of that row."""
_NAME = "baechi_ops"


class CrashLog:
    """Rows of text, one a worker. `address` is where other processes of this machine find it; None where they can't."""

    def __init__(self, memory: memoryview, address: str | None) -> None:
        self._memory = memory
        self.address = address

    @classmethod
    def make(cls, workers: int) -> "CrashLog":
        """A crash log for this many workers. Where the system has no files without a name (Linux has), it is of this process alone."""
        size = _HEAD + workers * _ROW
        if not hasattr(os, "memfd_create"):
            return cls(memoryview(bytearray(size)), None)
        mapped, descriptor = nameless(_NAME, size)
        memory = memoryview(mapped)
        token = secrets.token_hex(_HEAD // 2)
        memory[:_HEAD] = token.encode()
        return cls(memory, f"/proc/{os.getpid()}/fd/{descriptor}:{token}")

    @classmethod
    def join(cls, address: str | None, workers: int) -> "CrashLog":
        """The crash log at an address that another process gave; one of this process alone where it is not of this machine."""
        path, _, token = (address or "").rpartition(":")
        size = _HEAD + workers * _ROW
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(path).startswith(f"/memfd:{_NAME}"):
                descriptor = os.open(path, os.O_RDWR)
                try:
                    memory = memoryview(mmap.mmap(descriptor, size))
                finally:
                    os.close(descriptor)
                if bytes(memory[:_HEAD]) == token.encode():
                    return cls(memory, address)
        return cls(memoryview(bytearray(size)), None)

    def at(self, rank: int) -> str:
        """Where a worker is: " in forward op 'x'", or nothing where it is in no step, or on another machine."""
        said = bytes(self._row(rank)[:-_SIZE]).rstrip(b"\0").decode("utf-8", errors="ignore")
        return f" in {said}" if said else ""

    def planned(self, rank: int) -> str:
        """The memory that a worker's part of the plan takes, in words; empty where it has loaded none, or is on another machine."""
        planned_bytes = int.from_bytes(self._row(rank)[-_SIZE:], "little")
        return f" (its part of the plan takes {planned_bytes} bytes)" if planned_bytes else ""

    def plan(self, rank: int, planned_bytes: int) -> None:
        """Notes the memory that a worker's part of the plan takes."""
        self._row(rank)[-_SIZE:] = planned_bytes.to_bytes(_SIZE, "little")

    def note(self, rank: int, text: str) -> Callable[[object], None]:
        """A function that notes, whatever it is called with, where a worker is."""
        row, content = self._row(rank), text.encode()[: _ROW - _SIZE].ljust(_ROW - _SIZE, b"\0")

        def note(_: object) -> None:
            row[:-_SIZE] = content

        return note

    def _row(self, rank: int) -> memoryview:
        return self._memory[_HEAD + rank * _ROW : _HEAD + (rank + 1) * _ROW]


def nameless(title: str, size: int) -> tuple[mmap.mmap, int]:
    """Memory of this many zeros, and the file without a name by which other processes may open it; it is closed with the memory."""
    descriptor = os.memfd_create(title)
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(memory, os.close, descriptor).atexit = False  # the system does that, and a forked process may have closed it before
    return memory, descriptor
