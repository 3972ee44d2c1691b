"""The loops of one call of a captured graph, while a rule names them: axes, the tensors they run over, and what is computed.

What follows from these needs no rule. A device computes its share of the loops: its part of an output is a sum where loops that the output
does not run over are split ("output sum"), and so is its part of an operand's gradient where loops that the operand does not run over are
split ("input gradient", "weight gradient"). For a matrix product these are the three all-reduces of Elango (IPDPS 2021, section II).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from baechi_ext.shard.graph import Axis, Tensor
from baechi_ext.shard.rules import Rules
from baechi_ext.shard.terms import AllReduce, Compute, Term

SPATIAL = ("depth", "height", "width")
"""The names of an image's dimensions."""
Dims = Sequence[int | None]
"""The axis that runs over each dimension of a tensor; None: no loop does, and it is not split."""


class UnknownFormError(Exception):
    """Raised by a rule for a form of its op that it can't describe; the op is then one that is not known."""


@dataclass(frozen=True)
class Value:
    """A tensor that a call reads: where it comes from, its shape, the names of its dimensions, whether it is a parameter, and whether
    its gradient is needed. `uses`: so many calls read the parameter, and share the sum of its gradient.
    """

    source: fx.Node
    shape: tuple[int, ...]
    names: tuple[str, ...]
    weight: bool = False
    gradient: bool = False
    uses: int = 1


@dataclass(frozen=True)
class Read:
    """A tensor that the call reads, and how its loops run over it."""

    value: Value
    tensor: Tensor


@dataclass(frozen=True)
class Written:
    """A tensor that the call writes, and the names of its dimensions."""

    tensor: Tensor
    names: tuple[str, ...]


class Loops:
    """One call: its arguments by their names in the op's schema, the shapes it writes, and what its rule has said of it so far."""

    def __init__(self, arguments: Mapping[str, Any], written: Sequence[tuple[int, ...]], rules: Rules, *, gradient: bool) -> None:
        self.arguments = arguments
        self.shapes = tuple(written)
        self.rules = rules
        self.gradient = gradient
        self.op = ""
        self.axes: list[Axis] = []
        self.reads: list[Read] = []
        self.writes: list[Written] = []
        self.terms: list[Term] = []

    def __getitem__(self, name: str) -> Any:
        """The argument of that name; None where the op has none."""
        return self.arguments.get(name)

    @property
    def operand(self) -> Value:
        """The first tensor that the call reads."""
        return next(value for value in self.arguments.values() if isinstance(value, Value))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the call's first result."""
        return self.shapes[0]

    def axis(self, name: str, size: int, *, splits: bool = True) -> int:
        """A new loop; a second one of a name gets a number behind it. Height and width of images are split only where the rules say so."""
        splits = splits and (self.rules.splits_images or name not in SPATIAL)
        taken = {axis.name for axis in self.axes}
        number = next(i for i in range(1, len(taken) + 2) if (name if i == 1 else f"{name}_{i}") not in taken)
        self.axes.append(Axis(name if number == 1 else f"{name}_{number}", size, splits))
        return len(self.axes) - 1

    def axes_of(self, value: Value) -> list[int]:
        """A loop for each dimension of a tensor."""
        return [self.axis(name, size) for name, size in zip(value.names, value.shape, strict=True)]

    def read(self, value: Value | None, dims: Dims, *, summed: bool = True) -> None:
        """Add an operand. `summed`: its gradient is summed over loops that do not run over it; else a term of the rule stands for that."""
        if value is None:
            return
        tensor = _tensor(value.shape, dims)
        self.reads.append(Read(value, tensor))
        if summed and value.gradient:
            kind = "weight gradient" if value.weight else "input gradient"
            self._sum(tensor, kind, part=1 / value.uses, hides=value.weight)

    def write(self, dims: Dims, names: Sequence[str] | None = None, *, summed: bool = True) -> None:
        """Add the next result. `names`: of its dimensions, if they are not the axes'. `summed`: as for `read`."""
        shape = self.shapes[len(self.writes)]
        tensor = _tensor(shape, dims)
        if names is None:
            names = [self.axes[a].name if a is not None else f"dim{i}" for i, a in enumerate(dims)]
        self.writes.append(Written(tensor, tuple(names)))
        if summed:
            self._sum(tensor, "output sum")

    def compute(self, flop: float, axes: Sequence[int] | None = None) -> None:
        """Add this many operations for each iteration of these axes, of all axes by default; 0 adds nothing."""
        if flop:
            self.terms.append(Compute(float(flop), tuple(range(len(self.axes)) if axes is None else axes)))

    def _sum(self, tensor: Tensor, kind: str, part: float = 1.0, *, hides: bool = False) -> None:
        inside = tuple(a for dim in tensor.axes for a in dim)
        over = tuple(a for a, axis in enumerate(self.axes) if a not in inside and axis.splits and axis.size > 1)
        if over:
            words = part * tensor.words / prod(self.axes[a].size for a in inside)
            self.terms.append(AllReduce(words, inside, over, kind, hides=hides))


def _tensor(shape: Sequence[int], dims: Dims) -> Tensor:
    """A scalar is a tensor of one number, since edges are of dimensions."""
    if not shape:
        return Tensor((1,), ((),))
    pairs = zip(shape, dims, strict=True)
    return Tensor(tuple(shape), tuple(() if a is None or size == 1 else (a,) for size, a in pairs))


def spread(loops: Loops, value: Value, axes: Sequence[int]) -> list[int | None]:
    """The axes of a result over each dimension of an operand that is broadcast to it."""
    behind = axes[len(axes) - len(value.shape) :]
    return [a if size == loops.axes[a].size and size > 1 else None for a, size in zip(behind, value.shape, strict=True)]
