"""The orders in which a placer can visit the ops of a graph.

They are those of the traversal-order study (Wang, Payberah, Hagos and Vlassov, arXiv 2201.09676) and their reverses. All but `topo`
and its reverse go by name where they have a choice, so that they are the same whatever the order of the graph file. Names are ids.
"""

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from random import Random
from typing import NamedTuple

from baechi_ext.errors import OptionError
from baechi_ext.ir.op_graph import OpGraph


class Traversal(NamedTuple):
    """An order: how it is made of a graph and a seed, and a line for menus."""

    function: Callable[[OpGraph, int], tuple[int, ...]]
    help: str


def traversal(graph: OpGraph, name: str, seed: int = 0) -> tuple[int, ...]:
    """All op positions, each once, in the order of that name (a key of TRAVERSALS); the seed is for `random`.

    Raises OptionError for an unknown name.
    """
    if name not in TRAVERSALS:
        raise OptionError(f"unknown traversal order {name!r}; choose one of {', '.join(TRAVERSALS)}")
    return TRAVERSALS[name].function(graph, seed)


def _lexico_topo(graph: OpGraph, seed: int) -> tuple[int, ...]:
    """The topological order in which, of the ops whose inputs have all been visited, the first by name is next."""
    missing = [len(p) for p in graph.predecessors]
    ready = [(graph.ops[v].id, v) for v, count in enumerate(missing) if count == 0]
    heapify(ready)
    order = []
    while ready:
        _, v = heappop(ready)
        order.append(v)
        for w in graph.successors[v]:
            missing[w] -= 1
            if missing[w] == 0:
                heappush(ready, (graph.ops[w].id, w))
    return tuple(order)


def _alpha(graph: OpGraph, seed: int) -> tuple[int, ...]:
    return tuple(sorted(range(len(graph)), key=lambda v: graph.ops[v].id))


def _bfs(graph: OpGraph, seed: int) -> tuple[int, ...]:
    """A source, then what reads from it, then what reads from that; then the next source, without what has been visited."""
    successors = _successors_by_name(graph)
    seen = [False] * len(graph)
    order: list[int] = []
    for source in _sources_by_name(graph):
        seen[source] = True
        queue = deque([source])
        while queue:
            v = queue.popleft()
            order.append(v)
            for w in successors[v]:
                if not seen[w]:
                    seen[w] = True
                    queue.append(w)
    return tuple(order)


def _random(graph: OpGraph, seed: int) -> tuple[int, ...]:
    order = list(_alpha(graph, seed))
    Random(seed).shuffle(order)
    return tuple(order)


def _depth_first(graph: OpGraph, entered: bool) -> tuple[int, ...]:
    """The ops of a depth-first search from the sources in the order in which they are entered, or else left."""
    successors = _successors_by_name(graph)
    seen = [False] * len(graph)
    order: dict[bool, list[int]] = {True: [], False: []}
    for source in _sources_by_name(graph):
        seen[source] = True
        order[True].append(source)
        stack = [(source, iter(successors[source]))]
        while stack:
            v, left = stack[-1]
            w = next((w for w in left if not seen[w]), None)
            if w is None:
                stack.pop()
                order[False].append(v)
            else:
                seen[w] = True
                order[True].append(w)
                stack.append((w, iter(successors[w])))
    return tuple(order[entered])


def _sources_by_name(graph: OpGraph) -> list[int]:
    """The ops without inputs; every op can be reached from one of them."""
    return sorted((v for v, inputs in enumerate(graph.inputs) if not inputs), key=lambda v: graph.ops[v].id)


def _successors_by_name(graph: OpGraph) -> list[list[int]]:
    return [sorted(after, key=lambda w: graph.ops[w].id) for after in graph.successors]


TRAVERSALS: dict[str, Traversal] = {
    "topo": Traversal(lambda graph, _: graph.order, "inputs first, first come first served"),
    "reversed_topo": Traversal(lambda graph, _: graph.order[::-1], "readers first: topo from its end"),
    "lexico_topo": Traversal(_lexico_topo, "inputs first, by name"),
    "alpha": Traversal(_alpha, "by name alone"),
    "bfs": Traversal(_bfs, "breadth first from the sources, by name"),
    "reversed_bfs": Traversal(lambda graph, seed: _bfs(graph, seed)[::-1], "bfs from its end"),
    "dfs_preorder": Traversal(lambda graph, _: _depth_first(graph, True), "depth first from the sources, an op before what reads from it"),
    "dfs_postorder": Traversal(lambda graph, _: _depth_first(graph, False), "depth first from the sources, an op after what reads from it"),
    "random": Traversal(_random, "at random, by --seed"),
}
