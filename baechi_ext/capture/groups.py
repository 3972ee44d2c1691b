"""Colocation groups while a step is captured: which ops run where one parameter, buffer or variable lives."""

from collections.abc import Sequence
from dataclasses import replace

from baechi_ext.ir.op_graph import Op


class Groups:
    """Groups of op positions and names of parameters, buffers or variables; a group is called after its shortest name."""

    def __init__(self) -> None:
        from networkx.utils import UnionFind

        self._sets: UnionFind[int | str] = UnionFind()

    def find(self, x: int | str) -> int | str:
        """The member that stands for the group of x."""
        found: int | str = self._sets[x]
        return found

    def join(self, a: int | str, b: int | str) -> None:
        self._sets.union(a, b)

    def labelled(self, ops: Sequence[Op]) -> list[Op]:
        """The ops with their groups' names as colocation strings; ops alone without a name stay without one."""
        labelled = list(ops)
        taken = {name for members in self._sets.to_sets() for name in members if isinstance(name, str)}
        for members in self._sets.to_sets():
            names = [x for x in members if isinstance(x, str)]
            positions = [x for x in members if isinstance(x, int)]
            if names or len(positions) > 1:
                label = min(names, key=lambda n: (len(n), n)) if names else ops[min(positions)].id
                while not names and label in taken:  # an op's id may be a parameter's name
                    label += "'"
                for v in positions:
                    labelled[v] = replace(ops[v], colocation=label)
        return labelled
