"""Capture of a PyTorch training step over parts of its batch: one op graph with a copy of forward and backward for each part.

Each part's pass is captured at its own size, and the copies share what does not depend on the batch. Parameters and buffers are ops
whose tensors the copies read, so that they can be sent, once a step, to every device that needs them; the parts' gradients are added
up, and there is one update. Each copy on a device of its own is data parallelism, stages of layers are a pipeline (GPipe: Huang et
al., NeurIPS 2019), and anything between is a placement like any other.

The loss stays the batch's: parts weigh as much as they have of the examples, or of the labels that count. Dropout draws its masks for
the whole batch, in the order of the unparted step, and each part takes its own of it. What sees the whole batch at once, as BatchNorm
does, is refused.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.parts import Parts
from baechi_ext.capture.torch_joint import (
    DRAWS,
    OP_ID,
    PART,
    ROWS,
    Binding,
    BoundOp,
    CaptureOptions,
    Owner,
    _behind,
    _Builder,
    _bytes,
    _Nodes,
    draws,
    export,
)
from baechi_ext.capture.torch_private import arguments_by_name, descriptors
from baechi_ext.errors import CaptureError
from baechi_ext.ir.op_graph import Op, OpGraph

if TYPE_CHECKING:
    import torch
    from torch import fx

PARAMETER = "parameter"
"""The op whose tensor is a parameter or buffer."""
_FORWARD = {"partitioner_tag": "is_forward"}
FAR = 1 << 40
"""The distance between the sequence numbers of two parts' autograd nodes; no step has so many."""


def capture_parts(
    module: "torch.nn.Module", inputs: "Sequence[torch.Tensor]", options: CaptureOptions, parts: Parts, name: str = ""
) -> tuple[OpGraph, Binding]:
    """The costless op graph of one training step of `module` over parts of its batch, and the binding to run it. See `capture_joint`.

    Raises CaptureError, too, where the step draws random numbers in another way than by dropout, and where it normalises over a batch.
    """
    device = options.device
    of_size = {size: export(module, parts.inputs_of(inputs, parts.sizes.index(size)), device) for size in dict.fromkeys(parts.sizes)}
    graphs = [of_size[size] for size in parts.sizes]
    parts = replace(parts, batch_norm_per_part=require_parts_may_differ(graphs[0].graph.nodes, parts))
    random = [node for node in graphs[0].graph.nodes if _is_random(node)]
    whole = [node for node in export(module, inputs, device).graph.nodes if _is_random(node)] if random else []
    merged, gradients = _Merger(parts, graphs, whole).merged()
    return _PartsBuilder(Owner.of(module), _Nodes.of(merged), options, gradients, parts).build(name)


def require_parts_may_differ(nodes: "Iterable[fx.Node]", parts: Parts) -> bool:
    """True if a layer normalises over the batch that is split. Raises CaptureError where the user has not allowed parts."""
    found = normalising(nodes)
    if found and not parts.batch_norm_per_part:
        raise CaptureError(
            f"{len(found)} BatchNorm layers normalise over the whole batch, and parts of it would give other numbers; "
            "--batch_norm=per_part allows that (DistributedDataParallel does it without asking), --microbatches=1 keeps the batch whole"
        )
    return bool(found)


def normalising(nodes: "Iterable[fx.Node]") -> "list[fx.Node]":
    """Those that normalise over a batch."""
    return [n for n in nodes if "batch_norm" in n.name and "backward" not in n.name and arguments_by_name(n).get("training")]


def _is_random(node: "fx.Node") -> bool:
    return node.op == "call_function" and draws(node)


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


class _Merger:
    """Copies the parts' graphs into one."""

    def __init__(self, parts: Parts, graphs: "Sequence[fx.GraphModule]", whole: "Sequence[fx.Node]") -> None:
        """`whole`: the nodes of the unparted step that draw random numbers."""
        from torch import fx

        self.parts, self.graphs, self.whole = parts, graphs, whole
        self.graph = fx.Graph()
        self.root: dict[str, Any] = {}
        self.shared: dict[str, fx.Node] = {}
        """Placeholders of parameters, buffers and inputs that all parts read, by descriptor."""
        self.masks: dict[fx.Node, fx.Node] = {}
        """A dropout of the first part -> the op that draws it for all."""
        self.copied: list[dict[fx.Node, Any]] = [{} for _ in graphs]
        """For each part, its nodes' copies; of a dropout, what it returns."""
        self.weights: list[fx.Node] = []
        """Each part's weight in the loss."""

    def merged(self) -> "tuple[fx.GraphModule, dict[str, list[fx.Node]]]":
        """The graphs of all parts as one, and for each parameter's name the parts' gradients."""
        from torch import fx

        self._draw_masks()
        behind = [_behind_the_loss(module) for module in self.graphs]
        for k, module in enumerate(self.graphs):
            self._copy(module, k, [n for n in module.graph.nodes if n not in behind[k] and n.op != "output"])
        self.weights = self._weights()
        for k, module in enumerate(self.graphs):
            self._copy(module, k, [n for n in module.graph.nodes if n in behind[k]])
        gradients = self._finish()
        return fx.GraphModule(self.root, self.graph), gradients

    def _draw_masks(self) -> None:
        """Adds the draws of the unparted step, in its order."""
        import torch

        drawing = [[n for n in module.graph.nodes if _is_random(n)] for module in self.graphs]
        for node in drawing[0]:
            if node.target is not torch.ops.aten.native_dropout.default:
                raise CaptureError(f"{node.target} draws random numbers for the whole batch, so it can't be split; give --microbatches=1")
        if any([n.target for n in own] != [n.target for n in self.whole] for own in drawing):
            raise CaptureError("the step draws other random numbers for another size of its batch; give --microbatches=1")
        for i, of_whole in enumerate(self.whole):
            own = [d[i] for d in drawing]
            value = _value(of_whole)[0]
            rows = _rows([_value(n)[0].shape for n in own], value.shape)
            arguments = (tuple(value.shape), tuple(_value(of_whole.all_input_nodes[0]).stride()), of_whole.args[1], rows)
            draw = self.graph.call_function(dropout_masks, arguments, {"dtype": value.dtype, "device": value.device})
            draw.meta = {**own[0].meta, "val": tuple(_value(n)[1] for n in own), DRAWS: True, OP_ID: f"{of_whole.name}.masks"}
            draw.meta.pop("seq_nr", None)
            self.masks[drawing[0][i]] = draw

    def _copy(self, module: "fx.GraphModule", k: int, nodes: "Sequence[Any]") -> None:
        """Adds these nodes of a part's graph."""
        import torch

        copied = self.copied[k]
        dropouts = iter(self.masks.values())
        for node in nodes:
            if node.op == "placeholder":
                copied[node] = self._placeholder(node, k)
            elif _is_random(node):
                mask = self._add(operator.getitem, (next(dropouts), k), {"val": _value(node)[1]})
                rate = float(node.args[1])
                scale = 0.0 if rate == 1 else 1 / (1 - rate)
                meta = {**self._meta(node, k), "val": _value(node)[0]}
                kept = self._add(torch.ops.aten.native_dropout_backward.default, (copied[node.args[0]], mask, scale), meta)
                copied[node] = kept, mask
            elif node.target is operator.getitem and isinstance(copied[node.args[0]], tuple):
                copied[node] = copied[node.args[0]][node.args[1]]
            else:
                copied[node] = self._plain_copy(module, node, copied, k)

    def _plain_copy(self, module: "fx.GraphModule", node: "fx.Node", copied: "Mapping[fx.Node, Any]", k: int) -> "fx.Node":
        copy = self.graph.node_copy(node, copied.__getitem__)
        copy.meta = self._meta(node, k)
        if node.op == "get_attr":
            copy.target = f"{str(node.target).replace('.', '_')}_{k}"
            self.root[copy.target] = getattr(module, str(node.target))
        return copy

    def _meta(self, node: "fx.Node", k: int) -> dict[str, Any]:
        meta = {**node.meta, OP_ID: f"{node.name}@{k}", PART: k}
        if meta.get("seq_nr") is not None:
            meta["seq_nr"] += k * FAR
        return meta

    def _placeholder(self, node: "fx.Node", k: int) -> "fx.Node":
        """The node of a part's placeholder: of what all share, the part's rows of an input, or its weight in the loss."""
        d, desc = descriptors(), node.meta["desc"]
        if isinstance(desc, d.TangentAOTInput):
            return self.weights[k]
        own = isinstance(desc, d.PlainAOTInput) and self.parts.dims[desc.idx] is not None
        key = f"{desc}@{k}" if own else str(desc)
        if key not in self.shared:
            self.shared[key] = placeholder = self.graph.placeholder(f"primals_{len(self.shared) + 1}")
            placeholder.meta = {**node.meta, **({PART: k, ROWS: self.parts.rows(desc.idx, k)} if own else {})}
        return self.shared[key]

    def _add(self, target: Callable[..., Any], args: tuple[Any, ...], meta: Mapping[str, Any]) -> "fx.Node":
        node = self.graph.call_function(target, args)
        node.meta = {key: value for key, value in meta.items() if key != "desc"}
        return node

    def _finish(self) -> "dict[str, list[fx.Node]]":
        """Adds the batch's loss and gradients, and the output. Returns each parameter's gradients, by part."""
        d = descriptors()
        outputs: list[Any] = []
        described: list[Any] = []
        gradients: dict[str, list[fx.Node]] = {}
        ends = [_output(module) for module in self.graphs]
        for i, desc in enumerate(ends[0].meta["desc"]):
            values: list[Any] = [None if (value := end.args[0][i]) is None else self.copied[k][value] for k, end in enumerate(ends)]
            if isinstance(desc, d.PlainAOTOutput):
                scaled = [self._part_of_loss(k, value) for k, value in enumerate(values)]
                value = self._sum(scaled, "loss", {"val": values[0].meta["val"], **_FORWARD})
            elif isinstance(desc, d.GradAOTOutput) and values[0] is not None:
                target = getattr(desc.grad_of, "target", None)
                meta = {**values[0].meta, "partitioner_tag": "is_backward"}
                for own in ("seq_nr", PART):
                    meta.pop(own, None)
                value = self._sum(values, f"gradient.{target}", meta)
                gradients[str(target)] = values
            else:
                value = values[0]  # buffers become what the first part makes of them
            outputs.append(value)
            described.append(desc)
        self.graph.output(outputs).meta = {"desc": described}
        return gradients

    def _weights(self) -> "list[fx.Node]":
        """Each part's weight in the loss: its share of the labels that count, where that is a mean over these, else of the examples."""
        import torch

        aten, ends = torch.ops.aten, [_output(module) for module in self.graphs]
        means = [_mean_over_labels(end) for end in ends]
        loss = _loss_of(ends[0]).meta["val"]
        if not all(means):
            return [
                self._own(aten.full.default, ([], share), loss, f"weight@{k}", k, dtype=loss.dtype, device=loss.device)
                for k, share in enumerate(self.parts.weights)
            ]
        counts = []
        for k, mean in enumerate(means):
            labels = self.copied[k][mean.args[1]]
            counted = self._own(aten.ne.Scalar, (labels, mean.args[4]), _like(labels.meta["val"], torch.bool), f"counted@{k}", k)
            counts.append(self._own(aten.sum.default, (counted,), _like(loss, torch.int64), f"count@{k}", k))
        total = self._sum(counts, "count", {"val": _like(loss, torch.int64), **_FORWARD})
        shares = [self._own(aten.div.Tensor, (n, total), _like(loss, torch.float32), f"share@{k}", k) for k, n in enumerate(counts)]
        return [self._own(aten._to_copy.default, (s,), loss, f"weight@{k}", k, dtype=loss.dtype) for k, s in enumerate(shares)]

    def _own(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any, id_: str, k: int, **options: Any) -> "fx.Node":
        """A node of part k that no graph of its has."""
        node = self._add(target, args, {"val": value, OP_ID: id_, PART: k, **_FORWARD})
        node.kwargs = options
        return node

    def _part_of_loss(self, k: int, loss: "fx.Node") -> "fx.Node":
        """The loss of part k by its weight; 0 by a weight of 0, where the mean over no labels is no number."""
        import torch

        aten, weight, like = torch.ops.aten, self.weights[k], loss.meta["val"]
        scaled = self._own(aten.mul.Tensor, (loss, weight), like, f"loss@{k}", k)
        if weight.target is aten.full.default:
            return scaled
        empty = self._own(aten.eq.Scalar, (weight, 0), _like(like, torch.bool), f"empty@{k}", k)
        return self._own(aten.masked_fill.Scalar, (scaled, empty, 0.0), like, f"counted_loss@{k}", k)

    def _sum(self, values: "Sequence[fx.Node]", name: str, meta: Mapping[str, Any]) -> "fx.Node":
        """The sum of the parts' values."""
        import torch

        def add(pair: "tuple[fx.Node, fx.Node]", place: str) -> "fx.Node":
            return self._add(torch.ops.aten.add.Tensor, pair, {**meta, OP_ID: f"sum.{name}.{place}"})

        return sum_in_pairs(values, add)


def sum_in_pairs(values: "Sequence[fx.Node]", add: "Callable[[tuple[fx.Node, fx.Node], str], fx.Node]") -> "fx.Node":
    """The sum of the parts' values, of halves of the parts first: what one device has of them goes to another one as one tensor. `add`
    makes the sum of two of them, given its place among the sums."""
    sums = list(values)
    while len(sums) > 1:
        ahead = len(sums) // 2
        added = [add((sums[2 * i], sums[2 * i + 1]), f"{len(sums)}.{i}") for i in range(ahead)]
        sums = [*added, *sums[2 * ahead :]]
    return sums[0]


def _output(module: "fx.GraphModule") -> Any:
    return next(iter(reversed(module.graph.nodes)))


def _loss_of(output: Any) -> Any:
    """The node of a part's loss."""
    d = descriptors()
    return next(v for v, desc in zip(output.args[0], output.meta["desc"], strict=True) if isinstance(desc, d.PlainAOTOutput))


def _mean_over_labels(output: Any) -> Any:
    """The op that the loss is the first result of, where it is a mean over the labels that are not to be ignored; else None."""
    import torch

    loss = _loss_of(output)
    node = loss.args[0] if loss.target is operator.getitem else None
    kinds = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
    return node if node is not None and node.target in kinds and node.args[2] is None and node.args[3] == 1 else None


def _behind_the_loss(module: "fx.GraphModule") -> "set[fx.Node]":
    """The tangent of the loss, and all nodes that read it, or what was made of it."""
    d, nodes = descriptors(), [n for n in module.graph.nodes if n.op != "output"]
    return _behind(nodes, [n for n in nodes if n.op == "placeholder" and isinstance(n.meta["desc"], d.TangentAOTInput)])


def _like(value: Any, dtype: "torch.dtype") -> "torch.Tensor":
    """A tensor of the same shape that holds nothing."""
    import torch

    return torch.empty(value.shape, dtype=dtype, device="meta")


def _value(node: "fx.Node") -> Any:
    return node.meta["val"]


def _rows(own: Sequence[Sequence[int]], whole: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """The rows of a tensor of the whole batch that each part has. Raises CaptureError where these are no rows of it."""
    dims = [d for d, length in enumerate(whole) if any(shape[d] != length for shape in own)] if {*map(len, own)} == {len(whole)} else []
    if len(dims) != 1 or sum(shape[dims[0]] for shape in own) != whole[dims[0]]:
        raise CaptureError(
            f"dropout of a tensor of shape {tuple(whole)} does not split by examples (parts: {', '.join(str(tuple(s)) for s in own)}); "
            "give --microbatches=1"
        )
    dim = dims[0]
    ends = list(accumulate(shape[dim] for shape in own))
    return tuple((dim, end - shape[dim], shape[dim]) for shape, end in zip(own, ends, strict=True))


class _PartsBuilder(_Builder):
    """Turns the merged nodes into ops, edges and colocation groups, in which parameters and buffers are ops with tensors."""

    def __init__(
        self, owner: Owner, nodes: _Nodes, options: CaptureOptions, gradients: "Mapping[str, Sequence[fx.Node]]", parts: Parts
    ) -> None:
        """`gradients`: by parameter, those of each part."""
        super().__init__(owner, nodes, options)
        self.gradients, self.parts = gradients, parts
        self.sources: dict[str, int] = {}
        """Parameter or buffer -> its op."""
        self.read_by: dict[int, list[int]] = {}
        """Op -> the ops that read it."""

    def build(self, name: str) -> tuple[OpGraph, Binding]:
        for node, state in self.nodes.state.items():
            if node.users:
                self._add_state(node, self.state_names[state])
        graph, binding = super().build(name)
        # What is a tensor now stands in a slot like any other.
        others = {node: state for node, state in binding.state_nodes.items() if node not in self.home}
        return graph, replace(binding, state_nodes=others, parts=self.parts)

    def _add_state(self, node: "fx.Node", state: str) -> None:
        """The op that a parameter or buffer is read from, by all its names."""
        if state not in self.sources:
            size = _bytes(self.state[state])
            op = Op(f"{PARAMETER}.{state}", PARAMETER, persistent_bytes=size, output_bytes=size, module=self._owner(state), resident=True)
            v = self.sources[state] = self._add(op, BoundOp(state=state))
            self.groups.join(v, state)
            self.state_readers[state] = [v]
        self._own(node, self.sources[state], "0")

    def _read(self, node: "fx.Node", v: int) -> None:
        super()._read(node, v)
        base = self._base(node)
        if isinstance(base, tuple):
            self.read_by.setdefault(base[0], []).append(v)

    def _keep_together(self, update: int, maker: int) -> None:
        """Parts make gradients wherever they run."""

    def _order_readers(self, parameter: str, update: int) -> None:
        """The update overwrites the parameter in place, so whoever reads the old value goes first: before its part's gradient is made,
        where only sums wait for that, as both tend to be on one device then, and the update waits for all gradients anyway."""
        makers = self._makers(parameter)
        for reader in dict.fromkeys(self.read_by.get(self.sources[parameter], [])):
            if not self.ancestors[update] >> reader & 1:
                self._order(reader, makers.get(self.ops[reader].part, update))

    def _makers(self, parameter: str) -> dict[int | None, int]:
        """Part -> the op that makes the parameter's gradient, where only sums and updates read what it makes."""
        names = [name for name in self.gradients if self.state_names[name] == parameter]
        bases = [(part, self._base(node)) for name in names for part, node in enumerate(self.gradients[name])]
        made = {part: base[0] for part, base in bases if isinstance(base, tuple)}
        return {part: v for part, v in made.items() if all(self.ops[w].part is None for w in self.read_by.get(v, ()))}
