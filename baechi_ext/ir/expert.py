"""Expert hints: devices that a person chose for some ops, and how all other ops follow those."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from pathlib import Path

from baechi_ext.errors import FileError
from baechi_ext.ir.files import read_json
from baechi_ext.ir.op_graph import OpGraph


def with_experts(graph: OpGraph, hints: Sequence[int | None]) -> OpGraph:
    """The graph with these hints and those that follow from them.

    A colocation group takes the most frequent hint of its ops, of equals the first. An op without one takes the hint of its
    forward op, else of the last op it reads from, else of the first op that reads from it. Only ops that no path connects with a
    hint are left without.
    """
    found = list(hints)
    for group in graph.groups.values():
        chosen = Counter(found[v] for v in group if found[v] is not None).most_common(1)
        for v in group:
            found[v] = chosen[0][0] if chosen else None
    rank = {v: i for i, v in enumerate(graph.order)}
    known = -1
    while known < (now := len(graph) - found.count(None)):
        known = now
        for v in graph.order:
            before = sorted(graph.predecessors[v], key=rank.__getitem__, reverse=True)
            _follow(graph, found, v, [*_forward_op(graph, v), *before])
        for v in reversed(graph.order):
            _follow(graph, found, v, sorted(graph.successors[v], key=rank.__getitem__))
    return graph.replace_ops([replace(op, expert=hint) for op, hint in zip(graph.ops, found, strict=True)])


def _forward_op(graph: OpGraph, v: int) -> tuple[int, ...]:
    name = graph.ops[v].forward_op
    return () if name is None or name not in graph.index else (graph.index[name],)


def _follow(graph: OpGraph, found: list[int | None], v: int, leaders: Iterable[int]) -> None:
    """Op v, and its group, take the hint of the first leader that has one."""
    if found[v] is not None:
        return
    hint = next((found[w] for w in leaders if found[w] is not None), None)
    label = graph.ops[v].colocation
    for w in (v,) if label is None else graph.groups[label]:
        found[w] = hint


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """A file of hints, read but not yet put onto a graph: names -> device indices.

    A name is an op's id or its colocation string, or a pattern of such with *, ? and [...].
    """

    path: str
    rules: Mapping[str, int]

    @classmethod
    def load(cls, path: str | Path) -> "ExpertFile":
        """Raises FileError for what is no JSON object of device indices."""
        rules = read_json(path, "expert")
        rules.pop("schema_version", None)
        for name, device in rules.items():
            if isinstance(device, bool) or not isinstance(device, int):
                raise FileError(f"{path}: the device of {name!r} is {device!r}; expected its index, a whole number")
        return cls(str(path), rules)

    def apply(self, graph: OpGraph) -> OpGraph:
        """The graph with these hints in place of its own. An op's exact names count first (its id before its colocation string),
        then the patterns in the file's order. Raises FileError for a name that nothing in the graph has.
        """
        patterns = {name: re.compile(translate(name)) for name in self.rules if any(c in name for c in "*?[")}
        unused = dict.fromkeys(self.rules)
        hints: list[int | None] = []
        for op in graph.ops:
            own = [name for name in (op.id, op.colocation) if name is not None]
            matching = [name for name in own if name in self.rules]
            matching += [name for name, pattern in patterns.items() if any(map(pattern.match, own))]
            hints.append(self.rules[matching[0]] if matching else None)
            for name in matching:
                unused.pop(name, None)
        if unused:
            shown = ", ".join(map(repr, list(unused)[:5]))
            raise FileError(f"{self.path}: no op and no colocation group of the graph is called {shown}; take names from the graph file")
        return with_experts(graph, hints)
