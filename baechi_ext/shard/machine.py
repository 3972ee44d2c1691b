"""The devices that a graph is sharded over, and what computing and communicating takes on them.

Costs are FLOP of one device: r words of communication take as long as r * flop_per_word operations (Elango, IPDPS 2021, section II).
"""

from dataclasses import dataclass, field
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from baechi_ext.errors import ShardError

Costs = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """So many equal devices. `tera_flops`: 10^12 operations a second each; `gigabytes_per_second`: of each device's link.

    `devices_per_node`: so many share a node, and what leaves one goes at `node_gigabytes_per_second` and `node_latency_us`.
    `overlap`: gradients of weights are summed up while the backward pass computes. `memory_bytes`: what a device can hold.
    """

    devices: int
    tera_flops: float = 10.0
    gigabytes_per_second: float = 16.0
    word_bytes: int = 4
    latency_us: float = 0.0
    devices_per_node: int | None = None
    node_gigabytes_per_second: float | None = None
    node_latency_us: float | None = None
    overlap: bool = False
    memory_bytes: float | None = None
    optimizer_words: int = 1
    flop_per_word: float = field(init=False)

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ShardError(f"{self.devices} devices; give 1 or more (-p)")
        for flag, value in (("--flops", self.tera_flops), ("--bw", self.gigabytes_per_second),
                            ("--node_bw", self.node_gigabytes_per_second), ("--device_memory", self.memory_bytes)):  # fmt: skip
            if value is not None and not (isfinite(value) and value > 0):
                raise ShardError(f"{flag} is {value:g}; give a finite number above 0")
        for flag, us in (("--latency", self.latency_us), ("--node_latency", self.node_latency_us)):
            if us is not None and not (isfinite(us) and us >= 0):
                raise ShardError(f"{flag} is {us:g}; give a finite number of microseconds, 0 or more")
        if self.optimizer_words < 0:
            raise ShardError(f"{self.optimizer_words} numbers of optimizer state per parameter; give 0 or more (--optimizer_words)")
        if self.devices_per_node is None and (self.node_gigabytes_per_second, self.node_latency_us) != (None, None):
            raise ShardError("--node_bw and --node_latency are of links between nodes; give --devices_per_node as well")
        if self.devices_per_node is not None and self.devices_per_node < 1:
            raise ShardError(f"{self.devices_per_node} devices per node; give 1 or more (--devices_per_node)")
        object.__setattr__(self, "flop_per_word", self._flop_per_word(self.gigabytes_per_second))

    def _flop_per_word(self, gigabytes_per_second: float) -> float:
        return self.tera_flops * 1000 / (gigabytes_per_second / self.word_bytes)

    @property
    def _flop_per_message(self) -> float:
        return self.latency_us * self.tera_flops * 1e6

    @property
    def _flop_per_far_message(self) -> float:
        us = self.latency_us if self.node_latency_us is None else self.node_latency_us
        return us * self.tera_flops * 1e6

    @property
    def _flop_per_far_word(self) -> float:
        return self._flop_per_word(self.node_gigabytes_per_second or self.gigabytes_per_second)

    def seconds(self, cost: float) -> float:
        """The seconds that a device takes for that many operations."""
        return cost / (self.tera_flops * 1e12)

    def all_reduce(self, words: Costs, group: Costs, near: Costs, messages: float = 1.0) -> Costs:
        """Operations a ring all-reduce of `words` takes among `group` devices, of which `near` are in one node.

        With two levels it is summed up inside nodes first, then between them, a part by each device. `messages`: in this many pieces.
        """
        if self.devices_per_node is None:
            return self._ring(words, group, self.flop_per_word, messages * self._flop_per_message)
        inside = self._ring(words, near, self.flop_per_word, messages * self._flop_per_message)
        return inside + self._ring(words / near, group / near, self._flop_per_far_word, messages * self._flop_per_far_message)

    @staticmethod
    def _ring(words: Costs, group: Costs, flop_per_word: float, flop_per_message: float) -> Costs:
        steps = 2.0 * (group - 1)
        cost = flop_per_word * (words / group * steps)
        return cost + flop_per_message * steps if flop_per_message else cost

    def exchange(self, words: Costs, devices: Costs, messages: float = 1.0) -> Costs:
        """Operations it takes a device to get `words` from others, of which there are `devices` in all; 0 for no words."""
        far = np.asarray(devices) > self.devices_per_node if self.devices_per_node is not None else np.False_
        cost = np.where(far, self._flop_per_far_word, self.flop_per_word) * words
        if self._flop_per_message or self._flop_per_far_message:
            cost = cost + np.where(far, self._flop_per_far_message, self._flop_per_message) * messages * (np.asarray(words) > 0)
        return cost
