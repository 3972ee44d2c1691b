"""Small training steps whose best plans are known, and what their ops split into."""

from collections.abc import Sequence

from baechi_ext.hybrid.sharding import Sharding
from baechi_ext.ir import Op, OpGraph
from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Tensor
from baechi_ext.shard.terms import AllReduce, Compute, Term

WORDS = 64
"""Numbers in every tensor between ops."""


def layer(name: str, parts: int, sums: float = 0.0, reads: int = 0) -> Node:
    """A layer whose one loop is as long as the parts that it can be split into, with `sums` words to add up over these."""
    tensor = Tensor((WORDS,), ((0,),))
    terms: tuple[Term, ...] = (Compute(1.0, (0,)),)
    if sums:
        terms += (AllReduce(sums, (), (0,), "output sum"),)
    return Node(name, "layer", (Axis("rows", parts),), (tensor,) * reads, (tensor,), terms)


def step(layers: Sequence[Node], edges: Sequence[tuple[int, int]] = (), us: float = 100.0) -> tuple[OpGraph, Sharding]:
    """An op of this many microseconds for each layer, a tensor for each edge."""
    taken: dict[int, int] = {}
    shard_edges = []
    for source, target in edges:
        taken[target] = taken.get(target, -1) + 1
        shard_edges.append(Edge(source, target, 0, taken[target]))
    ops = [Op(node.name, compute_us=us, output_bytes=4 * WORDS) for node in layers]
    graph = OpGraph.from_edges(ops, [(layers[s].name, layers[t].name, 4 * WORDS, "out") for s, t in edges])
    return graph, Sharding(ShardGraph("step", tuple(layers), tuple(shard_edges)), tuple(range(len(layers))))
