"""A joint graph over parts of its batch: split where the rules of its ops prove that examples stay apart, otherwise refused.

Which of the inputs' dimensions is the batch nobody says, and nothing depends on guessing it: a graph that can be split along some
dimension computes the same. Ops that depend on no split input run once, for all parts. Constants stay those of the whole batch, its size
among them. What the graph returns of the examples is put together again, so it has the same inputs and results as before.
"""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.batch_rows import FIRST, MEAN, OWN, RATIO, SUM, Call, Kind, MixedError, Rows, Split, call_of, mixed
from baechi_ext.capture.batch_rules import judged
from baechi_ext.capture.module_names import module_of
from baechi_ext.capture.parts import shared_sizes
from baechi_ext.capture.torch_joint import DRAWS, OP_ID, PART, ROWS, _behind, _Nodes, draws
from baechi_ext.capture.torch_parts import FAR, dropout_masks, rows_of, sum_in_pairs
from baechi_ext.capture.torch_private import descriptors
from baechi_ext.capture.why_not import place_of
from baechi_ext.errors import CaptureError

if TYPE_CHECKING:
    import torch
    from torch import fx

_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_MOST_TRIED = 8
"""The most choices of dimensions that are tried: each takes a walk over the graph."""


def joined(
    parts: "Sequence[torch.Tensor]", dim: int, blocks: int, shape: Sequence[int], strides: Sequence[int]
) -> "torch.Tensor":
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
    module: "fx.GraphModule", nodes: _Nodes, wanted: int | Sequence[float]
) -> "tuple[fx.GraphModule, tuple[int, ...]]":
    """The joint graph over so many parts, or parts of these shares, and their sizes. `nodes` are those of `module`.

    Raises CaptureError, naming the op and its line, where the rows of examples are mixed, or may be.
    """
    proofs: list[_Proof] = []
    errors: list[tuple[int, CaptureError]] = []
    for split in _choices(nodes, wanted):
        lead, first = next(iter(split.items()))
        proof = _Proof(lead.meta["val"].shape[first.dim], dict(split), {})
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
    try:
        return _Emitter(module, best, sizes).emitted(), sizes
    except CaptureError:
        raise
    except Exception as e:  # noqa: BLE001 - whatever an op says of the shapes of a part
        reason = (str(e).splitlines() or [""])[0]
        raise CaptureError(f"an op does not take parts of the batch: {type(e).__name__}: {reason}") from e


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
            if made in self.calls and isinstance(kind := self.calls[made][1][node.args[1]], Split):  # type: ignore[index]
                self.states[node] = kind
            return
        if self.states.keys().isdisjoint(node.all_input_nodes):
            return
        import torch

        try:
            if draws(node) and node.target is not torch.ops.aten.native_dropout.default:
                mixed("draws random numbers for the whole batch")
            call = call_of(node, self.states, self.batch)
            kinds = judged(call)
        except MixedError as e:
            stands = module_of(node)
            frames = [(file, int(line), name) for file, line, name in _FRAME.findall(node.meta.get("stack_trace") or "")]
            where = (f" in {stands}" if stands else "") + place_of(frames)
            raise CaptureError(f"{node.target} {e}{where}") from e
        self.calls[node] = call, kinds
        if not isinstance(node.meta["val"], (tuple, list)) and isinstance(kinds[0], Split):
            self.states[node] = kinds[0]


class _Emitter:
    """Writes the graph over parts: what is whole once, what is split for each part."""

    def __init__(self, module: "fx.GraphModule", proof: _Proof, sizes: tuple[int, ...]) -> None:
        from torch import fx

        self.module, self.proof, self.sizes = module, proof, sizes
        self.begins = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self.graph = fx.Graph()
        self.whole: dict[fx.Node, fx.Node] = {}
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.cut: dict[tuple[fx.Node, Split], list[fx.Node]] = {}
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
        if node not in self.whole:
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
        if isinstance(node.meta["val"], (tuple, list)):
            return
        if kinds[0] == FIRST:
            self.whole[node] = copies[0]
        elif not isinstance(kinds[0], Split):
            self.whole[node] = self._summed(node, copies, kinds[0])
        self._require_shapes(node, copies, kinds[0])

    def _part_of(self, node: "fx.Node", call: Call, k: int, scaled: "Mapping[fx.Node, fx.Node]") -> "fx.Node":
        """A part's copy of an op."""
        from torch.fx.node import map_arg

        cut = dict(call.cut.keys())

        def argument(read: "fx.Node") -> "fx.Node":
            if read in scaled:
                return scaled[read]
            if read in self.proof.states:
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
        made, index = node.args
        kind = self.proof.calls[made][1][index]  # type: ignore[index]
        if node in self.parts:  # of a dropout
            return
        copies = [self._element_of(node, made, index, k) for k in range(len(self.sizes))]
        self._require_shapes(node, copies, kind)
        if isinstance(kind, Split):
            self.parts[node] = copies
        elif kind == FIRST:
            self.whole[node] = copies[0]
        elif kind == RATIO:
            import torch

            total = self._summed(node, copies, SUM)
            weights = [self._element_of(node, made, index + 1, k) for k in range(len(self.sizes))]  # type: ignore[operator]
            count = self._summed(node, weights, SUM, ".count")
            self.whole[node] = self._add(torch.ops.aten.div.Tensor, (total, count), {}, node, f"{node.name}.ratio")
        else:
            self.whole[node] = self._summed(node, copies, kind)

    def _element_of(self, node: "fx.Node", made: Any, index: Any, k: int) -> "fx.Node":
        return self._add(operator.getitem, (self.parts[made][k], index), {}, node, f"{node.name}.{index}@{k}", k)

    def _summed(self, node: "fx.Node", parts: "Sequence[fx.Node]", kind: Kind, of: str = "") -> "fx.Node":
        import torch

        terms = list(parts)
        if kind == MEAN:
            weights = [size / sum(self.sizes) for size in self.sizes]
            terms = [
                self._add(torch.ops.aten.mul.Scalar, (term, weight), {}, node, f"{node.name}.weighted@{k}", k)
                for k, (term, weight) in enumerate(zip(terms, weights, strict=True))
            ]
        return sum_in_pairs(terms, lambda pair, place: self._add(torch.ops.aten.add.Tensor, pair, {}, node, f"sum.{node.name}{of}.{place}"))

    def _draw(self, node: "fx.Node", call: Call) -> None:
        """Dropout: its masks are drawn for the whole batch, as without parts."""
        import torch

        split, value = self.proof.states[call.args["input"]], call.args["input"].meta["val"]
        rate, rows = float(call.args["p"]), tuple(self._rows(split, k) for k in range(len(self.sizes)))
        options = {"dtype": value.dtype, "device": value.device}
        masks = self._add(dropout_masks, (tuple(value.shape), tuple(value.stride()), rate, rows), options, node, f"{node.name}.masks")
        masks.meta |= {DRAWS: True, "seq_nr": None}
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
        node.meta = {key: value for key, value in like.meta.items() if key != "desc"} | {OP_ID: op_id}
        if part is not None:
            node.meta |= {PART: part, **({"seq_nr": seq + part * FAR} if (seq := like.meta.get("seq_nr")) is not None else {})}
        run = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        values: Any = map_arg(args, self._likeness)
        named: Any = map_arg(dict(kwargs), self._likeness)
        node.meta["val"] = run(*values, **named)
        return node

    def _likeness(self, node: "fx.Node") -> Any:
        value = node.meta.get("val")
        return value if value is not None else self.mode.from_tensor(getattr(self.module, str(node.target)))

