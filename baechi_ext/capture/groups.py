"""Colocation groups while a step is captured: which ops run where one parameter, buffer or variable lives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baechi_ext.ir.op_graph import Op


class Groups:
    """Union-find over op positions and names of parameters, buffers or variables; a group is called after its first name."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}

    def find(self, x: Any) -> Any:
        self._parent.setdefault(x, x)
        while self._parent[x] != x:
            self._parent[x] = self._parent[self._parent[x]]
            x = self._parent[x]
        return x

    def join(self, a: Any, b: Any) -> None:
        self._parent[self.find(a)] = self.find(b)

    def labelled(self, ops: Sequence[Op]) -> list[Op]:
        """The ops with their groups' names as colocation strings; ops alone without a name stay without one."""
        members: dict[Any, list[int]] = {}
        names: dict[Any, list[str]] = {}
        for x in self._parent:
            (names if isinstance(x, str) else members).setdefault(self.find(x), []).append(x)
        labelled = list(ops)
        for root, positions in members.items():
            shared = names.get(root, [])
            if not shared and len(positions) == 1:
                continue
            label = min(shared, key=lambda n: (len(n), n)) if shared else ops[min(positions)].id
            for v in positions:
                labelled[v] = replace(ops[v], colocation=label)
        return labelled
