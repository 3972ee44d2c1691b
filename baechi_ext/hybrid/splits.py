"""The effect of a strategy on each op, and the graph that one device of a group then runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baechi_ext.hybrid.sharding import Sharding, compute_share, parts_of, share_of
from baechi_ext.ir.checked import Count, Number, Share
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.shard.graph import Node
from baechi_ext.shard.tables import Tables
from baechi_ext.shard.terms import Compute, Shares

_WORD_BYTES = 4
_BACKWARD = ("input gradient", "weight gradient")
"""Kinds of messages of the backward pass; all others are in the forward pass."""


@dataclass(frozen=True, slots=True)
class OpSplit:
    """The split of an op in its group: its node's loops and into how many parts those are split that are.

    `communication_us` is what it waits for messages of its group, on a device of speed 1. The shares are a device's parts: of its time, of
    what it holds for the whole step, of what it writes and works with, and by name of each tensor that is split otherwise than that.
    """

    node: str | None = None
    splits: Mapping[str, Count] = field(default_factory=dict)
    compute_share: Share = 1.0
    communication_us: Number = 0.0
    persistent_share: Share = 1.0
    output_share: Share = 1.0
    tensor_shares: Mapping[str, Share] = field(default_factory=dict)

    def share_of(self, tensor: str) -> float:
        """A device's part of one of its tensors."""
        return self.tensor_shares.get(tensor, self.output_share)


def sharded_graph(graph: OpGraph, shard: Sequence[OpSplit]) -> OpGraph:
    """The part of the graph that each device of a group has: shares of times and bytes, and the messages inside the group as time."""
    tensors = [replace(t, bytes=t.bytes * shard[t.producer].share_of(t.name)) for t in graph.tensors]
    ops = []
    for v, (op, split) in enumerate(zip(graph.ops, shard, strict=True)):
        beyond = max(op.output_bytes - sum(graph.tensors[t].bytes for t in graph.outputs[v]), 0)
        ops.append(
            replace(
                op,
                compute_us=op.compute_us * split.compute_share + split.communication_us,
                persistent_bytes=op.persistent_bytes * split.persistent_share,
                temporary_bytes=op.temporary_bytes * split.output_share,
                output_bytes=sum(tensors[t].bytes for t in graph.outputs[v]) + beyond * split.output_share,
            )
        )
    return replace(graph, ops=tuple(ops), tensors=tuple(tensors))


def op_splits(graph: OpGraph, sharding: Sharding, tables: Tables, choice: Sequence[int]) -> list[OpSplit]:
    """The split of each op by the strategy `choice` (an index for each node); what ops wait for are messages as the tables cost them.

    The time of moving a tensor inside a group is the first reading op's; sums go with the op after which they are made.
    """
    waits = _waits(graph, sharding, tables, choice)
    strategy = tables.strategy(choice)
    found = []
    for v, op in enumerate(graph.ops):
        n = sharding.node_of[v]
        if n is None:
            found.append(OpSplit(communication_us=waits[v]))
            continue
        node, configuration = sharding.graph.nodes[n], strategy[n]
        update = op.phase == "update"
        weights = share_of(node.weights, configuration)
        output = weights if update else share_of(node.results, configuration)
        tensors = {graph.tensors[t].name: _share_by_size(node, configuration, graph.tensors[t].bytes, op.phase) for t in graph.outputs[v]}
        found.append(
            OpSplit(
                node=node.name,
                splits=node.splits(configuration),
                compute_share=weights if update else compute_share(node, configuration),
                communication_us=waits[v],
                persistent_share=weights,
                output_share=output,
                tensor_shares={name: share for name, share in tensors.items() if share != output},
            )
        )
    return found


def _share_by_size(node: Node, configuration: Sequence[int], size: float, phase: str) -> float:
    """A device's part of a tensor of an op of the node. It is the node's result, or in the backward pass a gradient of what it reads, and
    is known by its size; where several are that large, or none, a device has the largest part that any of them could mean."""
    known = node.results if phase == "forward" else (*node.inputs, *node.weights)
    alike = [tensor for tensor in known if tensor.words * _WORD_BYTES == size]
    return max((1.0 / parts_of(tensor, configuration) for tensor in alike or known), default=1.0)


def _waits(graph: OpGraph, sharding: Sharding, tables: Tables, choice: Sequence[int]) -> list[float]:
    """Time that each op waits for messages, in microseconds of a device of speed 1."""
    found = [0.0] * len(graph)

    def waiting(n: int, *, backward: bool, first: bool) -> int | None:
        host = sharding.hosts[n]
        if host is None:
            return None
        ops = sharding.ops_of[host]
        fitting = [v for v in ops if graph.ops[v].phase == ("backward" if backward else "forward")] or ops
        return fitting[0 if first else -1]

    for n, node in enumerate(sharding.graph.nodes):
        for term in node.terms:
            v = None if isinstance(term, Compute) else waiting(n, backward=term.kind in _BACKWARD, first=False)
            if v is not None:
                row = tables.spaces[n][choice[n] : choice[n] + 1]
                found[v] += float(term.cost(Shares(node.sizes, row, tables.machine))[0])
    for e, edge in enumerate(sharding.graph.edges):
        v = waiting(edge.target, backward=False, first=True)
        if v is not None:
            found[v] += tables.edge_cost(e, choice)
    return found
