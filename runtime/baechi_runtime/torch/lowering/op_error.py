"""Explains the failure of an op on a device: which op, what happened, and, where memory ran out, what was held."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from baechi_ext.capture.torch_private import dense_parts
from baechi_ext.errors import ExecutionError, first_line
from baechi_ext.ir.op_graph import OpGraph

_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "Cannot allocate memory")
"""Out of memory, in the words of torch, the C++ library, oneDNN and the system."""


class OpError(Exception):
    """An instruction of an op (None: of the writing back of buffers) raised `cause`; `live` are the tensors that the device held then."""

    def __init__(self, op: int | None, cause: Exception, live: "Storages") -> None:
        super().__init__(op, cause)
        self.op = op
        self.cause = cause
        self.live = live

    def explain(
        self, device: str, graph: OpGraph, limit_bytes: float | None = None, held: Mapping[str, torch.Tensor] | None = None
    ) -> str:
        """One line: device, op, and what happened; where memory ran out also how much was held, in which tensors, and what to try.

        `limit_bytes` is what the device may hold, where that is kept; `held` is what it holds whether a step runs or not, by name.
        """
        where = "writing back buffers" if self.op is None else f"op {graph.ops[self.op].id!r}"
        reason = first_line(self.cause)
        if isinstance(self.cause, (MemoryError, torch.OutOfMemoryError)) or any(words in str(self.cause) for words in _OUT_OF_MEMORY):
            limit = "" if limit_bytes is None else f" (its limit is {limit_bytes:.0f} bytes, and the step takes more than its profile says)"
            live = in_words(self.live | storages_of((held or {}).items()))
            return (
                f"device {device} ran out of memory in {where}{limit}: {reason}; {live}; raise --device_memory, "
                "profile again without --cost_path, use more devices, or a smaller batch"
            )
        return f"device {device} failed in {where}: {type(self.cause).__name__}: {reason}"


class OpFailure(ExecutionError):
    """An op raised; the other devices' errors are its echo."""


@contextlib.contextmanager
def explained(device: str, graph: OpGraph) -> Iterator[None]:
    """Raises OpFailure where an op of the graph's fails on the device."""
    try:
        yield
    except OpError as e:
        raise OpFailure(e.explain(device, graph)) from e.cause


_NAMED = 3
"""The number of largest tensors that are named where memory runs out."""


Storages = dict[int, tuple[str, int]]
"""The storages that tensors were in: where each begins -> (the tensor's name, bytes)."""


def storages_of(named: Iterable[tuple[str, Any]]) -> Storages:
    """The storages of these values; the first name of a storage counts. What is no tensor is passed over."""
    found: Storages = {}
    for name, value in named:
        if isinstance(value, torch.Tensor):
            for storage in (part.untyped_storage() for part in dense_parts(value)):
                found.setdefault(storage.data_ptr(), (name, storage.nbytes()))
    return found


def in_words(storages: Storages) -> str:
    """Names the total bytes and the largest tensors."""
    largest = sorted(storages.values(), key=lambda item: (-item[1], item[0]))[:_NAMED]
    named = ", ".join(f"{name} ({size} bytes)" for name, size in largest)
    return f"it held {sum(size for _, size in storages.values())} bytes then, most of them in {named or 'no tensor'}"
