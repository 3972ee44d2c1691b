"""A graph's costs and edges as arrays: for sums over a million ops or edges, which plain Python is slow at."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_INSTANT_US = 1e-3
"""Late in a long step a shorter op may start and end at the same floating-point time, and an instant's bytes are not charged."""


class Lists(NamedTuple):
    """Many lists in a row: list i is `items[begins[i] : begins[i + 1]]`."""

    items: Ints
    begins: Ints

    @property
    def owners(self) -> Ints:
        """For each item, the number of its list."""
        return np.repeat(np.arange(len(self.begins) - 1), np.diff(self.begins))


class Columns(NamedTuple):
    """The ops and tensors of an `OpGraph` in columns, a number each. Sums of whole bytes are exact below 2^53."""

    compute_us: Floats
    persistent_bytes: Floats
    output_bytes: Floats
    temporary_bytes: Floats
    tensor_bytes: Floats
    home_bytes: Floats
    """A tensor's bytes where it is made, beside persistent ones: none of a resident op's."""
    producer: Ints
    """One entry per tensor, as of the two before."""
    name_rank: Ints
    """A tensor's rank by name among those of its op."""
    readers: Lists
    """One list per tensor."""
    inputs: Lists
    outputs: Lists

    def made_bytes(self) -> Floats:
        """For each op, the bytes of its tensors, beside persistent ones."""
        return sums_by(self.producer, self.home_bytes, len(self.compute_us))

    def read_bytes(self) -> Floats:
        """For each op, the bytes of the tensors that it reads, where they take the least: at home."""
        return sums_by(self.inputs.owners, self.home_bytes[self.inputs.items], len(self.compute_us))

    def held_bytes(self) -> Floats:
        """For each op, its persistent bytes and all its tensors: in a training step nearly all are held when the forward pass ends."""
        return self.persistent_bytes + self.made_bytes()

    def working_bytes(self) -> Floats:
        """For each op, what it holds only while it runs: temporaries, and what its outputs exceed its tensors by."""
        beyond = self.output_bytes.copy()
        np.subtract.at(beyond, self.producer, self.tensor_bytes)
        return self.temporary_bytes + np.maximum(beyond, 0.0)

    def all_bytes(self) -> Floats:
        """For each op, all bytes that it ever allocates, as if it never freed any."""
        return self.persistent_bytes + self.made_bytes() + self.working_bytes()

    def live_bytes(self) -> Floats:
        """For each op, its tensors, those it reads, and its temporaries."""
        return self.read_bytes() + self.made_bytes() + self.working_bytes()

    def charged_bytes(self) -> Floats:
        """`live_bytes` as devices are charged with them while the op runs; 0 for an op that takes no time."""
        live = self.live_bytes()
        live[self.compute_us < _INSTANT_US] = 0
        return live

    def are_whole(self) -> bool:
        """True if all bytes are whole numbers."""
        sizes = (self.persistent_bytes, self.output_bytes, self.temporary_bytes, self.tensor_bytes)
        return all(np.array_equal(size, np.floor(size)) for size in sizes)


def columns(ops: Sequence[Any], tensors: Sequence[Any], inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Columns:
    """The columns of a graph, of whose fields these are; `OpGraph.columns` keeps them."""
    name_rank = np.zeros(len(tensors), np.int64)
    for made in outputs:
        if len(made) > 1:
            name_rank[sorted(made, key=lambda t: tensors[t].name)] = np.arange(len(made))
    return Columns(
        compute_us=_floats([op.compute_us for op in ops]),
        persistent_bytes=_floats([op.persistent_bytes for op in ops]),
        output_bytes=_floats([op.output_bytes for op in ops]),
        temporary_bytes=_floats([op.temporary_bytes for op in ops]),
        tensor_bytes=_floats([t.bytes for t in tensors]),
        home_bytes=_floats([0 if ops[t.producer].resident else t.bytes for t in tensors]),
        producer=np.array([t.producer for t in tensors], np.int64),
        name_rank=name_rank,
        readers=_lists([t.readers for t in tensors]),
        inputs=_lists(inputs),
        outputs=_lists(outputs),
    )


def sums_by(group: Ints, values: Floats, count: int) -> Floats:
    """For each of this many groups, the sum of its members' values; `group` has an entry per value."""
    return np.bincount(group, values, count)  # type: ignore[return-value]  # with weights it makes floats, which its types do not say


def _floats(values: Iterable[float]) -> Floats:
    return np.array(values, np.float64)


def _lists(lists: Sequence[Sequence[int]]) -> Lists:
    begins = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=begins[1:])
    return Lists(np.fromiter(chain.from_iterable(lists), np.int64, begins[-1]), begins)
