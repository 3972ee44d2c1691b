"""The rows of a batch in the tensors of a graph, and an op's call as the rules of batch_rules see it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from baechi_ext.capture.torch_private import arguments_by_name

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of a batch in a tensor: along `dim` stand `blocks` batches, and in each, example by example, `times` rows."""

    dim: int
    times: int = 1
    blocks: int = 1

    @property
    def rows(self) -> int:
        """The number of an example's rows."""
        return self.times * self.blocks

    def at(self, dim: int) -> "Split":
        """The same along another dimension."""
        return Split(dim, self.times, self.blocks)


@dataclass(frozen=True, slots=True)
class Rows:
    """In place of a size: so many rows of each example of a part."""

    times: int


OWN = Split(-1)
"""A tensor that a part's op keeps for its own backward op alone: working memory, or what BatchNorm normalised by."""
SUM, MEAN, RATIO, COUNT, FIRST = "sum", "mean", "ratio", "count", "first"
"""Kinds of results that are not split: the sum of the parts' results, their mean by examples, the sum of these over the weight of all
labels that count, that weight, or any part's, as all have the same."""
Kind = Split | str


class MixedError(Exception):
    """An op mixes the rows of examples, or may do so; the text completes "OP in MODULE ..."."""


@dataclass
class Call:
    """An op with a split argument, and what a rule finds of it."""

    node: "fx.Node"
    states: "Mapping[fx.Node, Split]"
    batch: int
    args: dict[str, Any]
    """By name, defaults included."""
    normalised: int = 0
    """The examples of the smallest part, where BatchNorm may normalise over each part by itself; 0: it may not."""
    cut: "dict[tuple[fx.Node, Split], None]" = field(default_factory=dict)
    """Whole tensors of which each part reads its rows."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Arguments that are others for a part; sizes among them are `Rows`."""
    scaled: dict[str, float] = field(default_factory=dict)
    """Whole tensors that are to be multiplied by a number."""

    def is_tensor(self, name: str) -> bool:
        return hasattr(self.args.get(name), "meta")

    def tensors(self) -> list[str]:
        """Names of the arguments that are tensors."""
        return [name for name in self.args if self.is_tensor(name)]

    def split(self, name: str) -> Split | None:
        return self.states.get(self.args[name]) if self.is_tensor(name) else None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.args[name].meta["val"].shape)

    def results(self) -> list[tuple[int, ...]]:
        value = self.node.meta["val"]
        values = value if isinstance(value, (tuple, list)) else (value,)
        return [tuple(getattr(v, "shape", ())) for v in values]

    def require(self, node: "fx.Node", wanted: Split) -> None:
        """The tensor's rows are those of the examples, or can be cut out of it; raises MixedError where they are not."""
        shape, found = node.meta["val"].shape, self.states.get(node)
        if found is not None and found != wanted:
            mixed(f"reads rows of examples along dimension {found.dim} and {wanted.dim} of its arguments at once")
        if not 0 <= wanted.dim < len(shape) or shape[wanted.dim] != self.batch * wanted.rows:
            mixed("reads tensors of different numbers of rows")
        if found is None:
            self.cut[node, wanted] = None

    def require_broadcast(self, name: str, split: Split, rank: int) -> None:
        """As `require`, of a tensor that is broadcast to a rank; where it has but one row, that is every example's."""
        shape = self.shape(name)
        dim = split.dim - (rank - len(shape))
        if dim >= 0 and shape[dim] != 1:
            self.require(self.args[name], split.at(dim))
        else:
            self.require_whole(name)

    def require_whole(self, *names: str) -> None:
        for name in names:
            if self.split(name) is not None:
                mixed("reads rows of other examples")

    def the_split(self, *names: str) -> Split:
        """The split of the first of the arguments that has one."""
        found = next((s for name in names if (s := self.split(name)) is not None), None)
        return found if found is not None else mixed("reads rows of other examples")


Rule = Callable[[Call], Sequence[Kind]]


def mixed(reason: str) -> NoReturn:
    raise MixedError(reason)


def call_of(node: "fx.Node", states: "Mapping[fx.Node, Split]", batch: int, normalised: int = 0) -> Call:
    """The call, with its arguments by name. Raises MixedError for one whose arguments have no names."""
    if not hasattr(node.target, "_schema"):
        mixed("is not known")
    return Call(node, states, batch, arguments_by_name(node), normalised)


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(max(sizes) if min(sizes) > 0 else 0 for sizes in zip(*padded, strict=True))


def dims_of(call: Call, name: str, rank: int) -> set[int]:
    """The dimensions that an argument names; all of them where it names none."""
    given = call.args.get(name)
    listed = [given] if isinstance(given, int) else list(given or range(rank))
    return {d % rank for d in listed}


def kept_rows(call: Call, split: Split) -> Sequence[Kind]:
    """All results have the rows in the same dimension."""
    for shape in call.results():
        if len(shape) <= split.dim or shape[split.dim] != call.batch * split.rows:
            mixed("makes a tensor of another number of rows")
    return [split] * len(call.results())
