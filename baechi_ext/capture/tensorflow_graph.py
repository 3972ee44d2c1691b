"""Capture of a TensorFlow training step as one operator graph: what tf.function traces, cleaned.

What becomes an op: every node but constants, which stand beside their readers. A variable is not a tensor: what reads or writes it runs
where it lives, and uses it in place. Variables of a few bytes (a learning rate, a counter of steps) are the exception: what reads such
a one may be anywhere, and gets its value sent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.groups import Groups
from baechi_ext.capture.tensorflow_cleanup import Nodes, clean, is_wait, producer, size_of, stands_beside_readers, tensor_name
from baechi_ext.capture.tensorflow_phases import BACKWARD, FORWARD, UPDATE, ForwardOps, phases
from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.capture.tensorflow_refusals import (
    not_traceable,
    require_placeable,
    require_placeable_inside,
    require_unchanged,
    state_outside,
)
from baechi_ext.capture.tensorflow_source import CapturedVariable, Source, as_traced
from baechi_ext.errors import CaptureError
from baechi_ext.ir.hints import modules_around, with_experts
from baechi_ext.ir.op_graph import Op, OpGraph

if TYPE_CHECKING:
    import tensorflow as tf

INPUT = "input"
ORDER = "order"
"""The name of a tensor that moves nothing: its reader only waits."""
_SENT_BYTES = 16
"""Variables up to this size are sent to their readers; others have their readers come to them."""
_LOOPS = ("While", "StatelessWhile")


@dataclass(frozen=True)
class CapturedFunction:
    """A step as a graph of ops, and what it takes to run it."""

    graph: OpGraph
    """Ops are called as their nodes. Bytes are set, times are not."""
    unplaced: Callable[..., Any]
    """A tf.function of what was traced; called with what it was captured for, it is not traced again."""
    graph_def: "tf.compat.v1.GraphDef"
    """Cleaned, in topological order, without devices. Resources are placeholders."""
    nodes: Mapping[str, tuple[str, ...]]
    """Op -> the nodes of `graph_def` that it stands for. Each is in one, but the placeholders of variables are in none."""
    inputs: tuple[str, ...]
    """Placeholder tensors, in the order of the flattened arguments."""
    outputs: tuple[str, ...]
    """Tensors to fetch, in the order of the flattened results."""
    structured_outputs: Any
    """The step's results, with tensors of the traced graph in place of values."""
    targets: tuple[str, ...]
    """Nodes that have to run besides: assignments and what else changes state."""
    variables: tuple[CapturedVariable, ...]
    kept: bool = False
    """True if what was captured is the trace that the step itself runs, unplaced."""
    notes: tuple[str, ...] = ()
    """Sentences on what is not as fine as it could be."""

    def without_code(self) -> "CapturedFunction":
        """The same, which keeps nothing of the user's own code, and none of the objects that that has; `unplaced` is there if it is a trace
        that the step keeps."""
        return self if self.kept else replace(self, unplaced=_left_out)

    def values(self) -> dict[str, Any]:
        """The variables' values as they are now, arrays by shared name."""
        return {v.shared_name: v.variable.numpy() for v in self.variables}

    def assign(self, values: Mapping[str, Any]) -> None:
        """Gives all variables these values."""
        for v in self.variables:
            v.variable.assign(values[v.shared_name])


def _left_out(*_: Any) -> None:
    raise CaptureError("a step that was captured without its code runs placed alone")


def capture_function(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    wrapped: Callable[..., Any] | None = None,
    expert: Callable[[str], int | None] | None = None,
    name: str = "",
    device_type: str = "CPU",
) -> CapturedFunction:
    """The costless op graph of `function(*inputs)`, a whole training step, and what it takes to run it.

    `inputs` are tf.TensorSpecs or arrays, or nests of these, of fixed shapes; a tf.function is traced again. The step's variables keep
    their values; an optimizer has to have its own before. With `expert` (variable's name -> device or None) ops get hints. Every op must
    have a kernel for `device_type`. Tracing must leave the Python state around the function as it is, or around the one `wrapped` in it.

    Raises CaptureError with the line of the user's code and what to change, MissingBackendError without TensorFlow.
    """
    tf = tensorflow()
    python = getattr(function, "python_function", function)
    what = f"the training step {getattr(python, '__name__', type(python).__name__)}"
    specs = [tf.nest.map_structure(lambda x: _fixed(x, what), argument) for argument in inputs]
    before = state_outside(wrapped or python)
    function = tf.function(python)
    concrete = _traced(function, specs, what)
    require_unchanged(what, before, state_outside(wrapped or python))
    return _captured(function, concrete, what, expert, name, device_type)


def capture_kept_trace(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence["tf.Tensor"], name: str = "", specs: Any = None
) -> CapturedFunction | None:
    """The same of the trace that a tf.function has for a call, or now makes and keeps for it: nothing is traced once more, so what Python
    code does as it is traced it does as often as it would. A trace for tensors of several shapes is captured with those of the call.
    `inputs` are in the order of `tensors`, which are those in the call. With `specs`, arguments that such a trace is for, it makes that.

    None where the trace has other names for parameters. Raises CaptureError.
    """
    what = f"the training step {name}"
    if specs is not None:
        _traced(function, specs, what)
    concrete = _traced(function, args, what, **kwargs)
    own, taken = concrete.function_type, concrete.inputs[: len(concrete.inputs) - len(concrete.captured_inputs)]
    try:
        bound = signature(function.python_function).bind(*args, **kwargs)
        bound.apply_defaults()
        flat = own.unpack_inputs(own.bind(*bound.args, **bound.kwargs))
    except TypeError:  # keyword arguments that are no identifiers have other names in the trace
        return None
    place = {id(tensor): i for i, tensor in enumerate(flat)}
    order = [place[id(tensor)] for tensor in tensors if id(tensor) in place]
    if sorted(order) != list(range(len(taken))):
        return None
    traced = as_traced(concrete, order)
    if all(i.shape.is_fully_defined() for i in taken):
        found = _captured(traced, concrete, what, None, name, "CPU")
        return replace(found, inputs=tuple(found.inputs[i] for i in order), kept=True)
    require_placeable(concrete.graph.get_operations(), concrete.graph, "CPU")  # it knows the lines
    found = _captured(traced, _traced(traced, tensors, what), what, None, name, "CPU")
    return replace(found, structured_outputs=concrete.structured_outputs, kept=True)


def _captured(
    function: Any, concrete: Any, what: str, expert: Callable[[str], int | None] | None, name: str, device_type: str
) -> CapturedFunction:
    """The capture of a concrete function; `function` runs it unplaced."""
    require_placeable(concrete.graph.get_operations(), concrete.graph, device_type)
    source = Source.of(concrete, what)
    if source.graph is not concrete.graph:
        require_placeable(source.operations(), concrete.graph, device_type)
    require_placeable_inside(source.definition.library)
    if not source.outputs and not source.targets():
        raise CaptureError(f"{what} returns no tensor and changes no variable, so there is nothing to compare; let it return the loss")
    kept = (*source.inputs, *(v.placeholder for v in source.variables))
    nodes = clean(Nodes(source.nodes, source.outputs, source.targets(), kept), source.graph)
    graph, members, notes = _Builder(nodes, source).build(name, expert)
    graph_def = tensorflow().compat.v1.GraphDef(library=source.definition.library, versions=source.definition.versions)
    graph_def.node.extend(nodes.by_name.values())
    return CapturedFunction(
        graph=graph,
        unplaced=function,
        graph_def=graph_def,
        nodes=members,
        inputs=tuple(f"{i}:0" for i in source.inputs),
        outputs=nodes.outputs,
        structured_outputs=concrete.structured_outputs,
        targets=nodes.targets,
        variables=source.variables,
        notes=notes,
    )


def _fixed(value: Any, what: str) -> "tf.TensorSpec":
    """The spec of an argument. Raises CaptureError where its shape is not known."""
    tf = tensorflow()
    spec = value if isinstance(value, tf.TensorSpec) else tf.TensorSpec.from_tensor(tf.convert_to_tensor(value))
    if not spec.shape.is_fully_defined():
        raise CaptureError(
            f"an argument of {what} has the shape {spec.shape}, of which a part is unknown; placing needs fixed shapes: give the batch "
            "size, and let data sets drop a smaller last batch (batch(n, drop_remainder=True))"
        )
    return spec


def _traced(function: Any, args: Sequence[Any], what: str, **kwargs: Any) -> Any:
    """The concrete function."""
    try:
        return function.get_concrete_function(*args, **kwargs)
    except CaptureError:
        raise
    except Exception as e:  # noqa: BLE001 - whatever the user's step raises while traced
        raise not_traceable(what, e) from e


class _Builder:
    """Turns the nodes into ops, edges and colocation groups."""

    def __init__(self, nodes: Nodes, source: Source) -> None:
        self.nodes = nodes
        self.source = source
        self.variables = {v.placeholder: v for v in source.variables}
        constants = stands_beside_readers(nodes)
        self.members: dict[str, tuple[str, ...]] = {}
        for name, node in nodes.by_name.items():
            if name not in self.variables and name not in constants:
                own = dict.fromkeys(p for p in map(producer, node.input) if p in constants)
                self.members[name] = (*own, name)
        self.index = {name: v for v, name in enumerate(self.members)}
        sources = [dict.fromkeys(map(producer, nodes.by_name[name].input)) for name in self.members]
        self.touched = [[self.variables[p] for p in found if p in self.variables] for found in sources]
        """The variables whose resources each op takes."""
        self.before = [[self.index[p] for p in found if p in self.index] for found in sources]
        self.groups = Groups()
        self.edges: list[tuple[str, str, int, str]] = []
        self.unknown: dict[str, None] = {}

    def build(self, name: str, expert: Callable[[str], int | None] | None) -> tuple[OpGraph, dict[str, tuple[str, ...]], tuple[str, ...]]:
        for op in self.members:
            self._connect(op)
        for v, variables in enumerate(self.touched):
            for variable in variables:
                self.groups.join(v, variable.shared_name)
        found = phases(
            names=list(self.members),
            types=[self.nodes.by_name[name].op for name in self.members],
            before=self.before,
            states=[[v.shared_name for v in variables] for variables in self.touched],
            outputs=[self.index[p] for p in map(producer, self.nodes.outputs) if p in self.index],
        )
        self._join_slots(found)
        ops = self.groups.labelled(self._ops(found))
        graph = OpGraph.from_edges(ops, self.edges, name=name, framework="tensorflow")
        graph = replace(graph, modules=_with_those_around(op.module for op in ops))
        if expert is not None:
            hints = [next((h for v in found if (h := expert(v.shared_name)) is not None), None) for found in self.touched]
            graph = with_experts(graph, hints)
        return graph, self.members, self._notes()

    def _connect(self, name: str) -> None:
        """The edges into an op. What reads a variable of some size joins its group, and nothing moves."""
        for reference in dict.fromkeys(self.nodes.by_name[name].input):
            p = producer(reference)
            if p not in self.index:
                continue
            if is_wait(reference):
                self.edges.append((p, name, 0, ORDER))
                continue
            home = self._read_in_place(p)
            if home is not None:
                self.groups.join(self.index[name], home)
            tensor = tensor_name(reference)
            self.edges.append((p, name, 0 if home is not None else self._bytes(tensor), tensor))

    def _read_in_place(self, node: str) -> str | None:
        """The variable whose value a node is, if readers come to it."""
        if self.nodes.by_name[node].op != "ReadVariableOp":
            return None
        variable = self.touched[self.index[node]][0]
        return variable.shared_name if _stays(variable) else None

    def _bytes(self, tensor: str) -> int:
        """0 where the size is known only when the step runs, of which is taken note."""
        node, _, output = tensor.rpartition(":")
        value = self.source.operation(node).outputs[int(output)]
        size = size_of(value)
        if size is None and value.dtype != tensorflow().resource:
            self.unknown[node] = None
        return size or 0

    def _join_slots(self, found: Sequence[str]) -> None:
        """Joins a variable with what an optimizer keeps for it: the variables that an update of it goes back to."""
        for v, variables in enumerate(self.touched):
            trained = next((x for x in variables if x.trainable), None)
            if trained is None or found[v] != UPDATE:
                continue
            todo, seen = [v], {v}
            while todo:
                w = todo.pop()
                for variable in self.touched[w]:
                    if not variable.trainable and _stays(variable):
                        self.groups.join(trained.shared_name, variable.shared_name)
                further = [p for p in self.before[w] if found[p] == UPDATE and p not in seen]
                seen.update(further)
                todo += further

    def _ops(self, found: Sequence[str]) -> list[Op]:
        forward = {name: v for name, v in self.index.items() if found[v] == FORWARD}
        readers: dict[str, str] = {}
        for name, v in forward.items():
            for p in self.before[v]:
                for variable in self.touched[p]:
                    readers.setdefault(variable.shared_name, name)
        homes: set[str] = set()
        forward_ops = ForwardOps(forward)
        ops = []
        for name, v in self.index.items():
            node = self.nodes.by_name[name]
            new = [x for x in self.touched[v] if x.shared_name not in homes]
            homes.update(x.shared_name for x in new)
            forward_op = forward_ops.of(name) if found[v] == BACKWARD else None
            if found[v] == UPDATE:
                forward_op = next((readers[x.shared_name] for x in self.touched[v] if x.trainable and x.shared_name in readers), None)
            outputs = self.source.operation(name).outputs
            alias = self._read_in_place(name) is not None
            ops.append(
                Op(
                    id=name,
                    op=INPUT if name in self.source.inputs else node.op,
                    phase=found[v],
                    persistent_bytes=sum(x.bytes for x in new),
                    output_bytes=0 if alias else sum(self._bytes(t.name) for t in outputs),
                    forward_op=forward_op,
                    module=_module_of(name if found[v] == FORWARD else forward_op),
                )
            )
        return ops

    def _notes(self) -> tuple[str, ...]:
        notes = []
        loops = [name for name in self.members if self.nodes.by_name[name].op in _LOOPS]
        if loops:
            notes.append(
                f"{len(loops)} loops are one op each, on one device, such as {loops[0]!r}; a recurrent layer with unroll=True is placed "
                "step by step"
            )
        if self.unknown:
            notes.append(
                f"the sizes of what {len(self.unknown)} ops make are known only when the step runs, such as {next(iter(self.unknown))!r}; "
                "they count as 0 bytes"
            )
        return tuple(notes)


def _stays(variable: CapturedVariable) -> bool:
    """True if the readers of a variable come to it."""
    return variable.trainable or variable.bytes > _SENT_BYTES


def _module_of(name: str | None) -> str | None:
    """The scope that a forward op of this name was made in."""
    return None if name is None else ".".join(name.split("/")[:-1])


def _with_those_around(modules: Iterable[str | None]) -> tuple[str, ...]:
    """Names of modules, and of those that they are in, each once."""
    return tuple(dict.fromkeys(name for module in modules for name in [*modules_around(module or "")][::-1]))
