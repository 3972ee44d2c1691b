"""Which ops of a TensorFlow step are of its forward pass, its backward pass and its optimizer.

GradientTape names the ops that it makes; the rest follows from what reads what. Behind the backward pass comes the optimizer. Of the
ops before it those count as forward that the backward pass or an output needs. What is left changes state beside the passes: averages
that a forward op feeds, the counter that an optimizer's schedule goes by.
"""

from collections.abc import Iterable, Sequence

from baechi_ext.capture.groups import Groups

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
_MARKS = ("gradient_tape", "gradients")
"""A part of the names of ops that GradientTape, and the gradients of a called function, are made of."""
_SUM = "AddN"


def is_gradient(name: str) -> bool:
    """True if an op of this name was made for the backward pass."""
    return not set(_MARKS).isdisjoint(name.split("/")[:-1])


def phases(
    names: Sequence[str], types: Sequence[str], before: Sequence[Sequence[int]], states: Sequence[Iterable[str]], outputs: Iterable[int]
) -> list[str]:
    """The phase of each op. Ops are in topological order; `before` are those that each reads from, `states` the variables it touches."""
    backward = [is_gradient(name) for name in names]
    if not any(backward):
        return [FORWARD] * len(names)
    behind = _reached(backward, before)
    needed = _needed(backward, before)
    found: list[str | None] = [None] * len(names)
    for v in range(len(names)):
        summed = types[v] == _SUM and behind[v] and all(found[p] == BACKWARD for p in before[v])
        if backward[v] or behind[v] and (needed[v] or summed):
            found[v] = BACKWARD
        elif behind[v]:
            found[v] = UPDATE
    fetched = set(outputs)
    forward = _needed([found[v] == BACKWARD or v in fetched for v in range(len(names))], before)
    found = [FORWARD if phase is None and forward[v] else phase for v, phase in enumerate(found)]
    return _with_the_rest(found, before, states)


def _reached(marked: Sequence[bool], before: Sequence[Sequence[int]]) -> list[bool]:
    """For each op, True if it is marked or behind one that is."""
    reached = list(marked)
    for v, sources in enumerate(before):
        reached[v] = reached[v] or any(reached[p] for p in sources)
    return reached


def _needed(marked: Sequence[bool], before: Sequence[Sequence[int]]) -> list[bool]:
    """For each op, True if it is marked or before one that is."""
    needed = list(marked)
    for v in reversed(range(len(before))):
        if needed[v]:
            for p in before[v]:
                needed[p] = True
    return needed


def _with_the_rest(found: list[str | None], before: Sequence[Sequence[int]], states: Sequence[Iterable[str]]) -> list[str]:
    """Ops that hang together belong together: to the optimizer where one of its ops is beside them, else to a forward op beside them."""
    groups = Groups()
    beside: dict[object, set[str]] = {}
    links: list[tuple[int, int | str]] = [(p, v) for v, sources in enumerate(before) for p in sources]
    links += [(v, name) for v, names in enumerate(states) for name in names]
    for a, b in links:
        if all(isinstance(x, str) or found[x] is None for x in (a, b)):
            groups.join(a, b)
    for a, b in links:
        for x, y in ((a, b), (b, a)):
            phase = found[y] if isinstance(y, int) else None
            if phase is not None and (isinstance(x, str) or found[x] is None):
                beside.setdefault(groups.find(x), set()).add(phase)
    around = [beside.get(groups.find(v), set()) for v in range(len(found))]
    return [phase or (FORWARD if FORWARD in a and UPDATE not in a else UPDATE) for phase, a in zip(found, around, strict=True)]


class ForwardOps:
    """The forward ops of a step, and which of them a backward op was made for; its name says so."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.scopes: dict[str, str] = {}
        for name in names:
            self.scopes[name.rpartition("/")[0]] = name

    def of(self, name: str) -> str | None:
        """The op of the name that a backward op's begins with, else the last of the scope, but not of none; None where there is none."""
        parts = name.split("/")
        last = max((i for i, part in enumerate(parts) if part in _MARKS), default=len(parts))
        starts = ["/".join(parts[last + 1 : end]) for end in range(len(parts), last + 1, -1)]
        exact = (start for start in starts if start in self.names)
        return next(exact, next((self.scopes[start] for start in starts if start in self.scopes), None))
