"""Static programs of groups: which calls each runs in which order, forward and backward, and what goes from group to group in between.

There is one order of all calls of all groups, topological, and otherwise that in which the simulator starts their ops. A group runs its
own in that order, in pieces: a piece takes what it needs from other groups before its first call, and gives what they need after its last.
Backward, pieces run in an order of the same kind, take gradients of what they gave, and give those of what they took. Sends never block,
and whatever a group waits for stands earlier in the one order: nothing can wait in a circle. All members of a group have the same program,
so their messages among each other match.
"""

import heapq
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import fx

from baechi_ext.errors import PlanError
from runtime.hybrid.calls import CallPlan
from runtime.sharding.forward import ForwardGraph
from runtime.sharding.op_names import name_of

T = TypeVar("T", bound=Hashable)
Instance = tuple[fx.Node, int]
"""A call, and the group that runs it."""
_NEVER = 1 << 62


@dataclass(eq=False)
class Piece:
    """Calls that a group runs at a stretch. `reads` are values from before it, some of which it `takes` from other groups first; `writes`
    are read after it, some by other groups, to which it `gives` them."""

    group: int
    calls: list[fx.Node] = field(default_factory=list)
    reads: list[fx.Node] = field(default_factory=list)
    writes: list[fx.Node] = field(default_factory=list)
    takes: list[fx.Node] = field(default_factory=list)
    gives: list[tuple[fx.Node, int]] = field(default_factory=list)
    returns: list[fx.Node] = field(default_factory=list)
    """Whose gradients are complete when it has run backward, and go back to where the values were taken from."""


class Programs:
    """The programs of all groups. Raises PlanError where the plan can't be run so.

    `forward[g]` and `backward[g]` are the pieces of group g, in the orders they are run in; `learned` are the values that have gradients.
    """

    def __init__(self, forward: ForwardGraph, plan: CallPlan) -> None:
        self.graph, self.plan = forward, plan
        self._groups = range(len(plan.groups))
        self._units = [call for call in forward.nodes if not _is_element(call)]
        self._runners = self._find_runners()
        self._require_one_home()
        self.learned = _learned(forward)
        order = _ordered(self._before(), self._keys())
        pieces = self._cut(order)
        self.forward = self._by_group(pieces)
        self.backward = self._by_group(self._turned(pieces))

    @property
    def loss_group(self) -> int:
        return self.home(self.graph.loss)

    @cached_property
    def crossing(self) -> list[tuple[fx.Node, int]]:
        """What is sent to which group, each once."""
        return [(node, piece.group) for pieces in self.forward for piece in pieces for node in piece.takes]

    @cached_property
    def returned(self) -> set[tuple[fx.Node, int]]:
        """Those of the crossing values whose gradients come back."""
        return {(node, piece.group) for pieces in self.backward for piece in pieces for node in piece.returns}

    @cached_property
    def seeded_group(self) -> int | None:
        """The group that draws random numbers, None where none does. Raises PlanError where several do: then nobody knows who is next."""
        groups = {g for call in self._units if is_seeded(call) for g in self._runners[call]}
        if len(groups) > 1:
            raise PlanError(f"{len(groups)} groups draw random numbers; plan without --relaxed_random, which keeps all in one")
        return next(iter(groups), None)

    def home(self, node: fx.Node) -> int:
        """The group that computes a value that crosses, or the loss."""
        return self._runners[_unit(node)][0]

    def call_of(self, node: fx.Node) -> str:
        """The name of the call that a value is of."""
        return _unit(node).name

    def calls_of(self, group: int) -> list[fx.Node]:
        """All calls that a group runs, in the captured order."""
        own = {call for piece in self.forward[group] for call in piece.calls}
        return [call for call in self.graph.nodes if call in own]

    def read_by(self, group: int) -> set[str]:
        """The parameters and buffers that live in a group."""
        names = self.graph.parameters | self.graph.buffers
        return {names[node.name] for call in self.calls_of(group) for node in call.all_input_nodes if node.name in names}

    def _find_runners(self) -> dict[fx.Node, tuple[int, ...]]:
        """The groups that run each call: the plan's; one without ops is run by all that read it."""
        planned = self.plan.calls
        loss = above = _unit(self.graph.loss)
        while above.name not in planned:
            above = _unit(above.all_input_nodes[0]) if above.all_input_nodes else None
            if above is None or above.op != "call_function":
                raise PlanError(f"the plan does not say where the loss, {loss.name}, is computed; plan this model again")
        last = planned[above.name].group
        found: dict[fx.Node, tuple[int, ...]] = {}
        for call in reversed(self._units):
            if call.name in planned:
                found[call] = (planned[call.name].group,)
                continue
            readers = {g for user in _readers(call) if user.op == "call_function" for g in found[user]}
            changes_buffer = any(node.name in self.graph.buffers for node in call.all_input_nodes) and not call.users
            found[call] = tuple(sorted(readers | ({last} if call is loss or changes_buffer else set())))
        return found

    def _require_one_home(self) -> None:
        """Raises PlanError where several groups read a parameter or buffer."""
        names = self.graph.parameters | self.graph.buffers
        readers: dict[str, set[int]] = {}
        for call in self._units:
            for node in call.all_input_nodes:
                if node.name in names:
                    readers.setdefault(names[node.name], set()).update(self._runners[call])
        for name, groups in readers.items():
            if len(groups) > 1:
                raise PlanError(f"{name} is read on groups {sorted(groups)}, and a parameter or buffer lives on one; plan again")

    def _before(self) -> dict[Instance, list[Instance]]:
        """Which calls each has to come after: those it reads, and of calls that draw numbers or share a buffer those before it."""
        before: dict[Instance, list[Instance]] = {}
        last: dict[object, Instance] = {}
        for call in self._units:
            for group in self._runners[call]:
                found = []
                for node in _read(call):
                    sources = self._runners[_unit(node)]
                    found.append((_unit(node), group if group in sources else sources[0]))
                shared: list[object] = [node for node in call.all_input_nodes if node.name in self.graph.buffers]
                for what in [*shared, "random"] if is_seeded(call) else shared:
                    if what in last:
                        found.append(last[what])
                    last[what] = (call, group)
                before[call, group] = found
        return before

    def _keys(self) -> dict[Instance, int]:
        """When each call is predicted to begin; one without ops, right before the first that reads it."""
        keys: dict[Instance, int] = {}
        for call in reversed(self._units):
            planned = self.plan.calls.get(call.name)
            for group in self._runners[call]:
                readers = [keys[user, group] for user in _readers(call) if (user, group) in keys]
                begins = None if planned is None else planned.forward
                keys[call, group] = min(readers, default=_NEVER) if begins is None else begins
        return keys

    def _cut(self, order: Sequence[Instance]) -> list[Piece]:
        """The pieces of all groups. A group's calls are cut where something comes or goes, and before a call that reads nothing of the
        piece: backward the one need not wait for the other's gradients."""
        pieces: list[Piece] = []
        current: dict[int, Piece] = {}
        made: dict[tuple[fx.Node, int], Piece] = {}
        taken: set[tuple[fx.Node, int]] = set()
        for call, group in order:
            read = _read(call)
            takes = [node for node in read if group not in self._runners[_unit(node)] and (node, group) not in taken]
            follows = any(made.get((_unit(node), group)) is current.get(group) for node in read)
            independent = not follows and call in self.learned and (read or call.name in self.plan.calls) and len(self._groups) > 1
            if group not in current or takes or independent:
                current[group] = Piece(group, takes=takes)
                pieces.append(current[group])
                taken |= {(node, group) for node in takes}
            piece = made[call, group] = current[group]
            piece.calls += [call, *_elements(call)]
            piece.gives += self._crosses_to(call)
            for node in read:
                source = made.get((_unit(node), group))
                if source is not piece and node not in piece.reads:
                    piece.reads.append(node)
                    if source is not None and node not in source.writes:
                        source.writes.append(node)
            if piece.gives:
                del current[group]
        for (call, _), piece in made.items():
            given = dict.fromkeys(node for node, _ in piece.gives if _unit(node) is call)
            loss = [self.graph.loss] if _unit(self.graph.loss) is call else []
            piece.writes += [node for node in (*given, *loss) if node not in piece.writes]
        return pieces

    def _crosses_to(self, call: fx.Node) -> list[tuple[fx.Node, int]]:
        """The values of a call that other groups read, and which."""
        own = self._runners[call]
        found = []
        for value in (call, *_elements(call)):
            groups = {g for user in value.users if user.op == "call_function" and not _is_element(user) for g in self._runners[user]}
            found += [(value, g) for g in sorted(groups) if g not in own]
        return found

    def _turned(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces that gradients of the loss go through, in the order they run backward in; notes in them what they give back."""
        readers: dict[fx.Node, list[Piece]] = {}
        needed: dict[Piece, list[Piece]] = {}
        for piece in reversed(pieces):
            learned = [node for node in piece.writes if node in self.learned]
            after = [reader for node in learned for reader in readers.get(node, ()) if reader in needed]
            if after or self.graph.loss in learned:
                needed[piece] = list(dict.fromkeys(after))
            for node in piece.reads:
                readers.setdefault(node, []).append(piece)
        begins = {}
        for piece in needed:
            planned = [self.plan.calls[call.name].backward for call in piece.calls if call.name in self.plan.calls]
            begins[piece] = min((at for at in planned if at is not None), default=0)
        order = _ordered(needed, begins)
        last = {(node, piece.group): piece for piece in order for node in piece.reads if node in self.learned}
        for node, group in [(node, piece.group) for piece in pieces for node in piece.takes]:
            if (node, group) in last:
                last[node, group].returns.append(node)
        return order

    def _by_group(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        return [[piece for piece in pieces if piece.group == group] for group in self._groups]


def is_seeded(call: fx.Node) -> bool:
    """Whether a call draws random numbers; attention that drops nothing does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(call.target, "tags", ()):
        return False
    names = [argument.name for argument in call.target._schema.arguments]
    given = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _ordered(before: Mapping[T, Sequence[T]], keys: Mapping[T, int]) -> list[T]:
    """All in an order in which each comes after those `before` it, and otherwise by key, then as they are listed."""
    waits = {one: len(set(others)) for one, others in before.items()}
    after: dict[T, list[T]] = {one: [] for one in before}
    for one, others in before.items():
        for other in dict.fromkeys(others):
            after[other].append(one)
    place = {one: i for i, one in enumerate(before)}
    ready = [(keys[one], place[one], one) for one, count in waits.items() if not count]
    heapq.heapify(ready)
    found = []
    while ready:
        one = heapq.heappop(ready)[2]
        found.append(one)
        for other in after[one]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (keys[other], place[other], other))
    return found


def _learned(forward: ForwardGraph) -> set[fx.Node]:
    """The values that have gradients."""
    found: set[fx.Node] = set()
    for node in forward.program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            learns = node.name in forward.parameters and value.requires_grad
        else:
            silent = node.op != "call_function" or name_of(node) == "detach"
            learns = not silent and any(read in found for read in node.all_input_nodes)
            learns = learns and (not isinstance(value, torch.Tensor) or value.is_floating_point())
        if learns:
            found.add(node)
    return found


def _is_element(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _unit(node: fx.Node) -> fx.Node:
    """The call that a value is of: of several results, of which it is one."""
    while _is_element(node):
        node = node.args[0]
    return node


def _elements(call: fx.Node) -> list[fx.Node]:
    """The results of a call that has several, by themselves."""
    return [inner for user in call.users if _is_element(user) for inner in (user, *_elements(user))]


def _readers(call: fx.Node) -> list[fx.Node]:
    return [user for value in (call, *_elements(call)) for user in value.users if not _is_element(user)]


def _read(call: fx.Node) -> list[fx.Node]:
    """What a call reads of other calls."""
    return [node for node in call.all_input_nodes if node.op == "call_function"]
