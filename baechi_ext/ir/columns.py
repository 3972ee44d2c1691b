"""A graph's costs and edges as arrays: for sums over a million ops or edges, which plain Python is slow at."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from baechi_ext.ir.op_graph import OpGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Lists(NamedTuple):
    """Many lists in a row: list i is `items[begins[i] : begins[i + 1]]`."""

    items: Ints
    begins: Ints

    @property
    def owners(self) -> Ints:
        """For each item, the number of its list."""
        return np.repeat(np.arange(len(self.begins) - 1), np.diff(self.begins))


class Columns(NamedTuple):
    """What `OpGraph` says of ops and tensors, a number each. Sums of whole bytes are exact below 2^53."""

    compute_us: Floats
    persistent_bytes: Floats
    output_bytes: Floats
    temporary_bytes: Floats
    tensor_bytes: Floats
    producer: Ints
    """Of tensors."""
    readers: Lists
    """Of tensors."""
    inputs: Lists
    outputs: Lists

    def made_bytes(self) -> Floats:
        """For each op, the bytes of its tensors."""
        return np.bincount(self.producer, self.tensor_bytes, len(self.compute_us))

    def read_bytes(self) -> Floats:
        """For each op, the bytes of the tensors that it reads."""
        return np.bincount(self.inputs.owners, self.tensor_bytes[self.inputs.items], len(self.compute_us))

    def working_bytes(self) -> Floats:
        """For each op, what it holds only while it runs: temporaries, and what its outputs exceed its tensors by."""
        beyond = self.output_bytes.copy()
        np.subtract.at(beyond, self.producer, self.tensor_bytes)
        return self.temporary_bytes + beyond.clip(0.0)

    def all_bytes(self) -> Floats:
        """For each op, all bytes that it ever allocates, as if it never freed any."""
        return self.persistent_bytes + self.temporary_bytes + np.maximum(self.output_bytes, self.made_bytes())

    def live_bytes(self) -> Floats:
        """For each op, its tensors, those it reads, and its temporaries."""
        return self.read_bytes() + np.maximum(self.made_bytes(), self.output_bytes) + self.temporary_bytes

    def are_whole(self) -> bool:
        """Whether all bytes are whole numbers."""
        sizes = (self.persistent_bytes, self.output_bytes, self.temporary_bytes, self.tensor_bytes)
        return all(np.array_equal(size, np.floor(size)) for size in sizes)


def columns(graph: "OpGraph") -> Columns:
    """The columns of a graph; `OpGraph.columns` keeps them."""
    ops, tensors = graph.ops, graph.tensors
    return Columns(
        compute_us=_floats([op.compute_us for op in ops]),
        persistent_bytes=_floats([op.persistent_bytes for op in ops]),
        output_bytes=_floats([op.output_bytes for op in ops]),
        temporary_bytes=_floats([op.temporary_bytes for op in ops]),
        tensor_bytes=_floats([t.bytes for t in tensors]),
        producer=np.array([t.producer for t in tensors], np.int64),
        readers=_lists([t.readers for t in tensors]),
        inputs=_lists(graph.inputs),
        outputs=_lists(graph.outputs),
    )


def _floats(values: Iterable[float]) -> Floats:
    return np.array(values, np.float64)


def _lists(lists: Sequence[Sequence[int]]) -> Lists:
    begins = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=begins[1:])
    return Lists(np.fromiter(chain.from_iterable(lists), np.int64, begins[-1]), begins)
