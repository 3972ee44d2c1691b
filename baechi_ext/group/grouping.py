"""Grouping: a coarse graph and the way back. A grouper returns one; a placer places the coarse graph; `expand` undoes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from baechi_ext.ir.op_graph import OpGraph

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of Baechi's groupers; a placer type reads those that concern it."""

    only_important_ops: bool = False
    """Ops that hardly count are folded into a neighbour first (group/important.py)."""
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
    rank = {v: i for i, v in enumerate(first.fine.order)}

    def whole(group: Sequence[int]) -> tuple[int, ...]:
        if len(group) == 1:
            return first.members[group[0]]
        return tuple(sorted((v for g in group for v in first.members[g]), key=rank.__getitem__))

    return Grouping(first.fine, second.coarse, tuple(map(whole, second.members)))
