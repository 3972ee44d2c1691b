"""Rules of ops that compute number by number, along dimensions, or put numbers into other shapes and places; see batch_rules."""

import sys
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from baechi_ext.capture.batch_rows import FIRST, SUM, Call, Kind, Rows, Rule, Split, broadcast_shape, dims_of, kept_rows, mixed

if TYPE_CHECKING:
    from torch import fx


def elementwise(call: Call) -> Sequence[Kind]:
    """Each number of a result comes from those at its own place, after broadcasting."""
    names, (result, *others) = call.tensors(), call.results()
    rank = len(result)
    if any(other != result for other in others) or result != broadcast_shape([call.shape(n) for n in names]):
        mixed("makes a tensor of another shape")
    wanted = {s.at(s.dim + rank - len(call.shape(n))) for n in names if (s := call.split(n)) is not None}
    if len(wanted) != 1:
        mixed("combines rows of examples along different dimensions")
    (split,) = wanted
    for name in names:
        call.require_broadcast(name, split, rank)
    return [split] * len(call.results())


def extreme(call: Call) -> Sequence[Kind]:
    return elementwise(call) if "other" in call.args else reduced(None)(call)


def same(call: Call) -> Sequence[Kind]:
    return kept_rows(call, call.the_split("self"))


def first(call: Call) -> Sequence[Kind]:
    """Reads nothing but the type of numbers."""
    return [FIRST]


def along(dim: str, *tensors: str) -> Rule:
    """Works along a dimension, for each place in the other dimensions by itself; the results have the arguments' dimensions."""

    def rule(call: Call) -> Sequence[Kind]:
        names = [n for n in tensors or call.tensors() if call.is_tensor(n)]
        call.require_whole(*(n for n in call.tensors() if n not in names))
        split, rank = call.the_split(*names), len(call.shape(names[0]))
        if split.dim in dims_of(call, dim, rank):
            mixed(f"works along the batch (dimension {split.dim})")
        for name in names:
            if len(call.shape(name)) != rank:
                mixed("reads tensors of different ranks")
            call.require(call.args[name], split)
        return kept_rows(call, split)

    return rule


def reduced(over_batch: str | None) -> Rule:
    """Reduces dimensions to one number; `over_batch` is what parts of the result are where the batch is among them, None: refused."""

    def rule(call: Call) -> Sequence[Kind]:
        rank, split = len(call.shape("self")), call.the_split("self")
        dims = dims_of(call, "dim", rank)
        if split.dim in dims:
            return [over_batch] if over_batch is not None else mixed(f"works along the batch (dimension {split.dim})")
        before = 0 if call.args.get("keepdim") else len([d for d in dims if d < split.dim])
        return kept_rows(call, split.at(split.dim - before))

    return rule


def viewed(name: str) -> Rule:
    """Other dimensions of the same numbers in the same order: those of an example stay together."""

    def rule(call: Call) -> Sequence[Kind]:
        if name not in call.args:
            mixed("reads numbers as those of another type")
        split, (shape,), old = call.the_split("self"), call.results(), call.shape("self")
        ahead = prod(old[: split.dim]) * split.blocks  # batches, one behind the other
        dim = max(d for d in range(len(shape)) if prod(shape[:d]) <= ahead)
        before, size = prod(shape[:dim]), shape[dim]
        if ahead % before or before * size % (ahead * call.batch):
            mixed(f"merges the batch (dimension {split.dim} of {old}) into dimensions of {shape}")
        found = Split(dim, before * size // (ahead * call.batch), ahead // before)
        call.changed[name] = [*shape[:dim], Rows(found.rows), *shape[dim + 1 :]]
        return [found]

    return rule


def expanded(call: Call) -> Sequence[Kind]:
    split, (shape,) = call.the_split("self"), call.results()
    dim = split.dim + len(shape) - len(call.shape("self"))
    call.changed["size"] = [*shape[:dim], Rows(split.rows), *shape[dim + 1 :]]
    return kept_rows(call, split.at(dim))


def permuted(call: Call) -> Sequence[Kind]:
    split, rank = call.the_split("self"), len(call.shape("self"))
    if "dims" in call.args:
        order = [d % rank for d in call.args["dims"]]
    else:
        order = list(range(rank))
        a, b = (call.args.get(name, default) % rank for name, default in (("dim0", 0), ("dim1", rank - 1)))
        order[a], order[b] = order[b], order[a]
    return kept_rows(call, split.at(order.index(split.dim)))


def unsqueezed(call: Call) -> Sequence[Kind]:
    split, rank = call.the_split("self"), len(call.shape("self"))
    return kept_rows(call, split.at(split.dim + (call.args["dim"] % (rank + 1) <= split.dim)))


def squeezed(call: Call) -> Sequence[Kind]:
    split, shape = call.the_split("self"), call.shape("self")
    gone = [d for d in dims_of(call, "dim", len(shape)) if shape[d] == 1]
    return kept_rows(call, split.at(split.dim - len([d for d in gone if d < split.dim])))


def selected(call: Call) -> Sequence[Kind]:
    """Takes one place of a dimension, which goes."""
    split, rank = call.the_split("self"), len(call.shape("self"))
    dim = call.args["dim"] % rank
    if dim == split.dim:
        mixed(f"takes single examples out of the batch (dimension {dim})")
    return kept_rows(call, split.at(split.dim - (dim < split.dim)))


def sliced(call: Call) -> Sequence[Kind]:
    split, rank = call.the_split("self"), len(call.shape("self"))
    if call.args["dim"] % rank == split.dim:
        if call.results() != [call.shape("self")] or call.args.get("step", 1) != 1:
            mixed(f"takes single examples out of the batch (dimension {split.dim})")
        call.changed |= {"start": None, "end": None}
    return kept_rows(call, split)


def spread(kept: bool) -> Rule:
    """The gradient of a slice (`kept`), or of a selected place: numbers among zeros along a dimension."""

    def rule(call: Call) -> Sequence[Kind]:
        split, sizes = call.the_split("grad_output"), list(call.args["input_sizes"])
        dim = call.args["dim"] % len(sizes)
        place = split.dim if kept else split.dim + (dim <= split.dim)
        if dim == place:
            if sizes != list(call.shape("grad_output")) or call.args.get("step") != 1:
                mixed(f"takes single examples out of the batch (dimension {dim})")
            call.changed |= {"start": 0, "end": sys.maxsize}
        call.changed["input_sizes"] = [*sizes[:place], Rows(split.rows), *sizes[place + 1 :]]
        return kept_rows(call, split.at(place))

    return rule


def put_at(call: Call) -> Sequence[Kind]:
    """Puts a tensor in one place of another one's dimension."""
    rank = len(call.shape("self"))
    dim, own, other = call.args["dim"] % rank, call.split("self"), call.split("src")
    split = own or call.the_split("src").at(other.dim + (dim <= other.dim) if other else 0)
    if split.dim == dim:
        mixed(f"puts values in place of single examples (dimension {dim})")
    call.require(call.args["self"], split)
    call.require(call.args["src"], split.at(split.dim - (dim < split.dim)))
    return kept_rows(call, split)


def joined_along(new: bool) -> Rule:
    """Puts tensors beside each other along a dimension, a `new` one in a stack."""

    def rule(call: Call) -> Sequence[Kind]:
        tensors = [t for t in call.args["tensors"] if tuple(t.meta["val"].shape) != (0,)]  # torch.cat passes over those
        split = next(s for t in tensors if (s := call.states.get(t)) is not None)
        rank = len(tensors[0].meta["val"].shape)
        dim = call.args["dim"] % (rank + new)
        if not new and dim == split.dim:
            mixed(f"puts further examples behind the batch (dimension {dim})")
        for tensor in tensors:
            call.require(tensor, split)
        return kept_rows(call, split.at(split.dim + (new and dim <= split.dim)))

    return rule


def repeated(call: Call) -> Sequence[Kind]:
    split, repeats = call.the_split("self"), list(call.args["repeats"])
    dim = split.dim + len(repeats) - len(call.shape("self"))
    if repeats[dim] != 1:
        mixed(f"puts further examples behind the batch (dimension {split.dim})")
    return kept_rows(call, split.at(dim))


def padded(call: Call) -> Sequence[Kind]:
    """Adds numbers around the last dimensions; the batch is none of these, or gets none."""
    split, given = call.the_split("self"), list(call.args["pad"])
    from_the_end = len(call.shape("self")) - 1 - split.dim
    if any(given[2 * from_the_end : 2 * from_the_end + 2]):
        mixed(f"adds examples to the batch (dimension {split.dim})")
    return kept_rows(call, split)


def on_last(*whole: str, count: int) -> Rule:
    """Works on the last `count` dimensions, for each place in those before by itself."""

    def rule(call: Call) -> Sequence[Kind]:
        call.require_whole(*(n for n in whole if call.is_tensor(n)))
        names = [n for n in call.tensors() if n not in whole]
        split, rank = call.the_split(*names), len(call.shape(names[0]))
        if split.dim >= rank - count:
            mixed(f"works along the batch (dimension {split.dim})")
        for name in names:
            call.require(call.args[name], split)
        if sizes := [n for n in ("input_size", "self_size") if n in call.args]:
            old = list(call.args[sizes[0]])
            call.changed[sizes[0]] = [*old[: split.dim], Rows(split.rows), *old[split.dim + 1 :]]
        return kept_rows(call, split)

    return rule


def _places(call: Call) -> "list[tuple[int, fx.Node]]":
    """Dimensions that are indexed, each with its index."""
    given = [(d, index) for d, index in enumerate(call.args["indices"]) if index is not None]
    for _, index in given:
        if index.meta["val"].dtype.is_floating_point or index.meta["val"].element_size() == 1:
            mixed("takes values by a mask")
    return given


def _after_indices(split: Split, places: "Sequence[tuple[int, fx.Node]]") -> Split:
    """The split of x[indices], whose indices are whole and not of the batch."""
    dims, rank = [d for d, _ in places], max(len(index.meta["val"].shape) for _, index in places)
    if split.dim in dims:
        mixed("takes examples out of the batch by an index")
    before = [d for d in range(split.dim) if d not in dims]
    behind = dims[0] < split.dim or dims != list(range(dims[0], dims[-1] + 1))  # indices apart from each other go first
    return split.at(len(before) + (rank if behind else 0))


def indexed(call: Call) -> Sequence[Kind]:
    """x[indices]: rows of a table for each example, or places in dimensions that are not the batch."""
    split, places = call.split("self"), _places(call)
    of_indices = [s.at(place + s.dim) for place, index in places if (s := call.states.get(index)) is not None]
    if split is not None and not of_indices:
        return kept_rows(call, _after_indices(split, places))
    if split is None and len(places) == 1:
        return kept_rows(call, of_indices[0])
    return mixed("takes examples out of the batch by an index")


def put(call: Call) -> Sequence[Kind]:
    """The gradient of x[indices]: values are added to places of a tensor."""
    split, places = call.the_split("values", "self"), _places(call)
    of_indices = [s for _, index in places if (s := call.states.get(index)) is not None]
    rank = max(len(index.meta["val"].shape) for _, index in places) + len(call.shape("self")) - len(places)
    if len(call.shape("values")) != rank:
        mixed("puts the same values at several places")
    if not of_indices:
        for dim in range(len(call.shape("self"))):
            if dim not in [d for d, _ in places] and _after_indices(split.at(dim), places) == split:
                call.require(call.args["self"], split.at(dim))
                call.require(call.args["values"], split)
                return kept_rows(call, split.at(dim))
    zeros = str(call.args["self"].target) in ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
    if len(places) != 1 or not zeros or call.split("self") is not None or not call.args["accumulate"]:
        mixed("puts rows of examples at places of each other")
    call.require(places[0][1], split.at(split.dim - places[0][0]))
    call.require(call.args["values"], split)
    return [SUM]
