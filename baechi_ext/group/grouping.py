"""Grouping: a coarse graph and the way back. A grouper returns one; a placer places the coarse graph; `expand` undoes it.

`contract` makes the coarse graph of a partition of the ops, with its costs and tensors: all groupings are built by it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from baechi_ext.ir.op_graph import Op, OpGraph

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of Baechi's groupers; a placer type reads those that concern it."""

    only_important_ops: bool = False
    """Ops that hardly count are folded into a neighbour first (group/forward.py)."""
    consider_all_edges: bool = False
    """colocation: edges that only order updates, of 0 bytes, keep ops apart, too."""
    resolve_cycle: bool = False
    """colocation: one op per group, whatever cycle that closes."""
    check_disjoint_paths: bool = False
    """fusion: contract every edge inside a group that has no second path beside it."""
    allow_cycle: bool = False
    """fusion: contract every edge inside a group, whatever cycle that closes."""


@dataclass(frozen=True)
class Grouping:
    """`members[g]` are the fine op positions of coarse op `g`, in topological order; each fine op stands in exactly one."""

    fine: OpGraph
    coarse: OpGraph
    members: tuple[tuple[int, ...], ...]

    def expand(self, values: Sequence[T]) -> tuple[T, ...]:
        """One value per coarse op (a device, a priority) -> one per fine op: each member takes its group's."""
        of = {v: value for value, group in zip(values, self.members, strict=True) for v in group}
        return tuple(of[v] for v in range(len(self.fine)))


def identity(graph: OpGraph, options: GroupOptions | None = None) -> Grouping:
    """Every op its own group, whatever the options."""
    return Grouping(graph, graph, tuple((v,) for v in range(len(graph))))


def compose(first: Grouping, second: Grouping) -> Grouping:
    """The grouping from the fine graph of `first` to the coarse graph of `second`, which grouped the coarse ops of `first` further.

    The fine graph of `second` may carry other colocation strings than the coarse graph of `first`: only the positions of
    their ops have to agree.
    """

    def whole(group: Sequence[int]) -> tuple[int, ...]:
        if len(group) == 1:
            return first.members[group[0]]
        return tuple(sorted((v for g in group for v in first.members[g]), key=first.fine.rank.__getitem__))

    return Grouping(first.fine, second.coarse, tuple(map(whole, second.members)))


Edge = tuple[int, int, int | float, str]
"""Position of the source op, position of the target op, bytes, tensor name."""


def contract(graph: OpGraph, head: Sequence[int], edges: Iterable[Edge] | None = None) -> Grouping:
    """The grouping that makes one coarse op of all ops with the same `head`, the op that names it (its own head).

    A group of one keeps its op. The costs of a larger one: `compute_us` and `persistent_bytes` are the sums of its members';
    `output_bytes` is the sum of the tensors that leave it; `temporary_bytes` is the most it holds at once of temporaries and
    of tensors that stay inside while its members run one after another, so at least the largest temporary of a member. What
    the members keep between the runs of other groups is left out: the expanded plan is simulated on the fine graph. Its tensors
    are resident where all that make them are; it is of a part of the batch where its members are of no other.

    `edges`, between heads, replace the ones of `crossing_tensors`; no tensors of larger groups are resident then.
    Raises GraphError where the coarse graph has a cycle.
    """
    members: dict[int, list[int]] = {}
    for v in graph.order:
        members.setdefault(head[v], []).append(v)
    is_resident = {h: edges is None and _makes_resident_tensors(graph, head, group) for h, group in members.items()}
    edges = list(crossing_tensors(graph, head) if edges is None else edges)
    leaving = {(source, name): size for source, _, size, name in edges}
    output_bytes: dict[int, float] = dict.fromkeys(members, 0)
    for (source, _), size in leaving.items():
        output_bytes[source] += size
    coarse = OpGraph.from_edges(
        [_coarse_op(graph, head, h, group, output_bytes[h], is_resident[h]) for h, group in members.items()],
        [(graph.ops[source].id, graph.ops[target].id, size, name) for source, target, size, name in edges],
        name=graph.name,
        framework=graph.framework,
    )
    return Grouping(graph, coarse, tuple(map(tuple, members.values())))


def first_members(graph: OpGraph, part: Sequence[int]) -> list[int]:
    """`head` for `contract`: each op's part is named by its first op in topological order."""
    first: dict[int, int] = {}
    for v in graph.order:
        first.setdefault(part[v], v)
    return [first[p] for p in part]


def crossing_tensors(graph: OpGraph, head: Sequence[int]) -> list[Edge]:
    """The edges between groups: one per tensor and group that reads it, named "op id:tensor", unique in the whole graph."""
    edges: list[Edge] = []
    taken: set[str] = set()
    for tensor in graph.tensors:
        source = head[tensor.producer]
        targets = dict.fromkeys(head[w] for w in tensor.readers)
        targets.pop(source, None)
        if targets:
            name = _unique_name(graph.ops[tensor.producer].id, tensor.name, taken)
            edges.extend((source, target, tensor.bytes, name) for target in targets)
    return edges


def crossing_tensors_without_cycles(graph: OpGraph, head: Sequence[int]) -> list[Edge]:
    """The edges between groups, where those that close a cycle are turned round.

    In each set of groups that reach one another all edges lead from the group whose head comes earlier in topological order to
    the later one. A tensor on its way back thus adds to the cost of a cut, as it does in the graph itself.
    """
    edges = crossing_tensors(graph, head)
    import networkx as nx

    groups = nx.DiGraph((source, target) for source, target, _, _ in edges)
    component = {h: i for i, members in enumerate(nx.strongly_connected_components(groups)) for h in members}
    found = []
    for source, target, size, name in edges:
        back = component[source] == component[target] and graph.rank[source] > graph.rank[target]
        found.append((target, source, size, name) if back else (source, target, size, name))
    return found


def bundled(graph: OpGraph) -> OpGraph:
    """The graph in which the tensors of one op that have the same readers are one, of their bytes together: sent as one.

    An op's only tensor has the name "", several are "0", "1" and so on.
    """
    edges = []
    for v, op in enumerate(graph.ops):
        sizes: dict[tuple[int, ...], int | float] = {}
        for t in graph.outputs[v]:
            tensor = graph.tensors[t]
            readers = tuple(sorted(tensor.readers))
            sizes[readers] = sizes.get(readers, 0) + tensor.bytes
        for i, (readers, size) in enumerate(sizes.items()):
            name = str(i) if len(sizes) > 1 else ""
            edges += [(op.id, graph.ops[w].id, size, name) for w in readers]
    return OpGraph.from_edges(graph.ops, edges, name=graph.name, framework=graph.framework)


def _unique_name(op_id: str, tensor: str, taken: set[str]) -> str:
    name = tensor if tensor.startswith(f"{op_id}:") else f"{op_id}:{tensor}" if tensor else op_id
    while name in taken:  # ids and names may hold colons themselves
        name += "'"
    taken.add(name)
    return name


def _coarse_op(graph: OpGraph, head: Sequence[int], h: int, group: Sequence[int], output_bytes: int | float, is_resident: bool) -> Op:
    if len(group) == 1:
        return replace(graph.ops[h], forward_op=_coarse_forward_op(graph, head, group))
    ops = [graph.ops[v] for v in group]
    phases = {op.phase for op in ops}
    parts = {op.part for op in ops if op.part is not None}
    return Op(
        id=graph.ops[h].id,
        op=graph.ops[h].op,
        phase="forward" if "forward" in phases else "backward" if "backward" in phases else "update",
        compute_us=sum(op.compute_us for op in ops),
        persistent_bytes=sum(op.persistent_bytes for op in ops),
        output_bytes=output_bytes,
        temporary_bytes=_working_bytes(graph, group),
        colocation=graph.ops[h].colocation,
        expert=next((op.expert for op in ops if op.expert is not None), None),
        forward_op=_coarse_forward_op(graph, head, group),
        module=graph.ops[h].module,
        pin=next((op.pin for op in ops if op.pin is not None), None),
        resident=is_resident,
        part=parts.pop() if len(parts) == 1 else None,
        issue_us=sum(op.issue_us for op in ops),
    )


def _makes_resident_tensors(graph: OpGraph, head: Sequence[int], group: Sequence[int]) -> bool:
    """True if others read from the group, and all that they read is resident where it is made."""
    read = [graph.ops[v].resident for v in group if any(head[w] != head[v] for w in graph.successors[v])]
    return bool(read) and all(read)


def _coarse_forward_op(graph: OpGraph, head: Sequence[int], group: Sequence[int]) -> str | None:
    """The coarse op that holds the forward op of the first member that names one; none for a coarse op that is forward itself."""
    if any(graph.ops[v].phase == "forward" for v in group):
        return None
    named = (graph.index.get(graph.ops[v].forward_op or "") for v in group)
    return next((graph.ops[head[f]].id for f in named if f is not None), None)


def _working_bytes(graph: OpGraph, group: Sequence[int]) -> int | float:
    """The peak, over the members one after another, of temporaries, unread outputs and tensors that only members read."""
    rank = {v: i for i, v in enumerate(group)}
    freed: list[int | float] = [0] * len(group)
    held: int | float = 0
    peak: int | float = 0
    for i, v in enumerate(group):
        op = graph.ops[v]
        unread = op.output_bytes
        for t in graph.outputs[v]:
            tensor = graph.tensors[t]
            unread -= tensor.bytes
            if not op.resident and all(w in rank for w in tensor.readers):
                held += tensor.bytes
                freed[max(rank[w] for w in tensor.readers)] += tensor.bytes
        peak = max(peak, held + op.temporary_bytes + max(0, unread))
        held -= freed[i]
    return peak
