"""Capture of one call of a PyTorch module as an operator graph: forward and backward pass, without the loss, which stays in the
caller's code, and without the optimizer.

Between the passes stand two ops: `outputs`, which hands over what the module returns, and `tangents`, which takes in the gradients of
that. Behind the backward pass, an op for each parameter hands over its gradient, on the device where the parameter lives.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.torch_joint import Binding, BoundOp, CaptureOptions, _Builder, _bytes, _is_view, _Nodes, export
from baechi_ext.capture.torch_private import as_if_compiled, distributions_unchecked, shapes_of
from baechi_ext.capture.torch_recurrent import recurrent_layers_kept
from baechi_ext.capture.torch_tree import InputLeaf, Leaf, TensorLeaf, Tree, flatten
from baechi_ext.errors import CaptureError
from baechi_ext.ir.op_graph import Op, OpGraph

if TYPE_CHECKING:
    import torch
    from torch import fx

OUTPUTS, TANGENTS, GRADIENT = "outputs", "tangents", "gradient"


@dataclass(frozen=True)
class CapturedCall:
    """A module's call, captured: what `module(*args, **kwargs)` does to the tensors of its arguments."""

    graph: OpGraph
    """Costless."""
    binding: Binding
    returned: Tree
    """What the call returns; its tensors are the graph's outputs, by number."""
    differentiable: tuple[bool, ...]
    """For each output, whether a gradient of it counts."""
    reached_by: Mapping[str | int, frozenset[int]]
    """Parameter (its first name) or input (its number) -> the outputs whose gradients its own gradient is made from."""
    saved_state: tuple[str, ...]
    """Parameters and buffers that the backward pass reads."""
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]


def capture_call(
    module: "torch.nn.Module", inputs: "Sequence[torch.Tensor]", given: Tree, options: CaptureOptions, name: str = ""
) -> CapturedCall:
    """The call `module(*args, **kwargs)`, where `given` is the tree of (args, kwargs) and `inputs` are its tensors; those that require
    a gradient get one.

    The module is left as it is, apart from what its forward assigns to its own attributes. Raises CaptureError with the framework's
    reason; for a module none of whose outputs has a gradient, too.
    """
    import torch

    flat = _flat_module(module, given)
    examples = [x.detach().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    with recurrent_layers_kept(), distributions_unchecked(), as_if_compiled(), torch.enable_grad():
        joint = export(flat, shapes_of(examples))
    nodes = _Nodes.of(joint)
    _require_no_foreign_parameters(module, nodes)
    return _ModuleBuilder(module, nodes, options).capture(name, flat.returned)


def _require_no_foreign_parameters(module: "torch.nn.Module", nodes: _Nodes) -> None:
    for value in nodes.constants.values():
        if value.requires_grad:
            raise CaptureError(
                f"forward of {type(module).__name__} uses a tensor of shape {tuple(value.shape)} that is to be trained and is no parameter "
                "of the module; register it (self.name = nn.Parameter(...), or as a submodule), or pass it as an argument"
            )


def _flat_module(module: "torch.nn.Module", given: Tree) -> Any:
    """The module as one from tensors to tensors, with its own parameters and buffers under their own names."""
    import torch

    class Flat(torch.nn.Module):
        returned: Tree

        def __init__(self) -> None:
            super().__init__()
            for kind in ("_parameters", "_buffers", "_modules"):
                self.__dict__[kind] = module.__dict__[kind]

        def forward(self, *tensors: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
            args, kwargs = given.fill(tensors)
            found, tree = flatten(module(*args, **kwargs), f"what {type(module).__name__} returns")
            state = [*module.parameters(), *module.buffers()]
            position = {id(t): i for i, t in enumerate(tensors)}
            distinct, number = _without_aliases([t for t in found if id(t) not in position], [*tensors, *state])

            def renumbered(leaf: Leaf) -> Leaf:
                if not isinstance(leaf, TensorLeaf):
                    return leaf
                tensor = found[leaf.index]
                return InputLeaf(position[id(tensor)]) if id(tensor) in position else TensorLeaf(number[id(tensor)])

            self.returned = tree.map(renumbered)
            return tuple(distinct)

    Flat.__name__ = type(module).__name__
    flat = Flat()
    flat.training = module.training
    return flat


def _without_aliases(
    outputs: "Sequence[torch.Tensor]", others: "Sequence[torch.Tensor]"
) -> "tuple[list[torch.Tensor], dict[int, int]]":
    """Each output once, those that share memory with another one or with `others` as copies: a gradient belongs to one tensor. And
    where each stands, by its id."""
    memory = {t.untyped_storage()._cdata for t in others}
    distinct = list({id(t): t for t in outputs}.values())
    storages = [t.untyped_storage()._cdata for t in distinct]
    shared = {s for s in storages if storages.count(s) > 1} | memory
    number = {id(t): i for i, t in enumerate(distinct)}
    return [t.clone() if s in shared else t for t, s in zip(distinct, storages, strict=True)], number


class _ModuleBuilder(_Builder):
    """Adds the ops between and behind the passes."""

    def capture(self, name: str, returned: Tree) -> CapturedCall:
        nodes = self.nodes
        if not nodes.tangents:
            raise CaptureError("no output has a gradient, so there is nothing to train; call the module itself")
        forward = self._forward_nodes()
        self._require_unwritten(forward)
        self._add_inputs()
        calls = [n for n in nodes.calls if n.target is not operator.getitem and not _is_view(n)]
        for node in calls:
            if node in forward:
                self._add_call(node)
        self._add_outputs()
        forward_ops = frozenset(range(len(self.ops)))
        tangents = self._add_tangents()
        for node in calls:
            if node not in forward:
                self._add_call(node)
                self._order_behind(tangents)
        for parameter in dict.fromkeys(self.state_names[p] for p in nodes.gradients):
            self._add_gradient(parameter)
            self._order_behind(tangents)
        for index, node in nodes.input_gradients.items():
            v = self._add(
                Op(f"{GRADIENT}.input_{index}", GRADIENT, phase="backward"),
                BoundOp(input_gradient=index, gradients=(node,), views=self._views([node])),
            )
            self._read(node, v)
            self._order_behind(tangents)
        graph, binding = self._finish(name, (None, -1), forward_ops)
        return CapturedCall(
            graph=graph,
            binding=binding,
            returned=returned,
            differentiable=tuple(i in nodes.tangents for i in range(len(nodes.outputs))),
            reached_by=self._reached_by(),
            **self._saved(forward),
        )

    def _forward_nodes(self) -> "set[fx.Node]":
        """What the forward pass computes: the outputs, the buffers' new values, what is kept for the backward pass, and what all these
        come from."""
        behind: set[fx.Node] = set(self.nodes.tangents.values())
        for node in self.nodes.calls:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        kept = [n for n in self.nodes.calls if n.meta.get("partitioner_tag") == "is_forward" and n not in behind]
        return _ancestors([*self.nodes.outputs, *self.nodes.buffer_values.values(), *kept])

    def _require_unwritten(self, forward: "set[fx.Node]") -> None:
        """Forward overwrites buffers, so what backward reads must not be one of those. BatchNorm's backward takes its running averages
        and does not use them."""
        for node in self.nodes.calls:
            if node in forward or "batch_norm_backward" in str(node.target):
                continue
            for read in node.all_input_nodes:
                if self.nodes.state.get(read) in self.nodes.buffer_values:
                    raise CaptureError(
                        f"the backward pass needs the old value of buffer {self.nodes.state[read]!r}, which forward changes; "
                        "let forward use a copy of it (buffer.clone())"
                    )

    def _add_outputs(self) -> None:
        outputs = tuple(self.nodes.outputs)
        v = self._add(Op(OUTPUTS, OUTPUTS), BoundOp(outputs=outputs, views=self._views(outputs)))
        for node in outputs:
            self._read(node, v)

    def _add_tangents(self) -> int:
        tangents = tuple(self.nodes.tangents.values())
        size = sum(_bytes(n.meta["val"]) for n in tangents)
        v = self._add(Op(TANGENTS, TANGENTS, phase="backward", output_bytes=size), BoundOp(tangents=tangents))
        for i, node in self.nodes.tangents.items():
            self._own(node, v, str(i))
        self.groups.join(v, v - 1)
        self._order(v - 1, v)
        return v

    def _order_behind(self, tangents: int) -> None:
        """The op just added waits for the backward pass to begin, even where it reads nothing of it."""
        v = len(self.ops) - 1
        if not self.ancestors[v] >> tangents & 1:
            self._order(tangents, v)

    def _add_gradient(self, parameter: str) -> None:
        """The gradient and what the optimizer keeps stay with the parameter from step to step."""
        names = tuple(p for p in self.nodes.gradients if self.state_names[p] == parameter)
        gradients = tuple(self.nodes.gradients[p] for p in names)
        readers = self.state_readers.get(parameter, [])
        op = Op(
            id=f"{GRADIENT}.{parameter}",
            op=GRADIENT,
            phase="backward",
            persistent_bytes=_bytes(self.state[parameter]) * (1 + self.options.optimizer_slots),
            forward_op=next((self.ops[r].id for r in readers if self.ops[r].phase == "forward"), None),
            module=self._owner(parameter),
        )
        v = self._add(op, BoundOp(parameters=names, gradients=gradients, views=self._views(gradients)))
        self.groups.join(v, parameter)
        for gradient in gradients:
            self._read(gradient, v)
            base = self._base(gradient)
            if isinstance(base, tuple) and base[0] not in self._inputs_and_tangents():
                self.groups.join(v, base[0])

    def _inputs_and_tangents(self) -> set[int]:
        return {v for v, b in enumerate(self.bound) if b.input_index is not None or b.tangents}

    def _reached_by(self) -> dict[str | int, frozenset[int]]:
        found: dict[str | int, frozenset[int]] = {}
        of = {node: i for i, node in self.nodes.tangents.items()}
        outputs_of: dict[fx.Node, frozenset[int]] = {node: frozenset((i,)) for node, i in of.items()}
        for node in self.nodes.calls:
            outputs_of[node] = frozenset().union(*(outputs_of.get(n, frozenset()) for n in node.all_input_nodes))
        for name, node in self.nodes.gradients.items():
            first = self.state_names[name]
            found[first] = found.get(first, frozenset()) | outputs_of.get(node, frozenset())
        return found | {i: outputs_of.get(node, frozenset()) for i, node in self.nodes.input_gradients.items()}

    def _saved(self, forward: "set[fx.Node]") -> dict[str, tuple[Any, ...]]:
        """What the backward pass reads of parameters, inputs and outputs, which nobody may change in between."""
        state, inputs, outputs = {}, {}, {}
        plain = {self.home[n][0]: i for n, i in self.nodes.plain.items() if n in self.home}
        returned = {self._base(n): i for i, n in enumerate(self.nodes.outputs)}
        for node in self.nodes.calls:
            if node in forward:
                continue
            for read in node.all_input_nodes:
                base = self._base(read)
                if isinstance(base, str):
                    state[base] = None
                elif base is not None and base[0] in plain:
                    inputs[plain[base[0]]] = None
                elif base in returned:
                    outputs[returned[base]] = None
        written = {self.state_names[n] for n in self.nodes.buffer_values}
        return {
            "saved_state": tuple(n for n in state if n not in written),
            "saved_inputs": tuple(inputs),
            "saved_outputs": tuple(outputs),
        }


def _ancestors(nodes: "Iterable[fx.Node]") -> "set[fx.Node]":
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
