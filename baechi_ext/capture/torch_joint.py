"""Capture of a PyTorch training step as one operator graph: AOTAutograd's joint forward+backward graph, then one update op per parameter.

What becomes an op: every aten call that computes something. Views and tuple elements are not ops: they are made on the reading
device from the storage they look at, so a tensor of the graph is a storage, sent once and counted once. Parameters and buffers are
not tensors either: their readers, gradient and update share one colocation group and use them in place.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from baechi_ext.capture.groups import Groups
from baechi_ext.capture.module_names import known_model, module_of, noting_modules
from baechi_ext.capture.parts import Parts
from baechi_ext.capture.torch_private import descriptors, draws, joint_graph, moved_to
from baechi_ext.capture.why_not import tracing
from baechi_ext.errors import CaptureError
from baechi_ext.ir.hints import with_experts
from baechi_ext.ir.op_graph import Op, OpGraph

if TYPE_CHECKING:
    import torch
    from torch import fx

INPUT, UPDATE = "input", "update"
OP_ID, PART, ROWS = "baechi_op", "baechi_part", "baechi_rows"
"""Marks of nodes: the id of their op, the part of the batch that they compute, and of an input, the rows that it reads."""
ORDER = "order"
"""The name of a tensor that moves nothing: its reader only waits."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Options for what is not in the step's module: the optimizer; and which ops have to share a device."""

    optimizer: str = "sgd"
    optimizer_slots: int = 0
    """State tensors the optimizer keeps per parameter: 0 plain SGD, 1 momentum, 2 Adam."""
    colocate_grads_with_ops: bool = False
    relaxed_random: bool = False
    """Free seeded ops (dropout) of their common device and order; they then draw other numbers than the unplaced step."""
    batch_norm_per_part: bool = False
    """BatchNorm may normalise over each part of a call's batch by itself."""
    device: str = "cpu"
    """The kind of device that will run the ops: torch chooses kernels by it while it traces."""


@dataclass(frozen=True, slots=True)
class BoundOp:
    """Says how to run one op. At most one of `node`, `input_index`, `state`, `parameters`, `input_gradient`, `outputs` and `tangents` is
    set: none where nothing is returned."""

    node: "fx.Node | None" = None
    """An aten call."""
    input_index: int | None = None
    """A plain input of the step; a negative index is the tangent of the loss (ones)."""
    rows: tuple[int, int, int] | None = None
    """With `input_index`: the dimension along which only a part of the input is read, where that begins, and its length; None: all."""
    state: str | None = None
    """The parameter or buffer that others read as this op's tensor."""
    parameters: tuple[str, ...] = ()
    """An update, or the handing over of a gradient: the names of one parameter, several where it is tied."""
    gradients: "tuple[fx.Node, ...]" = ()
    """An update: the gradient node of each name. With `input_gradient`: that gradient's node."""
    input_gradient: int | None = None
    """The handing over of the gradient of this input."""
    outputs: "tuple[fx.Node, ...]" = ()
    """The end of a module's forward pass: what it returns."""
    tangents: "tuple[fx.Node, ...]" = ()
    """The begin of a module's backward pass: the gradients that come in, one for each output that has one."""
    views: "tuple[fx.Node, ...]" = ()
    """Views the op reads, each after what it looks at; made on the op's device when first needed there."""


@dataclass(frozen=True)
class Binding:
    """`ops[v]` belongs to `graph.ops[v]`."""

    ops: tuple[BoundOp, ...]
    home: "Mapping[fx.Node, tuple[int, str]]"
    """A node that owns its storage -> (its op, the tensor's name in the graph)."""
    state_nodes: "Mapping[fx.Node, str]"
    """Placeholder -> parameter or buffer name."""
    constants: "Mapping[fx.Node, torch.Tensor]"
    buffer_writes: "Mapping[int, tuple[tuple[str, fx.Node], ...]]"
    """Op -> the buffers whose new value it computes."""
    loss: "fx.Node | None"
    """None where a module was captured without its loss."""
    loss_op: int
    """-1 where there is no loss."""
    seeded_ops: tuple[int, ...]
    state_reader: Mapping[str, int]
    """Parameter or buffer -> the first op that reads it; all its readers run on one device, where it lives."""
    state_names: Mapping[str, str]
    """Every parameter or buffer name -> the first name of the same one (differs for tied weights)."""
    parts: Parts | None = None
    """The parts of the batch that have ops of their own; None: it is captured as a whole."""
    joint: "fx.GraphModule | None" = None
    """The step as it was traced, of which its graph over other parts can be made."""


def capture_joint(
    module: "torch.nn.Module", inputs: "Sequence[torch.Tensor]", options: CaptureOptions, name: str = ""
) -> tuple[OpGraph, Binding]:
    """The costless op graph of one training step of `module`, which must return the loss, and the binding to run it.

    Ops know the innermost module that they come from; names are those of `module`, or of its submodule `baechi_model` where it has
    such an attribute.

    Where the module has a method `expert_device(parameter name) -> device index or None`, the ops get expert hints from it.

    The module is left as it is: no parameter, buffer or random state changes. Raises CaptureError with the framework's reason,
    MissingBackendError with a release of torch that lacks what capturing uses.
    """
    joint = export(module, inputs, options.device)
    graph, binding = _Builder(Owner.of(module), _Nodes.of(joint), options).build(name)
    return graph, replace(binding, joint=joint)


def export(module: "torch.nn.Module", inputs: "Sequence[torch.Tensor]", device: str = "cpu") -> "fx.GraphModule":
    """AOTAutograd's joint graph of `module(*inputs)` and its backward pass on that kind of device; raises as `capture_joint` does."""
    if device != "cpu":
        module, inputs = moved_to(module, inputs, device)
    with tracing(f"the training step of {type(module).__name__}"), noting_modules(known_model(module)[0]):
        return joint_graph(module, inputs)


def _is_view(node: "fx.Node") -> bool:
    """True if the node only looks at its first argument's storage."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return False
    looks = all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return looks or schema.name == "aten::_unsafe_view"


@dataclass(frozen=True)
class _Nodes:
    """The joint graph, told apart: placeholders by what they stand for, outputs by what they mean."""

    state: "dict[fx.Node, str]"
    plain: "dict[fx.Node, int]"
    calls: "list[fx.Node]"
    constants: "dict[fx.Node, torch.Tensor]"
    outputs: "list[fx.Node]"
    tangents: "dict[int, fx.Node]"
    """Output -> the placeholder of its gradient."""
    gradients: "dict[str, fx.Node]"
    input_gradients: "dict[int, fx.Node]"
    buffer_values: "dict[str, fx.Node]"

    @classmethod
    def of(cls, module: "fx.GraphModule", state_args: Mapping[int, str] | None = None) -> "_Nodes":
        """`state_args`: the plain inputs that are parameters and buffers, by number, with their names."""
        d, state_args = descriptors(), state_args or {}
        _drop_detached(module)
        state, plain, constants, calls = {}, {}, {}, []
        gradients, input_gradients, buffer_values, outputs, tangents = {}, {}, {}, [], {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                match node.meta["desc"]:
                    case d.ParamAOTInput(target=target) | d.BufferAOTInput(target=target):
                        state[node] = target
                    case d.PlainAOTInput(idx=idx) if idx in state_args:
                        state[node] = state_args[idx]
                    case d.PlainAOTInput(idx=idx):
                        plain[node] = idx
                    case d.TangentAOTInput(output=d.PlainAOTOutput(idx=idx)):
                        tangents[idx] = node
                    case d.TangentAOTInput(output=d.InputMutationAOTOutput()):
                        raise CaptureError("forward changes a parameter in place, or an input that needs a gradient; do so before the call")
                    case other:
                        raise CaptureError(f"the step takes an input of an unknown kind, {other!r}; pass plain tensors")
            elif node.op == "get_attr":
                constants[node] = getattr(module, node.target)
            elif node.op == "call_function":
                calls.append(node)
            elif node.op == "output":
                for value, desc in zip(node.args[0], node.meta["desc"], strict=True):
                    match desc:
                        case d.InputMutationAOTOutput(mutated_input=d.BufferAOTInput(target=target)):
                            buffer_values[target] = value
                        case d.InputMutationAOTOutput(mutated_input=d.PlainAOTInput(idx=idx)) if idx in state_args:
                            buffer_values[state_args[idx]] = value
                        case d.InputMutationAOTOutput():
                            raise CaptureError("the step changes one of its inputs in place; copy the input first (x = x.clone())")
                        case d.PlainAOTOutput():
                            outputs.append(value)
                        case d.GradAOTOutput(grad_of=d.ParamAOTInput(target=target)) if value is not None:
                            gradients[target] = value
                        case d.GradAOTOutput(grad_of=d.PlainAOTInput(idx=idx)) if value is not None and idx in state_args:
                            gradients[state_args[idx]] = value
                        case d.GradAOTOutput(grad_of=d.PlainAOTInput(idx=idx)) if value is not None:
                            input_gradients[idx] = value
        return cls(state, plain, calls, constants, outputs, tangents, gradients, input_gradients, buffer_values)

    @property
    def loss(self) -> "fx.Node":
        if len(self.outputs) != 1 or self.outputs[0].meta["val"].numel() != 1:
            raise CaptureError(f"the step returns {len(self.outputs)} tensors instead of one scalar loss; wrap the model with its loss")
        return self.outputs[0]


def _drop_detached(module: "fx.GraphModule") -> None:
    """Replaces detach and alias, which compute nothing, by their argument and drops what nobody reads, and notes for profilers."""
    import torch

    silent = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in silent:
            node.replace_all_uses_with(node.args[0])
    for node in reversed(list(module.graph.nodes)):
        if str(node.target).startswith("profiler.") and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


@dataclass(frozen=True)
class Owner:
    """Names of a step's parameters, buffers and modules."""

    state: "Mapping[str, torch.Tensor]"
    """By every name that they have."""
    modules: "Mapping[str, str]"
    """The class of each, by its name."""
    prefix: str = ""
    """The start of the names of the model's own parameters."""
    expert_device: "Callable[[str], int | None] | None" = None

    @classmethod
    def of(cls, module: "torch.nn.Module") -> "Owner":
        model, prefix = known_model(module)
        state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        classes = {name: type(part).__name__ for name, part in model.named_modules() if name}
        return cls(state, classes, prefix, getattr(module, "expert_device", None))


class _Builder:
    """Turns the nodes into ops, edges and colocation groups."""

    def __init__(self, owner: Owner, nodes: _Nodes, options: CaptureOptions) -> None:
        self.nodes = nodes
        self.options = options
        self.expert_device, self.prefix, self.modules, self.state = owner.expert_device, owner.prefix, owner.modules, owner.state
        self.id_prefix = ""
        """The start of the ids of ops."""
        first: dict[int, str] = {}
        self.state_names = {name: first.setdefault(id(value), name) for name, value in self.state.items()}
        self.groups = Groups()
        self.ops: list[Op] = []
        self.bound: list[BoundOp] = []
        self.ancestors: list[int] = []
        """Per op, a bit set of the ops before it; complete once its last in-edge is there, as ops are added in topological order."""
        self.edges: list[tuple[str, str, int, str]] = []
        self.home: dict[fx.Node, tuple[int, str]] = {}
        self.tensor_bytes: dict[tuple[int, str], int] = {}
        self.state_readers: dict[str, list[int]] = {}
        self.seeded: list[int] = []
        self.forward_of_seq: dict[int, int] = {}

    def build(self, name: str) -> tuple[OpGraph, Binding]:
        loss = self.nodes.loss
        for node, index in self.nodes.plain.items():
            if node.users:
                self._add_input(node, index)
        for node in self.nodes.tangents.values():
            if node.users:
                self._add_input(node, -1)
        for node in self.nodes.calls:
            if node.target is not operator.getitem and not _is_view(node):
                self._add_call(node)
        for parameter in dict.fromkeys(self.state_names[p] for p in self.nodes.gradients):
            self._add_update(parameter)
        base = self._base(loss)
        if not isinstance(base, tuple):
            raise CaptureError("the loss is not a computed tensor; return one that is computed from the inputs and parameters")
        return self._finish(name, (loss, base[0]))

    def _finish(self, name: str, loss: "tuple[fx.Node | None, int]") -> tuple[OpGraph, Binding]:
        writes = self._bind_buffer_writes()
        self._order_seeded_ops()
        graph = OpGraph.from_edges(self.groups.labelled(self.ops), self.edges, name=name, framework="torch")
        graph = replace(graph, modules=tuple(self.modules), classes=tuple(self.modules.values()))
        graph = with_experts(graph, self._expert_hints(self.expert_device)) if self.expert_device is not None else graph
        binding = Binding(
            ops=tuple(self.bound),
            home=self.home,
            state_nodes={n: self.state_names[s] for n, s in self.nodes.state.items()},
            constants=self.nodes.constants,
            buffer_writes=writes,
            loss=loss[0],
            loss_op=loss[1],
            seeded_ops=tuple(self.seeded),
            state_reader={name: readers[0] for name, readers in self.state_readers.items()},
            state_names=self.state_names,
        )
        return graph, binding

    def _add(self, op: Op, bound: BoundOp) -> int:
        part = None if bound.node is None else bound.node.meta.get(PART)
        self.ops.append(op if part is None else replace(op, part=part))
        self.bound.append(bound)
        self.ancestors.append(0)
        return len(self.ops) - 1

    def _add_input(self, node: "fx.Node", index: int) -> None:
        part, size = node.meta.get(PART), _bytes(node.meta["val"])
        id_ = f"{INPUT}_{index}" if index >= 0 else f"tangent_{-index - 1}"
        id_ = id_ if part is None else f"{id_}@{part}"
        v = self._add(Op(id_, INPUT, output_bytes=size, part=part), BoundOp(input_index=index, rows=node.meta.get(ROWS)))
        self._own(node, v, "0")

    def _own(self, node: "fx.Node", v: int, element: str) -> None:
        tensor = f"{self.ops[v].id}:{element}"
        self.home[node] = (v, tensor)
        self.tensor_bytes[v, tensor] = _bytes(node.meta["val"])

    def _add_call(self, node: "fx.Node") -> None:
        backward = node.meta.get("autograd_backward") or node.meta.get("partitioner_tag") == "is_backward"
        phase = "backward" if backward else "forward"
        seq = node.meta.get("seq_nr")
        forward = None
        if seq is not None and phase == "forward":
            self.forward_of_seq.setdefault(seq, len(self.ops))
        elif seq is not None:
            forward = self.forward_of_seq.get(seq)
        value = node.meta.setdefault("val", None)  # which an op that returns nothing has not, such as the checks in one_hot
        elements = list(value) if isinstance(value, (tuple, list)) else [value]
        op = Op(
            id=self._id(node),
            op=getattr(node.target, "__name__", "") if isinstance(node.target, FunctionType) else str(node.target).removesuffix(".default"),
            phase=phase,
            output_bytes=sum(_bytes(e) for e in elements),
            persistent_bytes=0,
            forward_op=None if forward is None else self.ops[forward].id,
            module=module_of(node),
        )
        v = self._add(op, BoundOp(node=node, views=self._views(node.all_input_nodes)))
        if isinstance(value, (tuple, list)):
            for user in node.users:
                if user.target is operator.getitem:
                    self._own(user, v, str(user.args[1]))
        else:
            self._own(node, v, "0")
        for read in node.all_input_nodes:
            self._read(read, v)
        if self.options.colocate_grads_with_ops and forward is not None:
            self.groups.join(v, forward)
        if draws(node):
            self.seeded.append(v)

    def _id(self, node: "fx.Node") -> str:
        return f"{self.id_prefix}{node.meta.get(OP_ID, node.name)}"

    def _add_update(self, parameter: str) -> None:
        op = Op(
            id=f"update.{parameter}",
            op=f"optimizer.{self.options.optimizer}",
            phase=UPDATE,
            persistent_bytes=_bytes(self.state[parameter]) * self.options.optimizer_slots,
            module=self._owner(parameter),
        )
        self._order_readers(parameter, self._add_where_it_lives(parameter, op, self.nodes))

    def _order_readers(self, parameter: str, update: int) -> None:
        """The update overwrites the parameter in place, so whoever reads the old value goes first."""
        for reader in self.state_readers.get(parameter, []):
            self._order_after(reader, update)

    def _add_where_it_lives(self, parameter: str, op: Op, nodes: _Nodes, taken_in: Collection[int] = ()) -> int:
        """Adds an op that takes in a parameter's gradients, beside the parameter and the ops that make them, but for those `taken_in`."""
        names = tuple(p for p in nodes.gradients if self.state_names[p] == parameter)
        gradients = tuple(nodes.gradients[p] for p in names)
        readers = self.state_readers.get(parameter, [])
        op = replace(op, forward_op=next((self.ops[r].id for r in readers if self.ops[r].phase == "forward"), None))
        v = self._add(op, BoundOp(parameters=names, gradients=gradients, views=self._views(gradients)))
        self.groups.join(v, parameter)
        for gradient in gradients:
            self._read(gradient, v)
            base = self._base(gradient)
            if isinstance(base, tuple) and base[0] not in taken_in:
                self._keep_together(v, base[0])
        return v

    def _keep_together(self, update: int, maker: int) -> None:
        """A gradient is made where it is taken in."""
        self.groups.join(update, maker)

    def _lives_with_readers(self) -> bool:
        """True if those who read a parameter or buffer are where it lives."""
        return True

    def _owner(self, parameter: str) -> str | None:
        """The name of the module that holds a parameter; None for one that is not the model's."""
        return parameter.removeprefix(self.prefix).rpartition(".")[0] if parameter.startswith(self.prefix) else None

    def _order(self, first: int, second: int) -> None:
        """An edge that moves nothing. Where its ends share a colocation group, it never crosses devices."""
        self._edge(first, second, 0, ORDER)

    def _order_after(self, first: int, v: int) -> None:
        """Op `v` waits for `first`, even where it reads nothing of it."""
        if first != v and not self.ancestors[v] >> first & 1:
            self._order(first, v)

    def _edge(self, source: int, target: int, size: int, tensor: str) -> None:
        self.edges.append((self.ops[source].id, self.ops[target].id, size, tensor))
        self.ancestors[target] |= self.ancestors[source] | 1 << source

    def _base(self, node: "fx.Node") -> "tuple[int, str] | str | None":
        """The owner of the storage a node looks at: a tensor (op, name), a parameter or buffer name, or None for a constant."""
        while node not in self.home:
            if node in self.nodes.state:
                return self.state_names[self.nodes.state[node]]
            if node in self.nodes.constants:
                return None
            node = cast("fx.Node", node.args[0])
        return self.home[node]

    def _views(self, nodes: "Sequence[fx.Node]") -> "tuple[fx.Node, ...]":
        """The views among `nodes` and what they look through, each after its argument."""
        found: dict[fx.Node, None] = {}

        def visit(node: "fx.Node") -> None:
            if node in self.home or node.op != "call_function" or node in found:
                return
            visit(cast("fx.Node", node.args[0]))
            found[node] = None

        for node in nodes:
            visit(node)
        return tuple(found)

    def _read(self, node: "fx.Node", v: int) -> None:
        base = self._base(node)
        if isinstance(base, str):
            if self._lives_with_readers():
                self.groups.join(v, base)
            readers = self.state_readers.setdefault(base, [])
            readers.append(v)
            if len(readers) == 1:
                self._hold(base, v)
        elif base is not None:
            producer, tensor = base
            self._edge(producer, v, self.tensor_bytes[base], tensor)

    def _hold(self, state: str, v: int) -> None:
        """Count a parameter or buffer where op `v` runs."""
        op = self.ops[v]
        self.ops[v] = replace(op, persistent_bytes=op.persistent_bytes + _bytes(self.state[state]))

    def _bind_buffer_writes(self) -> "dict[int, tuple[tuple[str, fx.Node], ...]]":
        writes: dict[int, list[tuple[str, fx.Node]]] = {}
        unread: dict[str, int] = {}
        for name, node in self.nodes.buffer_values.items():
            base = self._base(node)
            if not isinstance(base, tuple):
                raise CaptureError(f"the new value of buffer {name!r} is not a computed tensor; assign buffers from computed values")
            state = self.state_names[name]
            self.groups.join(base[0], state)
            if state not in self.state_readers:
                unread[state] = base[0]
            writes.setdefault(base[0], []).append((state, node))
        for state, writer in unread.items():
            self._hold(state, writer)
        return {v: tuple(w) for v, w in writes.items()}

    def _expert_hints(self, expert_device: "Callable[[str], int | None]") -> list[int | None]:
        """For each op, the module's hint for the first parameter it reads."""
        hints: list[int | None] = [None] * len(self.ops)
        for name, readers in self.state_readers.items():
            device = expert_device(name)
            for v in readers:
                hints[v] = device if hints[v] is None else hints[v]
        return hints

    def _order_seeded_ops(self) -> None:
        if self.options.relaxed_random:
            return
        for a, b in zip(self.seeded, self.seeded[1:], strict=False):
            self.groups.join(a, b)
            self._order(a, b)


def _behind(nodes: "Iterable[fx.Node]", first: "Iterable[fx.Node]") -> "set[fx.Node]":
    """`first`, and all of the nodes, which come in order, that are made of these."""
    found = set(first)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if value is not None and hasattr(value, "numel") else 0
