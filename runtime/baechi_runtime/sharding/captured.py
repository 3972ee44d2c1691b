"""The forward graph of a training step, in the ops that a person would name: linear, conv2d, layer_norm; backward is left to autograd. And
the same as a shard graph: a node for each call, by its rule; edges for the tensors between them.

Nobody sends what every device can make for itself: inputs of the step are read as they are needed, and what is computed from constants
alone, or is whole numbers, is computed by every device ("prepared"). A parameter that several calls read is held by the first, and goes
from each to the next, with its gradient on the way back: nothing moves where they split it alike. Those with the same loops are a layer in
several pieces, and are split alike (ties).
"""

import contextlib
import operator
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils.flop_counter import FlopCounterMode

from baechi_ext.capture.torch_private import arguments_by_name, lstm_states_as_they_are
from baechi_ext.capture.why_not import not_capturable
from baechi_ext.errors import CaptureError
from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Tensor
from baechi_ext.shard.rules import Rules
from baechi_runtime.sharding import arithmetic, products, shapes
from baechi_runtime.sharding.loops import Loops, Read, UnknownFormError, Value
from baechi_runtime.sharding.op_names import argument_at, is_pointwise, name_of, op_of, parts_of

PREPARED, UNKNOWN = "prepared", "unknown"
"""Names for the ops of nodes that every device computes whole: since it can make them for itself, or since the op is not known."""
Rule = Callable[[Loops], None]

_SIMPLE = partial(arithmetic.elementwise, simple=True)
_RULES: dict[Rule, str] = {
    products.linear: "linear",
    products.addmm: "addmm baddbmm",
    products.matmul: "matmul mm bmm mv dot",
    products.einsum: "einsum",
    products.convolution: "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
    products.attention: "scaled_dot_product_attention",
    products.embedding: "embedding",
    arithmetic.reduction: "sum mean amax amin prod var std var_mean std_mean norm linalg_vector_norm logsumexp any all argmax argmin "
    "max min count_nonzero",
    arithmetic.softmax: "softmax log_softmax _softmax _log_softmax",
    arithmetic.layer_norm: "layer_norm rms_norm",
    arithmetic.batch_norm: "batch_norm",
    arithmetic.group_norm: "group_norm",
    arithmetic.instance_norm: "instance_norm",
    arithmetic.cross_entropy: "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d",
    arithmetic.loss: "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss",
    arithmetic.pooling: "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices",
    shapes.same: "to clone contiguous alias detach lift_fresh_copy type_as",
    shapes.reshape: "view reshape flatten unflatten squeeze unsqueeze ravel _unsafe_view view_as reshape_as",
    shapes.permute: "permute transpose swapaxes swapdims t",
    shapes.expand: "expand expand_as broadcast_to",
    shapes.broadcast: "broadcast_tensors",
    shapes.part: "slice narrow split split_copy split_with_sizes split_with_sizes_copy chunk tensor_split",
    shapes.pick: "select unbind",
    shapes.concat: "cat concat concatenate",
    shapes.stack: "stack",
    shapes.along: "cumsum cumprod logcumsumexp flip roll sort argsort topk triu tril pad constant_pad_nd glu",
    shapes.resized: "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d "
    "upsample_trilinear3d pixel_shuffle pixel_unshuffle",
    shapes.gather: "gather index_select",
    _SIMPLE: "add sub rsub rand_like randn_like masked_fill where copy",
    arithmetic.elementwise: "dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout rrelu prelu gelu silu _to_copy",
}  # fmt: skip
_BY_NAME = {name: rule for rule, names in _RULES.items() for name in names.split()}
_BY_NAME |= {name: partial(products.stacked, gates=gates) for name, gates in products.GATES.items()}
_OWN = {name: partial(products.chunk, gates=gates) for name, gates in products.GATES.items() if name in ("lstm", "gru")}


@dataclass(frozen=True)
class ForwardGraph:
    """torch.export's program of `module(*inputs)`, the scalar loss. Weights and inputs are placeholders; `parameters` and `buffers` have
    the module's own names of them (a weight of several names has its first), `constants` the values of tensors that forward makes,
    `inputs` the placeholders of the inputs, in order.
    """

    name: str
    program: ExportedProgram
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: tuple[str, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls, in the order that they run in."""
        return [node for node in self.program.graph.nodes if node.op == "call_function"]

    @property
    def loss(self) -> fx.Node:
        """The node whose value is the loss."""
        return next(node for node in self.program.graph.nodes if node.op == "output").args[0][0]


@dataclass(frozen=True)
class Measured:
    """Microseconds of a step that went to calls, those of the whole step, and the number of these calls."""

    us: float
    all_us: float
    calls: int


@dataclass(frozen=True)
class CapturedGraph:
    """A forward graph and its shard graph; `reads[node]`: for each tensor that the call reads, in the order of its arguments, the FX node
    it comes from and how the loops run over it (a node's own `inputs` are those that are no parameters, its `weights` the parameters that
    it reads first).

    `unknown` are the nodes whose ops are not known, by their ops' names. `batch`: the examples of a step, `seconds`: those that capturing
    took; `measured`: what was measured of its costs, where there is a profile.
    """

    forward: ForwardGraph
    graph: ShardGraph
    reads: dict[str, tuple[tuple[str, Tensor], ...]]
    unknown: dict[str, str]
    batch: int = 0
    seconds: float = 0.0
    measured: Measured | None = None

    @property
    def flop(self) -> float:
        """Operations of a step on one device."""
        return sum(node.flop() for node in self.graph.nodes)

    @property
    def unknown_flop(self) -> float:
        """Operations of ops that are not known."""
        return sum(node.flop() for node in self.graph.nodes if node.name in self.unknown)

    @property
    def unknown_share(self) -> float:
        """The share of the step's operations that ops make that are not known."""
        return self.unknown_flop / self.flop if self.flop else 0.0

    def facts(self) -> dict[str, str]:
        """For a person."""
        calls = f"{len(self.graph.nodes)} calls, {self.flop:.4g} FLOP on one device, in {self.seconds:.3g} s"
        ops = ", ".join(f"{name} ({count})" for name, count in Counter(self.unknown.values()).most_common())
        number = f"{len(self.unknown)} of {len(self.graph.nodes)} calls, {self.unknown_share:.2%} of the FLOP"
        facts = {"captured": calls, "not known": f"{number}: {ops}; every device computes them whole" if ops else "none of the calls"}
        if self.measured is not None:
            us, all_us = self.measured.us / 1000, self.measured.all_us / 1000
            facts["costs"] = (
                f"{us:.4g} ms of {all_us:.4g} ms measured, by module, for {self.measured.calls} calls; the others' are counted"
            )
        return facts

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        facts = {"calls": len(self.graph.nodes), "flop": self.flop, "seconds": self.seconds}
        measured = None if self.measured is None else asdict(self.measured)
        return {**facts, "unknown": self.unknown, "unknown_flop_share": self.unknown_share, "measured": measured}


def captured_module(
    module: nn.Module, inputs: Sequence[torch.Tensor], *, name: str, batch_dim: int = 0, splits_images: bool = False
) -> CapturedGraph:
    """A module that returns its loss, captured; its examples stand along dimension `batch_dim` of each input.

    Raises CaptureError, and what captured_graph raises.
    """
    started = time.perf_counter()
    captured = captured_graph(forward_graph(module, inputs, name), batch_dim=batch_dim, splits_images=splits_images)
    batch = next((x.shape[batch_dim] for x in inputs if x.dim() > batch_dim), None)
    if batch is None:
        raise CaptureError(f"{name} is given no tensor with dimension {batch_dim}, along which its examples would stand")
    return replace(captured, batch=batch, seconds=time.perf_counter() - started)


def forward_graph(module: nn.Module, inputs: Sequence[torch.Tensor], name: str = "model") -> ForwardGraph:
    """The forward graph of a module that returns its scalar loss; nothing of the module is changed.

    Raises CaptureError where forward can't be captured, or returns something else.
    """
    with warnings.catch_warnings(), lstm_states_as_they_are():
        warnings.simplefilter("ignore")  # of nn.LSTM's list of its own weights, among others
        try:
            program = torch.export.export(module, tuple(inputs), strict=False)
        except Exception as e:  # noqa: BLE001 - whatever the user's forward raises
            raise not_capturable(f"the forward of {name}", e) from e
    signature = program.graph_signature
    targets = {kind: {s.arg.name: s.target for s in signature.input_specs if s.kind == kind} for kind in InputKind}
    graph = ForwardGraph(
        name=name,
        program=program,
        parameters=_first_names(targets[InputKind.PARAMETER], dict(module.named_parameters(remove_duplicate=False))),
        buffers=_first_names(targets[InputKind.BUFFER], dict(module.named_buffers(remove_duplicate=False))),
        constants={own: program.constants[target] for own, target in targets[InputKind.CONSTANT_TENSOR].items()},
        inputs=tuple(targets[InputKind.USER_INPUT]),
    )
    if len(signature.output_specs) != 1 or not _is_scalar(graph.loss):
        raise CaptureError(f"the forward of {name} does not return one scalar loss; wrap the model with its loss")
    return graph


def _first_names(targets: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Each placeholder's tensor by the first of its names."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {own: first[id(tensors[target])] for own, target in targets.items()}


def _is_scalar(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def captured_graph(forward: ForwardGraph, *, batch_dim: int = 0, splits_images: bool = False) -> CapturedGraph:
    """The shard graph of a forward graph. Dimension `batch_dim` of an input is called batch, or its first one where it has not so many.

    Raises ShardError where there is nothing to shard.
    """
    walk = _Walk(forward, Rules(splits_images=splits_images), batch_dim)
    for node in forward.nodes:
        walk.visit(node)
    graph = ShardGraph(forward.name, tuple(walk.nodes), tuple(walk.edges), tuple(tuple(t) for t in walk.ties.values() if len(t) > 1))
    return CapturedGraph(forward, graph, walk.reads, walk.unknown)


@dataclass
class _Walk:
    forward: ForwardGraph
    rules: Rules
    batch_dim: int
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    reads: dict[str, tuple[tuple[str, Tensor], ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    """FX node -> its Value; a list of them where it writes several tensors."""
    made: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)
    """FX node -> the shard node that writes it, and which of its outputs it is; a parameter: the call that read it last."""
    ties: dict[int, list[int]] = field(default_factory=dict)
    """The calls of a layer, by its first one."""
    layers: dict[int, int] = field(default_factory=dict)
    """A call -> the first call of its layer."""
    prepared: dict[fx.Node, bool] = field(default_factory=dict)
    """A value that every device has, or makes for itself -> True if it depends on the step's inputs."""

    def __post_init__(self) -> None:
        calls = self.forward.nodes
        uses = Counter(read for node in calls for read in node.all_input_nodes)
        for node in self.forward.program.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                weight, shape = node.name in self.forward.parameters, tuple(value.shape)
                of_weight = ("units", "in_units")[: len(shape)] if len(shape) <= 2 else tuple(f"dim{i}" for i in range(len(shape)))
                names = of_weight if weight else self._names(value)
                self.values[node] = Value(node, shape, names, weight, weight and value.requires_grad, max(uses[node], 1))
                if not weight:
                    self.prepared[node] = node.name in self.forward.inputs

    def _names(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """Names of an input's dimensions."""
        shape, flat = tuple(tensor.shape), "features" if tensor.is_floating_point() else "sequence"
        place = self.batch_dim if self.batch_dim < len(shape) else 0
        rest = ("channels", "height", "width") if len(shape) == 4 else (flat,) if len(shape) == 2 else ("sequence", "features")
        names = iter(rest if len(shape) - 1 == len(rest) else [f"dim{i}" for i in range(1, len(shape))])
        return tuple("batch" if i == place else next(names) for i in range(len(shape)))

    def visit(self, node: fx.Node) -> None:
        """Add a call to the graph."""
        if node.target is operator.getitem:
            source, place = argument_at(node, 0), argument_at(node, 1)
            self.values[node] = replace(self.values[source][place], source=node)
            self.made[node] = (self.made[source][0], place)
            if source in self.prepared:
                self.prepared[node] = self.prepared[source]
            return
        written = _tensors(node.meta.get("val"))
        if not written:
            return
        operands = [self.values[read] for read in node.all_input_nodes if read in self.values and not only_shape_is_read(node)]
        gradient = name_of(node) != "detach" and any(o.gradient for o in operands)
        loops = Loops(self._arguments(node), [tuple(t.shape) for t in written], self.rules, gradient=gradient)
        if not gradient and all(o.source in self.prepared for o in operands):
            from_input = any(self.prepared[o.source] for o in operands)
            if not from_input or not any(t.is_floating_point() for t in written):
                self.prepared[node] = from_input
        if node in self.prepared:
            _whole(loops, PREPARED, operands, sum(prod(shape) for shape in loops.shapes))
        elif not _described(node, loops, operands):
            self.unknown[node.name] = name_of(node)
            loops = Loops(loops.arguments, loops.shapes, self.rules, gradient=gradient)
            _whole(loops, UNKNOWN, operands, _flop_of(node, loops.shapes, gradient=gradient))
        self._add(node, loops, [gradient and t.is_floating_point() for t in written])

    def _add(self, node: fx.Node, loops: Loops, gradients: Sequence[bool]) -> None:
        """Add the node, its edges, and what it writes."""
        index = len(self.nodes)
        before = [self.made[r.value.source][0] for r in loops.reads if r.value.weight and r.value.source in self.made]
        alike = [self.layers[v] for v in before if _form(self.nodes[v].op, self.nodes[v].axes) == _form(loops.op, loops.axes)]
        self.layers[index] = alike[0] if alike else index
        self.ties.setdefault(self.layers[index], []).append(index)
        inputs: list[Tensor] = []
        weights: list[Tensor] = []
        outputs = [w.tensor for w in loops.writes]
        for read in _once(loops.reads):
            source = read.value.source
            if read.value.weight and source not in self.made:
                weights.append(read.tensor)
            else:
                if source in self.made and source not in self.prepared:
                    self.edges.append(Edge(self.made[source][0], index, self.made[source][1], len(inputs)))
                inputs.append(read.tensor)
            if read.value.weight and read.value.uses > 1:
                self.made[source] = (index, len(outputs))
                outputs.append(read.tensor)
        self.reads[node.name] = tuple((r.value.source.name, r.tensor) for r in loops.reads)
        tensors = tuple(inputs), tuple(outputs)
        passed = len(outputs) - len(loops.writes)
        self.nodes.append(Node(node.name, loops.op, tuple(loops.axes), *tensors, tuple(loops.terms), tuple(weights), passed=passed))
        values = [Value(node, s, w.names, gradient=g) for w, s, g in zip(loops.writes, loops.shapes, gradients, strict=True)]
        self.values[node] = values[0] if isinstance(node.meta["val"], torch.Tensor) else values
        self.made[node] = (index, 0)

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        """The call's arguments by their names in the schema, tensors as values, defaults included."""
        arguments = {name: self._argument(value) for name, value in arguments_by_name(node).items()}
        return arguments | ({"transposed": True} if name_of(node).startswith("conv_transpose") else {})

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.values.get(value)
        return [self._argument(v) for v in value] if isinstance(value, list | tuple) else value


def _form(op: str, axes: Sequence[Axis]) -> tuple[str, list[tuple[int, bool]]]:
    """The form of a call, which all calls of a layer have in common."""
    return op, [(axis.size, axis.splits) for axis in axes]


def _described(node: fx.Node, loops: Loops, operands: Sequence[Value]) -> bool:
    """Apply the op's rule; True if it says all about the call: what each operand is to it, except for view_as and the like."""
    rule = rule_of(node)
    if rule is None:
        return False
    try:
        rule(loops)
    except UnknownFormError:
        return False
    read = {r.value.source for r in loops.reads}
    by_shape = name_of(node).endswith("_as")
    return len(loops.writes) == len(loops.shapes) and (by_shape or all(o.source in read for o in operands))


def _whole(loops: Loops, op: str, operands: Sequence[Value], flop: float) -> None:
    """Describe a call that every device makes on whole tensors."""
    loops.op = op
    loops.compute(flop, [])
    for value in operands:
        loops.read(value, [None] * len(value.shape))
    for shape in loops.shapes:
        names = next((o.names for o in operands if len(o.shape) == len(shape)), None)
        loops.write([None] * len(shape), names)


def _flop_of(node: fx.Node, shapes: Sequence[tuple[int, ...]], *, gradient: bool) -> float:
    """Operations that torch counts for the call, and one for each number that is written; with twice as many backward."""
    counted = 0
    fakes = _tensors(node.meta.get("val"))
    mode = getattr(fakes[0], "fake_mode", None)
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if mode is not None:
        with contextlib.suppress(Exception), mode, FlopCounterMode(display=False) as counter:
            op_of(node)(*arguments[0], **arguments[1])
            counted = counter.get_total_flops()
    return (3.0 if gradient else 1.0) * (counted + sum(map(prod, shapes)))


def _tensors(value: Any) -> list[torch.Tensor]:
    found = list(value) if isinstance(value, list | tuple) else [value]
    return [t for t in found if isinstance(t, torch.Tensor)]


def _once(reads: Sequence[Read]) -> list[Read]:
    """The reads, a parameter's only once."""
    first = {r.value.source: r for r in reversed(reads) if r.value.weight}
    return [r for r in reads if not r.value.weight or first[r.value.source] is r]


def rule_of(node: fx.Node) -> Rule | None:
    """The rule that describes the call; None if there is none."""
    namespace, name = parts_of(node)
    if namespace == "baechi":
        return _OWN.get(name)
    if namespace != "aten":
        return None
    if name in _BY_NAME and not (name in ("max", "min") and len(node.all_input_nodes) > 1):
        return _BY_NAME[name]
    return arithmetic.elementwise if is_pointwise(node) else None


def only_shape_is_read(node: fx.Node) -> bool:
    """True if the call makes a tensor like another one, but not from its numbers."""
    name = name_of(node)
    return name.startswith("new_") or name in ("zeros_like", "ones_like", "full_like", "empty_like")
