"""Shard graphs of small modules, written down: for each call letters for the dimensions of what it reads and writes."""

from collections.abc import Mapping, Sequence

from torch import fx

from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Tensor
from baechi_runtime.sharding.captured import CapturedGraph, ForwardGraph
from baechi_runtime.sharding.rules import arguments


def captured_by_hand(forward: ForwardGraph, texts: Mapping[str, str]) -> CapturedGraph:
    """`texts`: by call, `bk nk n -> bn`; a dimension that several letters share is `(bs)`, one that is never split `.`."""
    calls = [call for call in forward.nodes if call.name in texts]
    nodes, reads = zip(*(_node(forward, call, texts[call.name]) for call in calls), strict=True)
    index = {node.name: i for i, node in enumerate(nodes)}
    edges = []
    for call in forward.nodes:
        read = [a for a in arguments(call) if a.name not in forward.parameters | forward.buffers]
        if call.name in index:
            edges += [Edge(index[a.name], index[call.name], 0, i) for i, a in enumerate(read) if a.name in index]
    graph = ShardGraph("by hand", nodes, tuple(edges))
    return CapturedGraph(forward, graph, {node.name: read for node, read in zip(nodes, reads, strict=True)}, {})


def strategy(graph: ShardGraph, splits: Mapping[str, Mapping[str, int]]) -> list[tuple[int, ...]]:
    """A configuration a node: by letter, into how many parts; `*` is for all nodes that are not named."""
    chosen = [splits.get(node.name, splits.get("*", {})) for node in graph.nodes]
    return [tuple(split.get(axis.name, 1) for axis in node.axes) for node, split in zip(graph.nodes, chosen, strict=True)]


def _node(forward: ForwardGraph, call: fx.Node, text: str) -> tuple[Node, tuple[tuple[str, Tensor], ...]]:
    left, right = (side.split() for side in text.split("->"))
    sizes: dict[str, int] = {}
    values = [*arguments(call), call]
    shapes = [tuple(v.meta["val"].shape) if v.meta["val"].dim() else (1,) for v in values]
    for letters, shape in zip((*left, *right), shapes, strict=True):
        for dim, size in zip(_dims(letters), shape, strict=True):
            if len(dim) == 1:
                sizes[dim] = size
    names = sorted(sizes)
    tensors = [Tensor(s, tuple(tuple(names.index(c) for c in d) for d in _dims(t))) for t, s in zip((*left, *right), shapes, strict=True)]
    weights = [t for t, v in zip(tensors, values[:-1], strict=False) if v.name in forward.parameters | forward.buffers]
    inputs = [t for t, v in zip(tensors, values[:-1], strict=False) if v.name not in forward.parameters | forward.buffers]
    axes = tuple(Axis(name, sizes[name]) for name in names)
    node = Node(call.name, str(call.target), axes, tuple(inputs), tuple(tensors[len(left) :]), weights=tuple(weights))
    return node, tuple((v.name, t) for v, t in zip(values, tensors[: len(left)], strict=False))


def _dims(text: str) -> Sequence[str]:
    """`b(hk).` -> b, hk, and nothing."""
    found, inside = [], None
    for c in text:
        if c == "(":
            inside = ""
        elif c == ")":
            found.append(inside or "")
            inside = None
        elif inside is not None:
            inside += c
        else:
            found.append("" if c == "." else c)
    return found
