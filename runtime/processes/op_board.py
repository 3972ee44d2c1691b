"""A board on which every worker process notes the op it is at, so that whoever outlives it can say where it died or stands still.

It is memory that the workers of a machine share, a file without a name, so nothing is left of it when they are gone. A note is a copy of
some bytes: there is no lock, and nobody waits.
"""

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baechi_ext.ir import OpGraph
from runtime.torch_ops import LoweredProgram, Segment

_HEAD, _ROW = 32, 160
_NAME = "baechi_ops"
VARIABLE = "BAECHI_OP_BOARD"
"""The environment variable in which whoever starts workers tells them of a board."""


class OpBoard:
    """Rows of text, one a worker. `address` is where other processes of this machine find it; None where they can't."""

    def __init__(self, memory: memoryview, address: str | None) -> None:
        self._memory = memory
        self.address = address

    @classmethod
    def make(cls, workers: int) -> "OpBoard":
        """A board for so many workers. Where the system has no files without a name (Linux has), it is of this process alone."""
        size = _HEAD + workers * _ROW
        if not hasattr(os, "memfd_create"):
            return cls(memoryview(bytearray(size)), None)
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, size)
        memory = memoryview(mmap.mmap(descriptor, size))
        token = secrets.token_hex(_HEAD // 2)
        memory[:_HEAD] = token.encode()
        return cls(memory, f"/proc/{os.getpid()}/fd/{descriptor}:{token}")

    @classmethod
    def join(cls, address: str | None, workers: int) -> "OpBoard":
        """The board at an address that another process gave; one of this process alone where it is not of this machine."""
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
        said = bytes(self._row(rank)).rstrip(b"\0").decode("utf-8", errors="ignore")
        return f" in {said}" if said else ""

    def marked(self, program: LoweredProgram, graph: OpGraph, rank: int) -> LoweredProgram:
        """The program, noting every op in the worker's row as it comes to it, and nothing once all are done."""
        row = self._row(rank)

        def noted(segment: Segment) -> Segment:
            op = graph.ops[segment.op]
            return replace(segment, before=(_note(row, f"{op.phase} op {op.id!r}"), *segment.before), arrivals=1 + segment.arrivals)

        return replace(program, segments=tuple(map(noted, program.segments)), epilogue=(*program.epilogue, _note(row, "")))

    def _row(self, rank: int) -> memoryview:
        return self._memory[_HEAD + rank * _ROW : _HEAD + (rank + 1) * _ROW]


def _note(row: memoryview, text: str) -> Callable[[list[Any]], None]:
    content = text.encode()[:_ROW].ljust(_ROW, b"\0")

    def note(_: list[Any]) -> None:
        row[:] = content

    return note
