"""Configurations that no optimum needs, left out before tables are multiplied.

Configuration c of a node is dominated by c' where c' costs no more whatever the neighbours' configurations are:
costs[c'] - costs[c] + sum over the node's edges of max over x of (edge(c', x) - edge(c, x)) <= 0. Any strategy with c can then have c'
instead (Goldstein's criterion for dead ends, 1994, here with equality). It is safe at all nodes at once, since it asks for all x: from an
optimal strategy, node after node is changed to what dominates its choice, and no change costs anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from baechi_ext.shard.machine import Costs
from baechi_ext.shard.tables import Classes, EdgeTable, Tables

T = TypeVar("T")
_DOMINATORS = 24
"""So many configurations, the cheapest on average, are tried as c'; more would find little more."""
View = tuple[EdgeTable, bool]
"""An edge's table, and whether it is looked at from the edge's target."""


def pruned(tables: Tables) -> Tables:
    """The tables without dominated configurations: the minimum is the same. Nodes that are alike stay so, and share tables."""
    views: list[list[View]] = [[] for _ in tables.graph.nodes]
    for edge, table in zip(tables.graph.edges, tables.edges, strict=True):
        views[edge.source].append((table, False))
        views[edge.target].append((table, True))
    filters = _Filters()
    return _only(tables, [filters.kept(costs, view) for costs, view in zip(tables.costs, views, strict=True)], filters)


def restricted(tables: Tables, kept: Sequence[np.ndarray]) -> Tables:
    """The tables with some of each node's configurations only: those of these indices. Nodes that share an array of them share tables."""
    return _only(tables, kept, _Filters())


def _only(tables: Tables, kept: Sequence[np.ndarray], filters: "_Filters") -> Tables:
    pairs = zip(tables.graph.edges, tables.edges, strict=True)
    edges = tuple(filters.edge(table, kept[edge.source], kept[edge.target]) for edge, table in pairs)
    spaces = tuple(filters.rows(space, keep) for space, keep in zip(tables.spaces, kept, strict=True))
    costs = tuple(filters.rows(cost, keep) for cost, keep in zip(tables.costs, kept, strict=True))
    return replace(tables, spaces=spaces, costs=costs, edges=edges)


class _Filters:
    """A memory of what was filtered how, so that what was shared is shared again. It lives as long as the tables it has seen."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Any] = {}

    def _once(self, key: tuple[int, ...], make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known

    def kept(self, costs: Costs, views: Sequence[View]) -> np.ndarray:
        """The indices of a node's configurations that are kept."""
        key = (id(costs), *(i for table, side in views for i in (id(table), side)))
        return self._once(key, lambda: _undominated(costs, views))

    def rows(self, array: np.ndarray, keep: np.ndarray) -> np.ndarray:
        return self._once((id(array), id(keep)), lambda: array[keep])

    def classes(self, classes: Classes, keep: np.ndarray) -> tuple[Classes, np.ndarray]:
        """The classes of the kept configurations, and which of the old ones these are."""

        def filtered() -> tuple[Classes, np.ndarray]:
            old, first, of = np.unique(classes.of[keep], return_index=True, return_inverse=True)
            return Classes(of, first), old

        return self._once((id(classes), id(keep), 0), filtered)

    def edge(self, table: EdgeTable, of_source: np.ndarray, of_target: np.ndarray) -> EdgeTable:
        source, rows = self.classes(table.source, of_source)
        target, columns = self.classes(table.target, of_target)
        key = (id(table), id(of_source), id(of_target))
        return self._once(key, lambda: EdgeTable(source, target, table.values[np.ix_(rows, columns)]))


def _undominated(costs: Costs, views: Sequence[View]) -> np.ndarray:
    """The indices of configurations that are not dominated by one of the most promising, ascending."""
    seen = [(table.target, table.values.T) if side else (table.source, table.values) for table, side in views]
    joint = Classes.by([classes.of for classes, _ in seen] or [np.zeros(len(costs), np.int64)])
    best = np.lexsort((costs, joint.of))  # within a class the cheapest dominates all others
    best = best[np.r_[True, np.diff(joint.of[best]) > 0]]
    own = costs[best]
    rows = [values[classes.of[best]] for classes, values in seen]
    mean = own + sum(r.mean(axis=1) for r in rows)
    alive = np.ones(len(best), bool)
    for c in np.argsort(mean, kind="stable")[:_DOMINATORS]:
        if not alive[c]:
            continue
        worse = own[c] - own
        for r in rows:
            worse = worse + (r[c] - r).max(axis=1)
        dominated = worse <= 0
        dominated[c] = False
        alive &= ~dominated
    return np.sort(best[alive])
