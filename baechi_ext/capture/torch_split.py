"""A joint graph over parts of its batch: split where the rules of its ops prove that examples stay apart, otherwise refused.

Which of the inputs' dimensions is a call's batch nobody says, and nothing depends on guessing it: a graph that can be split along some
dimension computes the same. Ops that depend on no split input run once, for all parts. Constants stay those of the whole batch, its size
among them. What the graph returns of the examples is put together again, so it has the same inputs and results as before.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.batch_rows import COUNT, FIRST, MEAN, OWN, RATIO, SUM, Call, Kind, MixedError, Rows, Split, call_of, mixed
from baechi_ext.capture.batch_rules import judged
from baechi_ext.capture.module_names import module_of
from baechi_ext.capture.parts import shared_sizes
from baechi_ext.capture.torch_joint import OP_ID, PART, ROWS, _behind, _is_view, _Nodes
from baechi_ext.capture.torch_private import DRAWS, descriptors, draws
from baechi_ext.capture.why_not import frames_of, place_of
from baechi_ext.errors import CaptureError, first_line

if TYPE_CHECKING:
    import torch
    from torch import fx

_MOST_TRIED = 8
"""The most choices of dimensions that are tried: each takes a walk over the graph."""
FAR = 1 << 40
"""The distance between the sequence numbers of two parts' autograd nodes; no step has so many."""


def dropout_masks(
    shape: Sequence[int],
    strides: Sequence[int],
    rate: float,
    rows: Sequence[tuple[int, ...]],
    dtype: "torch.dtype",
    device: "torch.device",
) -> "tuple[torch.Tensor, ...]":
    """The mask that aten.native_dropout draws, in the order of its numbers in memory, for a tensor of this shape and strides, cut into
    `rows`: each what `rows_of` takes."""
    import torch

    like = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
    mask = torch.ops.aten.native_dropout.default(like, rate, True)[1]
    return tuple(rows_of(mask, *each) for each in rows)


def rows_of(tensor: "torch.Tensor", dim: int, begin: int, length: int, blocks: int = 1) -> "torch.Tensor":
    """Rows of a tensor, the same of each of the blocks along `dim`; in memory of their own where they are not in one piece."""
    if blocks == 1:
        return tensor.narrow(dim, begin, length).contiguous()
    apart: torch.Tensor = tensor.unflatten(dim, (blocks, -1))
    return apart.narrow(dim + 1, begin, length).flatten(dim, dim + 1).contiguous()


def sum_in_pairs(values: "Sequence[fx.Node]", add: "Callable[[tuple[fx.Node, fx.Node], str], fx.Node]") -> "fx.Node":
    """The sum of the parts' values, of halves of the parts first: what one device has of them goes to another one as one tensor. `add`
    makes the sum of two of them, given its place among the sums."""
    sums = list(values)
    while len(sums) > 1:
        ahead = len(sums) // 2
        added = [add((sums[2 * i], sums[2 * i + 1]), f"{len(sums)}.{i}") for i in range(ahead)]
        sums = [*added, *sums[2 * ahead :]]
    return sums[0]


def joined(parts: "Sequence[torch.Tensor]", dim: int, blocks: int, shape: Sequence[int], strides: Sequence[int]) -> "torch.Tensor":
    """The whole tensor of parts whose rows stand along `dim` in so many blocks, laid out as it would be had it never been in parts."""
    import torch

    whole = torch.empty_strided(tuple(shape), tuple(strides), dtype=parts[0].dtype, device=parts[0].device)
    apart = [part.unflatten(dim, (blocks, -1)) for part in parts]
    for rows, part in zip(whole.unflatten(dim, (blocks, -1)).split([p.shape[dim + 1] for p in apart], dim + 1), apart, strict=True):
        rows.copy_(part)
    return whole


def _strides(value: "torch.Tensor") -> tuple[int, ...]:
    """The strides of a tensor of its own that is laid out alike."""
    import torch

    return tuple(torch.empty_like(value).stride())


def split_batch(
    module: "fx.GraphModule", nodes: _Nodes, wanted: int | Sequence[float], *, batch_norm_per_part: bool = False
) -> "tuple[fx.GraphModule, tuple[int, ...]]":
    """The joint graph over so many parts, or parts of these shares, and their sizes. `nodes` are those of `module`; BatchNorm may normalise
    over each part by itself, where that is of the first dimension: another one may be no batch.

    Raises CaptureError, naming the op and its line, where the rows of examples are mixed, or may be.
    """
    proofs: list[_Proof] = []
    errors: list[tuple[int, CaptureError]] = []
    for split in _choices(nodes, wanted):
        lead, first = next(iter(split.items()))
        batch = lead.meta["val"].shape[first.dim]
        proof = _Proof(batch, dict(split), {}, min(_sizes(batch, wanted)) if batch_norm_per_part and first.dim == 0 else 0)
        try:
            proof.complete(nodes)
            proofs.append(proof)
        except CaptureError as e:
            errors.append((len(proof.calls), e))
    proofs = [p for p in proofs if p.calls]
    if not proofs:
        raise max(errors, key=lambda e: e[0])[1] if errors else CaptureError("no input has a dimension to split")
    best = max(proofs, key=lambda p: len(p.calls))
    sizes = _sizes(best.batch, wanted)
    return _emitted(module, best, sizes), sizes


def split_along(
    module: "fx.GraphModule", nodes: _Nodes, split: "Mapping[fx.Node, Split]", sizes: tuple[int, ...], *, batch_norm_per_part: bool
) -> "fx.GraphModule":
    """The joint graph over parts of these sizes, where it is known how each input is split. Raises as `split_batch` does."""
    proof = _Proof(sum(sizes), dict(split), {}, min(sizes) if batch_norm_per_part else 0)
    proof.complete(nodes)
    return _emitted(module, proof, sizes)


def _emitted(module: "fx.GraphModule", proof: "_Proof", sizes: tuple[int, ...]) -> "fx.GraphModule":
    try:
        return _Emitter(module, proof, sizes).emitted()
    except CaptureError:
        raise
    except Exception as e:  # noqa: BLE001 - whatever an op says of the shapes of a part
        raise CaptureError(f"an op does not take parts of the batch: {type(e).__name__}: {first_line(e)}") from e


def _sizes(batch: int, wanted: int | Sequence[float]) -> tuple[int, ...]:
    return shared_sizes(batch, [1] * wanted if isinstance(wanted, int) else list(wanted))


def _choices(nodes: _Nodes, wanted: int | Sequence[float]) -> "Iterator[dict[fx.Node, Split]]":
    """Dimensions of the inputs to split: of each input the first one, or the second of a sequence, with those of the other inputs that are
    as long, or alone. Given sizes that add up to one of these lengths are meant for it."""
    shapes = {n: tuple(n.meta["val"].shape) for n in nodes.plain if n.users}
    found: list[dict[fx.Node, Split]] = []
    for dim in (0, 1):
        for lead, shape in shapes.items():
            sequence = len(shape) > 2 or not lead.meta["val"].dtype.is_floating_point
            if len(shape) > dim and (dim == 0 or sequence) and len(_sizes(shape[dim], wanted)) > 1:
                alike = {n: Split(dim) for n, s in shapes.items() if len(s) > dim and s[dim] == shape[dim]}
                found += [c for c in (alike, {lead: Split(dim)}) if c not in found]
    if not isinstance(wanted, int) and all(type(size) is int for size in wanted):
        meant = [c for c in found if all(n.meta["val"].shape[s.dim] == sum(wanted) for n, s in c.items())]
        found = meant or found
    return iter(found[:_MOST_TRIED])


@dataclass(frozen=True)
class _Proof:
    """The states of a graph's nodes that follow from those of its inputs."""

    batch: int
    states: "dict[fx.Node, Split]"
    calls: "dict[fx.Node, tuple[Call, Sequence[Kind]]]"
    """Ops over parts of the batch."""
    normalised: int = 0
    """See Call."""
    sums: "set[fx.Node]" = field(default_factory=set)
    """The nodes that are sums over the parts."""
    linear: "set[fx.Node]" = field(default_factory=set)
    """Those of them that are made of each part's share of other sums."""

    def complete(self, nodes: _Nodes) -> None:
        """Adds what follows from the inputs. Raises CaptureError at the first op that may mix examples."""
        behind = _behind(nodes.calls, nodes.tangents.values())
        for node in (n for n in nodes.calls if n not in behind):
            self._judge(node)
        # A gradient that comes in is split as the output is.
        outputs = {tangent: nodes.outputs[i] for i, tangent in nodes.tangents.items()}
        self.states.update({tangent: self.states[output] for tangent, output in outputs.items() if output in self.states})
        for node in (n for n in nodes.calls if n in behind):
            self._judge(node)

    def _judge(self, node: "fx.Node") -> None:
        """Adds what follows for a node, whose arguments have been judged."""
        if node.target is operator.getitem:
            made: Any = node.args[0]
            if made in self.calls:
                self._note(node, self.calls[made][1][node.args[1]])  # type: ignore[index]
            return
        if node.all_input_nodes and self.sums.issuperset(node.all_input_nodes) and _is_linear(node):
            self.calls[node] = call_of(node, self.states, self.batch), [SUM]
            self._note(node, SUM)
            self.linear.add(node)
            return
        if self.states.keys().isdisjoint(node.all_input_nodes):
            return
        import torch

        try:
            if draws(node) and node.target is not torch.ops.aten.native_dropout.default:
                mixed("draws random numbers for the whole batch")
            call = call_of(node, self.states, self.batch, self.normalised)
            kinds = judged(call)
        except MixedError as e:
            stands = module_of(node)
            where = (f" in {stands}" if stands else "") + place_of(frames_of(node))
            raise CaptureError(f"{node.target} {e}{where}") from e
        self.calls[node] = call, kinds
        if not isinstance(node.meta["val"], (tuple, list)):
            self._note(node, kinds[0])

    def _note(self, node: "fx.Node", kind: Kind) -> None:
        if isinstance(kind, Split):
            self.states[node] = kind
        elif kind == SUM:
            self.sums.add(node)


def _is_linear(node: "fx.Node") -> bool:
    """True for what is done to each part's share of a sum: gradients of a layer that is used again are added up part by part."""
    import torch
    from torch import fx

    aten, value = torch.ops.aten, node.meta["val"]
    if node.target is aten.add.Tensor:
        return isinstance(node.args[1], fx.Node)
    same_type = isinstance(value, torch.Tensor) and all(read.meta["val"].dtype == value.dtype for read in node.all_input_nodes)
    return same_type and (_is_view(node) or node.target in (aten.stack.default, aten.sum.default))


class _Emitter:
    """Writes the graph over parts: what is whole once, what is split for each part."""

    def __init__(self, module: "fx.GraphModule", proof: _Proof, sizes: tuple[int, ...]) -> None:
        from torch import fx

        self.module, self.proof, self.sizes = module, proof, sizes
        self.begins = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self.graph = fx.Graph()
        self.whole: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        """Each part's rows, or its share of a sum."""
        self.cut: dict[tuple[fx.Node, Split], list[fx.Node]] = {}
        self.counts: dict[fx.Node, fx.Node] = {}
        self.likenesses: dict[tuple[str, int], Any] = {}
        """The likeness of what every part of a size computes by an op, by the op's id and that size."""
        self.mode: Any = next(m for n in module.graph.nodes if (m := getattr(n.meta.get("val"), "fake_mode", None)) is not None)

    def emitted(self) -> "fx.GraphModule":
        import torch
        from torch import fx

        with self.mode, torch.no_grad(), torch.autocast("cpu", enabled=False):
            for node in self.module.graph.nodes:
                if node.op == "placeholder":
                    self._placeholder(node)
                elif node.op == "output":
                    values = [None if v is None else self._laid_out(v) for v in node.args[0]]
                    self.graph.output(values).meta = dict(node.meta)
                elif node in self.proof.calls:
                    self._split_call(node, *self.proof.calls[node])
                elif node.target is operator.getitem and node.args[0] in self.proof.calls:
                    self._element(node)
                else:
                    self._copy(node)
        _order_by_part(self.graph)
        return fx.GraphModule(self.module, self.graph)

    def _copy(self, node: "fx.Node") -> None:
        copy = self.whole[node] = self.graph.node_copy(node, self._as_whole)
        copy.meta = dict(node.meta)

    def _placeholder(self, node: "fx.Node") -> None:
        split, d = self.proof.states.get(node), descriptors()
        if split is None or isinstance(node.meta["desc"], d.TangentAOTInput):
            self._copy(node)
            if split is not None:
                self.parts[node] = self._cut(node, split)
                for part in self.parts[node]:
                    part.meta["partitioner_tag"] = "is_backward"
            return
        for k in range(len(self.sizes)):
            part = self.graph.placeholder(f"{node.name}_{k}")
            rows = self._rows(split, k)
            part.meta = {**node.meta, "val": rows_of(node.meta["val"], *rows), PART: k, ROWS: rows}
            self.parts.setdefault(node, []).append(part)

    def _rows(self, split: Split, k: int) -> tuple[int, ...]:
        """Arguments of `rows_of`."""
        rows = (split.dim, self.begins[k] * split.times, self.sizes[k] * split.times)
        return rows if split.blocks == 1 else (*rows, split.blocks)

    def _as_whole(self, node: "fx.Node") -> "fx.Node":
        """The node's whole value, put together where it is in parts."""
        if node not in self.whole and node in self.proof.sums:
            if _is_view(node):
                self._copy(node)
            else:
                self.whole[node] = self._summed(node, self.parts[node])
        elif node not in self.whole:
            split, value = self.proof.states[node], node.meta["val"]
            if split == OWN:
                raise CaptureError(f"{node.name} is the working memory of an op, and can't be put together of parts")
            arguments = (self.parts[node], split.dim, split.blocks, tuple(value.shape), _strides(value))
            self.whole[node] = self._add(joined, arguments, {}, node, f"{node.name}.joined")
        return self.whole[node]

    def _laid_out(self, node: "fx.Node") -> "fx.Node":
        """The whole value of what the graph returns; where it is a sum over the parts, in the memory layout that it has without them."""
        whole, value = self._as_whole(node), node.meta["val"]
        if whole.op != "call_function" or whole.target is joined or tuple(whole.meta["val"].stride()) == _strides(value):
            return whole
        return self._add(joined, ([whole], 0, 1, tuple(value.shape), _strides(value)), {}, node, f"{node.name}.laid_out")

    def _cut(self, node: "fx.Node", split: Split, reader: "fx.Node | None" = None) -> "list[fx.Node]":
        """Each part's rows of a whole tensor."""
        if (node, split) not in self.cut:
            ids = [f"{node.name}.rows.{split.dim}@{k}" for k in range(len(self.sizes))]
            self.cut[node, split] = [
                self._add(rows_of, (self._as_whole(node), *self._rows(split, k)), {}, reader or node, ids[k], k)
                for k in range(len(self.sizes))
            ]
        return self.cut[node, split]

    def _split_call(self, node: "fx.Node", call: Call, kinds: Sequence[Kind]) -> None:
        if draws(node):
            self._draw(node, call)
            return
        import torch

        factors = {call.args[name]: factor for name, factor in call.scaled.items()}
        times, name = torch.ops.aten.mul.Scalar, f"{node.name}.scaled"
        scaled = {read: self._add(times, (self._as_whole(read), factor), {}, node, name) for read, factor in factors.items()}
        copies = self.parts[node] = [self._part_of(node, call, k, scaled) for k in range(len(self.sizes))]
        if not isinstance(node.meta["val"], (tuple, list)):
            self._hold(node, copies, kinds[0])

    def _part_of(self, node: "fx.Node", call: Call, k: int, scaled: "Mapping[fx.Node, fx.Node]") -> "fx.Node":
        """A part's copy of an op."""
        from torch.fx.node import map_arg

        cut = dict(call.cut.keys())

        def argument(read: "fx.Node") -> "fx.Node":
            if read in scaled:
                return scaled[read]
            if read in self.proof.states or node in self.proof.linear:
                return self.parts[read][k]
            return self._cut(read, cut[read], node)[k] if read in cut else self._as_whole(read)

        def sized(value: Any) -> Any:
            if isinstance(value, Rows):
                return value.times * self.sizes[k]
            return [sized(v) for v in value] if isinstance(value, list) else value

        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs | {n: sized(v) for n, v in call.changed.items()}
        positional = [a.name for a in node.target._schema.arguments if not a.kwarg_only]  # type: ignore[union-attr]
        last = max((i for i, name in enumerate(positional) if name in given), default=-1)
        args = tuple(map_arg(given.get(name, call.args[name]), argument) for name in positional[: last + 1])
        kwargs = {name: map_arg(value, argument) for name, value in given.items() if name not in positional}
        return self._add(node.target, args, kwargs, node, f"{node.name}@{k}", k)

    def _element(self, node: "fx.Node") -> None:
        """An element of what an op returns."""
        import torch

        made: Any = node.args[0]
        index: Any = node.args[1]
        kind = self.proof.calls[made][1][index]
        if node in self.parts:  # of a dropout
            return
        if kind == COUNT:
            self.whole[node] = self._count(made)
            return
        copies = self._elements(node, made, index)
        if kind == RATIO:
            self._require_shapes(node, copies, kind)
            ratio = self._summed(node, copies), self._count(made)
            self.whole[node] = self._add(torch.ops.aten.div.Tensor, ratio, {}, node, f"{node.name}.ratio")
        else:
            self._hold(node, copies, kind)

    def _elements(self, node: "fx.Node", made: "fx.Node", index: int) -> "list[fx.Node]":
        """Each part's element of what its copy of an op returns."""
        ids = [f"{node.name}.{index}@{k}" for k in range(len(self.sizes))]
        return [self._add(operator.getitem, (self.parts[made][k], index), {}, node, id_, k) for k, id_ in enumerate(ids)]

    def _hold(self, node: "fx.Node", copies: "list[fx.Node]", kind: Kind) -> None:
        """Keeps the parts' results as what the node's is made of."""
        import torch

        self._require_shapes(node, copies, kind)
        if kind == FIRST:
            self.whole[node] = copies[0]
        elif kind == MEAN:
            weights = [size / sum(self.sizes) for size in self.sizes]
            terms = [
                self._add(torch.ops.aten.mul.Scalar, (copy, weight), {}, node, f"{node.name}.weighted@{k}", k)
                for k, (copy, weight) in enumerate(zip(copies, weights, strict=True))
            ]
            self.whole[node] = self._summed(node, terms)
        else:
            self.parts[node] = copies

    def _count(self, made: "fx.Node") -> "fx.Node":
        """The weight of all labels that a loss counts; where each weighs 1, from the labels alone: no part waits for another's loss."""
        import torch

        aten, call = torch.ops.aten, self.proof.calls[made][0]
        if made not in self.counts and call.is_tensor("weight"):
            self.counts[made] = self._summed(made, self._elements(made, made, 1), ".count")
        elif made not in self.counts:
            counts, target = [], call.args["target"]
            for k, labels in enumerate(self.parts.get(target) or [self._as_whole(target)]):
                part = labels.meta.get(PART)
                counted = self._add(aten.ne.Scalar, (labels, call.args["ignore_index"]), {}, made, f"{made.name}.counted@{k}", part)
                counts.append(self._add(aten.sum.default, (counted,), {}, made, f"{made.name}.count@{k}", part))
            options = {"dtype": made.meta["val"][1].dtype}
            count = self._summed(made, counts, ".count")
            self.counts[made] = self._add(aten._to_copy.default, (count,), options, made, f"{made.name}.count")
        return self.counts[made]

    def _summed(self, node: "fx.Node", terms: "Sequence[fx.Node]", of: str = "") -> "fx.Node":
        import torch

        return sum_in_pairs(terms, lambda pair, place: self._add(torch.ops.aten.add.Tensor, pair, {}, node, f"sum.{node.name}{of}.{place}"))

    def _draw(self, node: "fx.Node", call: Call) -> None:
        """Dropout: its masks are drawn for the whole batch, as without parts."""
        import torch

        split, value = self.proof.states[call.args["input"]], call.args["input"].meta["val"]
        rate, rows = float(call.args["p"]), tuple(self._rows(split, k) for k in range(len(self.sizes)))
        options = {"dtype": value.dtype, "device": value.device}
        masks = self._add(dropout_masks, (tuple(value.shape), tuple(value.stride()), rate, rows), options, node, f"{node.name}.masks")
        masks.meta[DRAWS] = True
        made = []
        for k in range(len(self.sizes)):
            mask = self._add(operator.getitem, (masks, k), {}, node, f"{node.name}.mask@{k}", k)
            arguments = (self.parts[call.args["input"]][k], mask, 0.0 if rate == 1 else 1 / (1 - rate))
            made.append((self._add(torch.ops.aten.native_dropout_backward.default, arguments, {}, node, f"{node.name}@{k}", k), mask))
        for user in node.users:
            self.parts[user] = [pair[user.args[1]] for pair in made]  # type: ignore[index]

    def _require_shapes(self, node: "fx.Node", copies: "Sequence[fx.Node]", kind: Kind) -> None:
        """Each part has its rows of the whole tensor's shape, or that shape."""
        for k, copy in enumerate(copies if kind != OWN else ()):
            expected = list(node.meta["val"].shape)
            if isinstance(kind, Split):
                expected[kind.dim] = self.sizes[k] * kind.rows
            if list(copy.meta["val"].shape) != expected or copy.meta["val"].dtype != node.meta["val"].dtype:
                made = tuple(copy.meta["val"].shape)
                raise CaptureError(f"{node.target} makes a tensor of shape {made} of a part of the batch instead of {tuple(expected)}")

    def _add(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: "fx.Node", op_id: str, part: int | None = None
    ) -> "fx.Node":
        """A node that belongs to node `like` of the whole graph, with the likeness of what it computes."""
        import torch
        from torch.fx.node import map_arg

        node = self.graph.call_function(target, args, dict(kwargs))
        node.meta = {key: value for key, value in like.meta.items() if key not in ("desc", "seq_nr")} | {OP_ID: op_id}
        if part is not None:
            node.meta |= {PART: part, **({"seq_nr": seq + part * FAR} if (seq := like.meta.get("seq_nr")) is not None else {})}
        made = None if part is None else (op_id.rpartition("@")[0], self.sizes[part])
        if made is not None and made in self.likenesses:
            node.meta["val"] = self.likenesses[made]
            return node
        run = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        values: Any = map_arg(args, self._likeness)
        named: Any = map_arg(dict(kwargs), self._likeness)
        node.meta["val"] = run(*values, **named)
        if made is not None:
            self.likenesses[made] = node.meta["val"]
        return node

    def _likeness(self, node: "fx.Node") -> Any:
        value = node.meta.get("val")
        return value if value is not None else self.mode.from_tensor(getattr(self.module, str(node.target)))


def _order_by_part(graph: "fx.Graph") -> None:
    """Puts each part's nodes behind one another, right behind what they read of others, and forward before backward: of ops that are as
    urgent the first one runs first, and a part is to be passed on before the next is begun. What draws random numbers keeps its order."""
    d = descriptors()
    calls = {node: i for i, node in enumerate(graph.nodes) if node.op == "call_function"}
    cursor, *_ = fixed = [n for n in reversed(graph.nodes) if n.op in ("placeholder", "get_attr")]
    done, drawing = set(fixed), [node for node in calls if draws(node)]
    drawn_before = dict(zip(drawing[1:], drawing, strict=False))
    behind = _behind(calls, [n for n in fixed if n.op == "placeholder" and isinstance(n.meta["desc"], d.TangentAOTInput)])
    for node in sorted(calls, key=lambda n: (n in behind, n.meta.get(PART, math.inf))):
        needed, left = set(), [node]
        while left:
            if (read := left.pop()) not in done:
                done.add(read)
                needed.add(read)
                left += [*read.all_input_nodes, *([drawn_before[read]] if read in drawn_before else [])]
        for each in sorted(needed, key=calls.__getitem__):
            cursor.append(each)
            cursor = each
