"""A captured step with a device on every node: variables live where their ops run, inputs where the plan has them.

No node is renamed. A variable's placeholder becomes its VarHandleOp, an input's the reading of a variable; what is added besides stands in
a scope of its own. Any session whose devices have the names used here can run it.

Sums of three tensors and more are added up pair by pair. TensorFlow's AddN begins with whichever input nobody else holds, to write the
sum over it, and a tensor is held while it is sent to another device, and for a moment by the call that brought it from there: the same
plan would round differently from step to step.
"""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

from baechi_ext.capture.tensorflow_cleanup import is_wait, producer
from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.errors import PlanError

SCOPE = "baechi_placed"
"""No layer is called so."""
UNORDERED = frozenset({"Const", "Placeholder", "NoOp", "VarHandleOp"})
"""Ops that take no time, so that no order is needed, or that the executor starts before all others."""
_PAIR = 2
_graphs = itertools.count()


@dataclass(frozen=True, slots=True)
class PlacedVariable:
    """A variable or an input on a device, and how to reach it: tensor and op names."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    device: int
    value: str
    """The tensor that is fed to `assign`."""
    assign: str
    read: str
    destroy: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * int(tensorflow().dtypes.as_dtype(self.dtype).size)


@dataclass(frozen=True, slots=True)
class PlacedGraph:
    """A graph to run: `graph_def`, and the names of what to feed, fetch and run in it."""

    graph_def: Any
    devices: tuple[str, ...]
    inputs: tuple[PlacedVariable, ...]
    """Where the step's inputs are kept."""
    fetches: tuple[str, ...]
    targets: tuple[str, ...]
    variables: tuple[PlacedVariable, ...]
    op_of: Mapping[str, str]
    """Node name -> the op of the plan it belongs to."""


def placed_graph(
    captured: CapturedFunction, placement: Mapping[str, int], devices: Sequence[str], *, order: Sequence[str] | None = None
) -> PlacedGraph:
    """The captured step with op o on `devices[placement[o]]`.

    The ops of each device run one after the other, held by control edges to `order`: all ops in a topological order, by default as they
    were captured. Raises PlanError where an op has no device, or a variable's ops have several.
    """
    return _Builder(captured, placement, tuple(devices)).build(captured.nodes if order is None else order)


class _Builder:
    def __init__(self, captured: CapturedFunction, placement: Mapping[str, int], devices: tuple[str, ...]) -> None:
        self.tf = tensorflow()
        self.captured = captured
        self.devices = devices
        self.device_of: dict[str, int] = {}
        self.op_of: dict[str, str] = {}
        for op, names in captured.nodes.items():
            device = placement.get(op)
            if device is None or not 0 <= device < len(devices):
                raise PlanError(f"op {op!r} is on device {device!r}; expected one of the {len(devices)} devices")
            self.device_of |= dict.fromkeys(names, device)
            self.op_of |= dict.fromkeys(names, op)
        self.graph_def = self.tf.compat.v1.GraphDef()
        self.graph_def.CopyFrom(captured.graph_def)
        self.nodes = {node.name: node for node in self.graph_def.node}
        self.members = {op: list(names) for op, names in captured.nodes.items()}
        """Each op's nodes, each after those that it reads."""
        self.readers: dict[str, list[str]] = {v.placeholder: [] for v in captured.variables}
        for node in self.graph_def.node:
            for source in map(producer, node.input):
                if source in self.readers:
                    self.readers[source].append(node.name)
        self.container = f"{SCOPE}-{os.getpid()}-{next(_graphs)}"
        """So that sessions of one server share no variable by chance."""

    def build(self, order: Iterable[str]) -> PlacedGraph:
        variables = tuple(self._variable(i, v) for i, v in enumerate(self.captured.variables))
        inputs = tuple(self._input(i, name) for i, name in enumerate(self.captured.inputs))
        for name, device in self.device_of.items():
            self.nodes[name].device = self.devices[device]
            self.nodes[name].attr.pop("_class", None)  # colocation was turned into the placement
        stray = next((node.name for node in self.graph_def.node if not node.device), None)
        if stray is not None:
            raise PlanError(f"node {stray!r} belongs to no op of the graph; capture the step again")
        for node in list(self.graph_def.node):
            if node.op == "AddN" and len(node.input) > _PAIR and node.attr["T"].type != self.tf.variant.as_datatype_enum:
                self._add_in_pairs(node)
        self._chain(order)
        return PlacedGraph(
            self.graph_def, self.devices, inputs, self.captured.outputs, self.captured.targets, variables, MappingProxyType(self.op_of)
        )

    def _variable(self, index: int, variable: Any) -> PlacedVariable:
        """Its placeholder becomes its VarHandleOp, where its readers and writers are."""
        name = variable.placeholder
        at = sorted({self.device_of[reader] for reader in self.readers[name]})
        if len(at) > 1:
            raise PlanError(f"the ops of variable {variable.shared_name!r} are on devices {at}; put them on one")
        node = self.nodes[name]
        node.Clear()
        node.name = name
        device = at[0] if at else 0
        return self._resource(node, variable.shared_name, (variable.dtype, variable.shape), device, f"{SCOPE}/variable/{index}")

    def _input(self, index: int, tensor: str) -> PlacedVariable:
        """Its placeholder becomes the reading of a variable, so that it need not come from the client in every step."""
        name = producer(tensor)
        node, device = self.nodes[name], self.device_of[name]
        dtype = self.tf.dtypes.as_dtype(node.attr["dtype"].type)
        shape = self.tf.TensorShape(node.attr["shape"].shape)
        scope = f"{SCOPE}/input/{index}"
        handle = self._add("VarHandleOp", f"{scope}/handle", device)
        node.Clear()
        node.name, node.op = name, "ReadVariableOp"
        node.input.append(handle.name)
        node.attr["dtype"].type = dtype.as_datatype_enum
        return self._resource(handle, name, (dtype, shape), device, scope)

    def _add_in_pairs(self, node: Any) -> None:
        """Turns an AddN of tensors into binary sums, which are the same whichever side is written over. The last one keeps its name."""
        terms, waits = [i for i in node.input if not is_wait(i)], [i for i in node.input if is_wait(i)]
        op, device = self.op_of[node.name], self.device_of[node.name]
        so_far = terms[0]
        for i, term in enumerate(terms[1:-1]):
            partial = self._add("AddV2", f"{SCOPE}/sum/{node.name}/{i}", device, so_far, term)
            partial.attr["T"].CopyFrom(node.attr["T"])
            self.nodes[partial.name] = partial
            self.members[op].insert(-1, partial.name)
            self.op_of[partial.name], self.device_of[partial.name] = op, device
            so_far = partial.name
        node.op = "AddV2"
        del node.attr["N"]
        del node.input[:]
        node.input.extend([so_far, terms[-1], *waits])

    def _resource(self, handle: Any, name: str, kind: tuple[Any, Any], device: int, scope: str) -> PlacedVariable:
        """Makes `handle` a variable's, with what sets, reads and frees it."""
        tf = self.tf
        dtype, shape = tf.dtypes.as_dtype(kind[0]), tf.TensorShape(kind[1])
        handle.op, handle.device = "VarHandleOp", self.devices[device]
        handle.attr["shape"].shape.CopyFrom(shape.as_proto())
        handle.attr["container"].s = self.container.encode()
        handle.attr["shared_name"].s = f"{scope}/{name}".encode()
        value = self._add("Placeholder", f"{scope}/value", device)
        value.attr["shape"].shape.CopyFrom(shape.as_proto())
        assign = self._add("AssignVariableOp", f"{scope}/assign", device, handle.name, value.name)
        read = self._add("ReadVariableOp", f"{scope}/read", device, handle.name)
        for node in (handle, value, assign, read):
            node.attr["dtype"].type = dtype.as_datatype_enum
        destroy = self._add("DestroyResourceOp", f"{scope}/destroy", device, handle.name)
        return PlacedVariable(
            name, dtype.as_datatype_enum, tuple(shape.as_list()), device, f"{value.name}:0", assign.name, f"{read.name}:0", destroy.name
        )

    def _add(self, op: str, name: str, device: int, *inputs: str) -> Any:
        return self.graph_def.node.add(op=op, name=name, device=self.devices[device], input=inputs)

    def _chain(self, order: Iterable[str]) -> None:
        last: dict[int, str] = {}
        for op in order:
            for name in self.members[op]:
                node, device = self.nodes[name], self.device_of[name]
                if node.op in UNORDERED:
                    continue
                if device in last:
                    node.input.append(f"^{last[device]}")
                last[device] = name
