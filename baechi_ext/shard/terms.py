"""The terms that a layer's costs are made of. Each term is a line of arithmetic over all configurations of a node at once.

`words` and `flop` are per iteration of the axes named in `axes`: a term multiplies them by a device's share of these axes. `over` are the
axes whose parts work together: the product of their splits is how many devices take part.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from baechi_ext.shard.machine import Costs, Machine

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Shares:
    """All configurations of a node, and what is left to a device in each: a row a configuration, a column an axis."""

    sizes: tuple[int, ...]
    splits: np.ndarray
    machine: Machine

    @cached_property
    def lengths(self) -> Costs:
        return np.array(self.sizes, float) / self.splits

    @cached_property
    def devices(self) -> Costs:
        return self.splits.prod(axis=1).astype(float)

    def count(self, axes: Axes) -> Costs:
        """A device's iterations of these axes."""
        return self.lengths[:, axes].prod(axis=1)

    def group(self, axes: Axes) -> Costs:
        """The number of devices that share out these axes."""
        return self.splits[:, axes].prod(axis=1).astype(float)

    def near(self, axes: Axes) -> Costs:
        """The number of them in one node, where the first axis goes between nodes and the last axis inside."""
        if self.machine.devices_per_node is None:
            return self.group(axes)
        inner = np.cumprod(self.splits[:, ::-1], axis=1)[:, ::-1] / self.splits
        room = self.machine.devices_per_node // inner
        near = np.ones_like(self.splits)
        for parts in range(2, min(self.machine.devices_per_node, int(self.splits.max(initial=1))) + 1):
            near[(self.splits % parts == 0) & (parts <= room)] = parts  # as many in each node
        return near[:, axes].prod(axis=1).astype(float)


@dataclass(frozen=True, slots=True)
class Compute:
    """Arithmetic: `flop` for each iteration of `axes` that a device has."""

    flop: float
    axes: Axes
    kind: str = "compute"
    hides: bool = False

    def cost(self, shares: Shares) -> Costs:
        return self.flop * shares.count(self.axes)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The sum of `words` numbers for each iteration of `axes`, over all parts of the axes `over`; `times` over, in this many `messages`."""

    words: float
    axes: Axes
    over: Axes
    kind: str
    times: float = 1.0
    messages: float = 1.0
    hides: bool = False

    def cost(self, shares: Shares) -> Costs:
        words = self.words * shares.count(self.axes)
        return self.times * shares.machine.all_reduce(words, shares.group(self.over), shares.near(self.over), self.messages)


@dataclass(frozen=True, slots=True)
class Exchange:
    """`words` numbers for each iteration of `axes` that a device gets from others where one of the axes `over` is split."""

    words: float
    axes: Axes
    over: Axes
    kind: str
    hides: bool = False

    def cost(self, shares: Shares) -> Costs:
        words = np.where(shares.group(self.over) > 1, self.words * shares.count(self.axes), 0.0)
        return shares.machine.exchange(words, shares.devices)


@dataclass(frozen=True, slots=True)
class Halo:
    """The rim of a device's part of an image: `reach` rows (columns) beyond it along each of the axes `along`, where that is split.

    `shape` is the image's length along these; `words` numbers for each iteration of the other `axes`.
    """

    words: float
    axes: Axes
    along: Axes
    shape: tuple[int, ...]
    reach: tuple[float, ...]
    kind: str = "halo"
    hides: bool = False

    def cost(self, shares: Shares) -> Costs:
        splits = shares.splits[:, self.along]
        whole = np.array(self.shape, float)
        part = whole / splits
        rim = np.where(splits > 1, np.array(self.reach, float), 0.0)
        words = (np.minimum(part + rim, whole).prod(axis=1) - part.prod(axis=1)) * self.words * shares.count(self.axes)
        return shares.machine.exchange(words, shares.devices, messages=2.0)


@dataclass(frozen=True, slots=True)
class Feedback:
    """A result split as the axes `source` are is read again split as the axes `target` are, `times` over (a recurrent layer's state)."""

    source: Axes
    target: Axes
    times: float
    kind: str = "recurrence"
    hides: bool = False

    def cost(self, shares: Shares) -> Costs:
        written, read = shares.lengths[:, self.source], shares.lengths[:, self.target]
        common = np.where(shares.group(self.target) > shares.group(self.source), 0.0, np.minimum(written, read).prod(axis=1))
        return self.times * shares.machine.exchange((read.prod(axis=1) - common).clip(min=0.0), shares.devices)


Term = Compute | AllReduce | Exchange | Halo | Feedback
"""A part of a layer's cost. `kind` is what reports call it; `hides`: it can go on while the layer computes; `cost`: operations of a
device, for each configuration of the node."""
