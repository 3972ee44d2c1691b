"""The `grain` grouper: ops that cost more to part than parting them could ever gain run on one device.

Sarkar's internalisation (Partitioning and Scheduling Parallel Programs for Multiprocessors, 1989) joins the ends of the edges that cost
most, and Gerasoulis and Yang (On the Granularity and Clustering of Directed Acyclic Task Graphs, IEEE TPDS 4(6), 1993) say when to stop:
in a coarse-grained graph, where no op takes less time than what it exchanges with others, parting ops costs at most a factor of two.
"""

import heapq
from collections.abc import Iterator

from baechi_ext.group.colocation import DEFAULT_MAX_SHARE, Loads
from baechi_ext.ir.cluster import Link
from baechi_ext.ir.op_graph import OpGraph

_SMALL = 1 / 8  # a group may outgrow its share by this part of it, to take in what is no larger than that


def grain(graph: OpGraph, max_share: float = DEFAULT_MAX_SHARE, link: Link = Link()) -> OpGraph:  # noqa: B008 - frozen
    """`graph` relabelled: colocation groups (an op without a string is one of its own) are joined while moving what goes from one to the
    other over `link` takes, with what it takes from the devices, at least as long as the quicker of the two.

    Two devices could gain no more than that time from having one each. What costs most beside that time is joined first. A tensor counts
    once for each group that reads it, as it is sent. Groups stay below `max_share` of the graph's compute time and persistent bytes, as
    in `coplace`, but for small ones that would have nowhere else to go. What is pinned to different devices stays apart. Where
    links cost nothing, nothing is joined.

    Raises OptionError where `max_share` is not positive.
    """
    return _Grains(graph, max_share, link).joined().relabelled()


class _Grains:
    """Groups, by the op that stands for each, and the tensors that go between them."""

    def __init__(self, graph: OpGraph, max_share: float, link: Link) -> None:
        self.groups = Loads(graph, max_share)
        self.cost_us = [link.total_us(t.bytes) for t in graph.tensors]
        self.between: dict[int, dict[int, set[int]]] = {}
        """Group -> neighbour -> the tensors that go from either to the other."""
        self.between_us: dict[tuple[int, int], float] = {}
        find = self.groups.find
        for t, tensor in enumerate(graph.tensors):
            a = find(tensor.producer)
            for b in {find(w) for w in tensor.readers} - {a}:
                self._add(a, b, {t})

    def joined(self) -> Loads:
        queue = [self._entry(a, b) for a, b in sorted(self.between_us)]
        heapq.heapify(queue)
        while queue:
            entry = heapq.heappop(queue)
            a, b = sorted(map(self.groups.find, entry[1:]))
            if a == b or (a, b) not in self.between_us:
                continue
            now = self._entry(a, b)
            if now[0] > entry[0]:  # it has become less worth while
                heapq.heappush(queue, now)
            elif self._should_join(a, b):
                for changed in self._join(a, b):
                    heapq.heappush(queue, changed)
        return self.groups

    def _add(self, a: int, b: int, tensors: set[int]) -> None:
        for x, y in ((a, b), (b, a)):
            self.between.setdefault(x, {}).setdefault(y, set())
        new = tensors - self.between[a][b]
        self.between[a][b] |= new
        self.between[b][a] = self.between[a][b]
        pair = (min(a, b), max(a, b))
        self.between_us[pair] = self.between_us.get(pair, 0.0) + sum(self.cost_us[t] for t in new)

    def _entry(self, a: int, b: int) -> tuple[float, int, int]:
        """Those that come first are joined first."""
        quicker_us = min(self.groups.compute_us[a], self.groups.compute_us[b])
        between_us = self.between_us[min(a, b), max(a, b)]
        return -between_us / quicker_us if quicker_us else -float("inf"), a, b

    def _should_join(self, a: int, b: int) -> bool:
        between_us = self.between_us[a, b]
        is_too_dear = between_us > 0 and between_us >= min(self.groups.compute_us[a], self.groups.compute_us[b])
        return is_too_dear and self.groups.may_join(a, b, _SMALL)

    def _join(self, a: int, b: int) -> Iterator[tuple[float, int, int]]:
        """Makes one group of two. Yields the entries of those neighbours that it has more to do with than either had."""
        root = self.groups.join(a, b)
        gone = b if root == a else a
        del self.between[root][gone], self.between_us[a, b]
        for other, tensors in self.between.pop(gone).items():
            if other == root:
                continue
            del self.between[other][gone], self.between_us[min(gone, other), max(gone, other)]
            both = other in self.between[root]
            self._add(root, other, tensors)
            if both:
                yield self._entry(*sorted((root, other)))
