"""The dynamic program: nodes are eliminated one by one, each by a table of what is left (Elango, IPDPS 2021, section III).

Variables   c(v), the configuration of node v
Objective   F(c) = sum over v of costs[v][c(v)] + sum over edges (u, v) of edges[u, v][c(u), c(v)]
(1) Step    v is taken out of all tables it is in, F: R(d) = min over c of costs[v][c] + sum over f in F of f(c, d), where d are
            configurations of the other nodes in F; R takes their place                                          -> eliminate
(2) Bound   Where R would be too large, F is parted and each part minimised alone: F's sum is at least that. What is
            left when all nodes are gone is the minimum (no step parted) or a lower bound of it (mini-buckets)    -> plan_elimination
(3) Choice  In the opposite order, each node takes the c that (1) took, given d: f(state + c) = f(state) - R(d) + the
            sum in (1). Without parts the first state is the optimum; with parts the best `beam` states go on     -> choose

A table has an axis for each node in it, over classes of that node's configurations: those that no function in F tells apart are one.
Dechter (Bucket elimination, 1999; Mini-buckets, 2003) has the general scheme.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from baechi_ext.shard.machine import Costs
from baechi_ext.shard.tables import Classes, Tables

_BLOCK = 1 << 15
"""Numbers that are worked on at once: what fits a core's cache."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The nodes a table is over, ascending, and the classes of their configurations that are its rows."""

    nodes: tuple[int, ...]
    classes: tuple[Classes, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.classes))

    def of(self, v: int) -> Classes:
        return self.classes[self.nodes.index(v)]


@dataclass(frozen=True, slots=True)
class Part:
    """The makings of one table of a step: tables by number (edges first, then results of parts), and the scope of the result.

    `node_classes` are the eliminated node's configurations as these tables see them; None where there are none.
    """

    tables: tuple[int, ...]
    node_classes: Classes | None
    result: Scope

    @property
    def size(self) -> int:
        return prod(self.result.shape)

    @property
    def operations(self) -> int:
        return self.size * (1 if self.node_classes is None else len(self.node_classes))


@dataclass(frozen=True, slots=True)
class Step:
    """The elimination of a node; one part unless its table would be too large."""

    node: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Elimination:
    """All steps, and the scopes of all tables: the edges', then the parts' results in order."""

    steps: tuple[Step, ...]
    scopes: tuple[Scope, ...]

    @property
    def largest(self) -> int:
        """Numbers in the largest table."""
        return max((part.size for step in self.steps for part in step.parts), default=0)

    @property
    def operations(self) -> int:
        """Sums that are compared in all."""
        return sum(part.operations for step in self.steps for part in step.parts)

    @property
    def exact(self) -> bool:
        return all(len(step.parts) == 1 for step in self.steps)

    @property
    def width(self) -> int:
        """The most nodes a table is over."""
        return max((len(part.result.nodes) for step in self.steps for part in step.parts), default=0)


class _Joining:
    """Classes that are told apart by any of several; those of the same ones are the same, so that repeated blocks share tables."""

    def __init__(self) -> None:
        self._known: dict[frozenset[Classes], Classes] = {}

    def __call__(self, several: Sequence[Classes]) -> Classes:
        distinct = dict.fromkeys(several)
        if len(distinct) == 1:
            return several[0]
        key = frozenset(distinct)
        if key not in self._known:
            joined = Classes.by(c.of for c in distinct)
            finest = max(distinct, key=len)
            self._known[key] = finest if len(finest) == len(joined) else joined
        return self._known[key]


def plan_elimination(tables: Tables, order: Sequence[int], most_numbers: float = float("inf")) -> Elimination:
    """The steps of an order and the scopes of their tables, none built; parts of a step stay below `most_numbers` where they can."""
    join = _Joining()
    scopes = [Scope((e.source, e.target), (t.source, t.target)) for e, t in zip(tables.graph.edges, tables.edges, strict=True)]
    within: list[set[int]] = [set() for _ in tables.graph.nodes]
    for i, scope in enumerate(scopes):
        for v in scope.nodes:
            within[v].add(i)
    steps = []
    for v in order:
        parts = []
        for members in _parted(v, sorted(within[v]), scopes, join, most_numbers):
            part = _part(v, members, scopes, join)
            for i in members:
                for w in scopes[i].nodes:
                    within[w].discard(i)
            for w in part.result.nodes:
                within[w].add(len(scopes))
            scopes.append(part.result)
            parts.append(part)
        steps.append(Step(v, tuple(parts)))
    return Elimination(tuple(steps), tuple(scopes))


def _part(v: int, members: Sequence[int], scopes: Sequence[Scope], join: _Joining) -> Part:
    seen: dict[int, list[Classes]] = {}
    for i in members:
        for w, classes in zip(scopes[i].nodes, scopes[i].classes, strict=True):
            seen.setdefault(w, []).append(classes)
    own = seen.pop(v, None)
    nodes = tuple(sorted(seen))
    return Part(tuple(members), join(own) if own else None, Scope(nodes, tuple(join(seen[w]) for w in nodes)))


def _parted(v: int, members: list[int], scopes: Sequence[Scope], join: _Joining, most_numbers: float) -> list[list[int]]:
    """The tables that node v is in, in as few parts as are found one by one, largest first, whose results stay below the limit."""
    if most_numbers == float("inf") or _part(v, members, scopes, join).size <= most_numbers:
        return [members]
    parts: list[list[int]] = []
    for i in sorted(members, key=lambda i: -prod(scopes[i].shape)):
        for part in parts:
            if _part(v, sorted([*part, i]), scopes, join).size <= most_numbers:
                part.append(i)
                break
        else:
            parts.append([i])
    return [sorted(part) for part in parts]


@dataclass(frozen=True)
class Eliminated:
    """The tables of an elimination, by number, and what is left of the costs: the minimum, or a lower bound where steps were parted."""

    plan: Elimination
    values: tuple[Costs, ...]
    left: float


def eliminate(tables: Tables, plan: Elimination) -> Eliminated:
    """Builds all tables of `plan`. Parts that are made of the same tables in the same way share theirs."""
    values: list[Costs] = [t.values for t in tables.edges]
    known: dict[tuple[int, ...], Costs] = {}
    for step in plan.steps:
        for n, part in enumerate(step.parts):
            costs = tables.costs[step.node] if n == 0 else None
            key = _signature(step.node, part, plan.scopes, values, costs)
            if key not in known:
                known[key] = _minimum(step.node, part, plan.scopes, values, costs)
            values.append(known[key])
    left = sum(float(v) for v, scope in zip(values, plan.scopes, strict=True) if not scope.nodes)
    return Eliminated(plan, tuple(values), left)


def _signature(v: int, part: Part, scopes: Sequence[Scope], values: Sequence[Costs], costs: Costs | None) -> tuple[int, ...]:
    """All that a part's table depends on. What is named by its `id` lives as long as the elimination."""
    place = {w: i for i, w in enumerate(part.result.nodes)}
    key = [id(costs), id(part.node_classes), *map(id, part.result.classes)]
    for i in part.tables:
        key.append(id(values[i]))
        for w, classes in zip(scopes[i].nodes, scopes[i].classes, strict=True):
            key += [-1 if w == v else place[w], id(classes)]
    return tuple(key)


def _minimum(v: int, part: Part, scopes: Sequence[Scope], values: Sequence[Costs], costs: Costs | None) -> Costs:
    """The part's table: the minimum over v's configurations of the sum of its tables."""
    if part.node_classes is None:
        return np.asarray(0.0 if costs is None else costs.min())
    operands = [_spread(v, part, scopes[i], values[i]) for i in part.tables]
    if costs is not None:
        own = _least(costs, part.node_classes)
        smallest = min(range(len(operands)), key=lambda i: operands[i].size)
        operands[smallest] = operands[smallest] + own.reshape(-1, *[1] * len(part.result.nodes))
    return min_plus(_merged(operands), part.result.shape)


def _least(costs: Costs, classes: Classes) -> Costs:
    """The least cost in each class."""
    if len(classes) == len(costs):
        return costs[classes.first]
    least = np.full(len(classes), np.inf)
    np.minimum.at(least, classes.of, costs)
    return least


def _spread(v: int, part: Part, scope: Scope, values: Costs) -> Costs:
    """A table with v as its first axis and the result's axes behind, those it does not have of length 1."""
    wanted = (v, *part.result.nodes)
    for axis, (w, classes) in enumerate(zip(scope.nodes, scope.classes, strict=True)):
        target = part.node_classes if w == v else part.result.of(w)
        if target is not None and target is not classes:
            values = values.take(classes.of[target.first], axis=axis)
    values = values.transpose([scope.nodes.index(w) for w in wanted if w in scope.nodes])
    lengths = iter(values.shape)
    return np.ascontiguousarray(values).reshape([next(lengths) if w in scope.nodes else 1 for w in wanted])


def _merged(operands: list[Costs]) -> list[Costs]:
    """The operands, those over fewer axes added to one that has these axes and more."""
    merged: list[Costs] = []
    for operand in sorted(operands, key=lambda o: -o.size):
        for i, larger in enumerate(merged):
            if all(a == b or a == 1 for a, b in zip(operand.shape, larger.shape, strict=True)):
                merged[i] = larger + operand
                break
        else:
            merged.append(operand)
    return merged


def min_plus(operands: Sequence[Costs], shape: tuple[int, ...]) -> Costs:
    """The minimum over the first axis of the operands' broadcast sum, block by block; `shape` is the result's."""
    if len(operands) == 1:
        return operands[0].min(axis=0)
    result = np.empty(shape)
    rest = prod(shape[1:])
    rows = max(1, _BLOCK // rest)
    count = operands[0].shape[0]
    for start in range(0, shape[0], rows):
        part = [o if o.shape[1] == 1 else o[:, start : start + rows] for o in operands]
        out = result[start : start + rows]
        chunk = max(1, 2 * _BLOCK // out.size)
        for c in range(0, count, chunk):
            total = part[0][c : c + chunk] + part[1][c : c + chunk]
            for operand in part[2:]:
                total = total + operand[c : c + chunk]
            least = total.min(axis=0) if len(total) > 1 else total[0]
            if c:
                np.minimum(out, least, out=out)
            else:
                out[...] = least
    return result


@dataclass(frozen=True)
class Answer:
    """A strategy (an index of a configuration for each node), its cost, a lower bound of all costs (what dropped states could have come
    to), and the elimination that found it."""

    choice: tuple[int, ...]
    cost: float
    bound: float
    plan: Elimination


def choose(tables: Tables, done: Eliminated, beam: int = 1) -> Answer:
    """The configurations that the eliminated tables lead to, node by node in the opposite order, with at most `beam` states at once."""
    plan = done.plan
    states = np.zeros((1, len(tables.graph.nodes)), np.int64)
    bound = np.full(1, done.left)
    dropped = np.inf
    number = len(done.values)
    for step in reversed(plan.steps):
        number -= len(step.parts)
        sums = bound[:, None] + tables.costs[step.node]
        for n, part in enumerate(step.parts):
            sums = sums - _at(plan.scopes[number + n], done.values[number + n], states)[:, None]
            for i in part.tables:
                sums += _along(step.node, plan.scopes[i], done.values[i], states)
        best = np.array([sums.argmin()]) if plan.exact else np.argsort(sums, axis=None, kind="stable")[: beam + 1]
        if len(best) > beam:
            dropped = min(dropped, float(sums.flat[best[beam]]))
            best = best[:beam]
        row, column = np.unravel_index(best, sums.shape)
        states = states[row]
        states[:, step.node] = column
        bound = sums[row, column]
    choice = tuple(map(int, states[0]))
    cost = tables.cost(choice)
    return Answer(choice, cost, min(cost, dropped), plan)


def _at(scope: Scope, values: Costs, states: np.ndarray) -> Costs:
    """A table's value in each state."""
    index = tuple(classes.of[states[:, w]] for w, classes in zip(scope.nodes, scope.classes, strict=True))
    return np.atleast_1d(np.asarray(values)[index])


def _along(v: int, scope: Scope, values: Costs, states: np.ndarray) -> Costs:
    """A table's values in each state for all configurations of v."""
    pairs = zip(scope.nodes, scope.classes, strict=True)
    return values[tuple(classes.of[None, :] if w == v else classes.of[states[:, w]][:, None] for w, classes in pairs)]
