"""Capture of a user's call of a module as one operator graph, from the fragments that TorchDynamo cut it into: forward and backward passes,
without the loss and the optimizer, which stay in the user's code.

A fragment is a graph from tensors to tensors; parameters and buffers are among its arguments. Between the fragments of a call runs Python.
What one fragment returns and another one takes is an edge between their ops, so that they are planned together. In each fragment two ops
stand between the passes: `outputs`, which hands over what the fragment returns, and `tangents`, which takes in the gradients of that.
Behind the backward pass, an op for each argument that is trained hands over its gradient, a parameter's on the device where that lives.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.module_names import classes_of_modules
from baechi_ext.capture.torch_autocast import Autocast, under
from baechi_ext.capture.torch_dynamo import tracing_alone
from baechi_ext.capture.torch_joint import PART, Binding, BoundOp, CaptureOptions, Owner, _behind, _Builder, _bytes, _is_view, _Nodes
from baechi_ext.capture.torch_parts import normalising
from baechi_ext.capture.torch_private import distributions_unchecked, draws, is_foreign, joint_graph, with_node_notes, without_values
from baechi_ext.capture.torch_recurrent import recurrent_layers_kept
from baechi_ext.capture.torch_returned import Returned, ancestors, computed_with, consumed, flat_module
from baechi_ext.capture.torch_split import split_batch
from baechi_ext.capture.why_not import tracing
from baechi_ext.errors import CaptureError
from baechi_ext.ir.op_graph import Op, OpGraph

if TYPE_CHECKING:
    import torch
    from torch import fx

OUTPUTS, TANGENTS, GRADIENT = "outputs", "tangents", "gradient"


@dataclass(frozen=True)
class Fragment:
    """A graph that TorchDynamo made, with the arguments of one call of it."""

    module: "fx.GraphModule"
    args: "tuple[torch.Tensor, ...]"
    names: tuple[str | None, ...]
    """For each argument the parameter's or buffer's name; None for any other tensor."""
    links: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Argument -> (an earlier fragment of the call, the number of its output that this is)."""
    autocast: Autocast = ()

    @property
    def state(self) -> dict[int, str]:
        """Argument -> the parameter's or buffer's name."""
        return {i: n for i, n in enumerate(self.names) if n is not None}


@dataclass(frozen=True)
class CapturedFragment:
    """One fragment's part of a captured call. Arguments and outputs go by their numbers in the fragment."""

    forward_ops: frozenset[int]
    backward_ops: frozenset[int]
    num_args: int
    first_input: int
    """The number of its first argument among the arguments of all fragments, which is how ops know them."""
    state: Mapping[int, str]
    """Argument -> the first name of the parameter or buffer."""
    written: tuple[int, ...]
    """Arguments whose new values the fragment computes: buffers."""
    consumed: frozenset[int]
    """Those of them whose values its outputs are made of; not of what BatchNorm only averages."""
    returned: tuple[Returned, ...]
    differentiable: tuple[bool, ...]
    """For each output of the graph, whether a gradient of it counts."""
    reached_by: Mapping[int, frozenset[int]]
    """Argument that is trained -> the outputs whose gradients its own gradient is made from."""
    made_from: Mapping[int, frozenset[int]]
    """Output -> the other ones that it is next computed from, in the order of the graph; where gradients of several count, of these."""
    saved_args: Mapping[int, frozenset[int]]
    """Argument that the backward pass reads -> the outputs whose gradients it goes on with it."""
    saved_outputs: Mapping[int, frozenset[int]]
    """The same of outputs that it reads."""
    gradients_of: Mapping[int, frozenset[int]]
    """Op of the backward pass -> the outputs whose gradients it goes on with."""
    heads: tuple[frozenset[int], ...]
    """The outputs whose gradients count, in groups behind which no op of the backward pass is the same that reads what is kept for it: each
    may have a backward pass of its own, and frees that."""
    draws_on: "torch.device | None"
    """The device from whose generator it draws random numbers as the user's code runs it; None: it draws none."""
    devices: "tuple[torch.device, ...]"
    """For each output of the graph the device where it is as the user's code runs it."""
    homes: "frozenset[torch.device]"
    """These, and where the arguments are."""
    dtypes: "frozenset[torch.dtype]"
    """The dtypes of what its ops compute."""
    calls_others: bool = False
    """True if it calls ops that are not torch's own, which may draw random numbers and say nothing of it."""
    normalised: tuple[int, ...] = ()
    """The examples of each part of the batch, where BatchNorm normalises over these by themselves."""

    @property
    def trains(self) -> bool:
        return any(self.differentiable)

    def outputs_among(self, values: "Sequence[torch.Tensor]") -> "dict[int, torch.Tensor]":
        """Output -> its value, of what the fragment returns; of one that is only seen through views, what they look at."""
        found: dict[int, torch.Tensor] = {}
        for r, value in zip(self.returned, values, strict=True):
            whole = value if r.view is None else value._base
            if r.output is not None and whole is not None and not r.detached:
                found.setdefault(r.output, whole)
        return found


@dataclass(frozen=True)
class CapturedCall:
    """A call of a user's module: all fragments as one graph."""

    graph: OpGraph
    """Costless."""
    binding: Binding
    fragments: tuple[CapturedFragment, ...]
    parts: tuple[int, ...] = ()
    """The examples of each part of the batch that has ops of its own; none: it is captured as a whole."""
    why_whole: str = ""
    """Why it is, or some of its fragments are, where parts were asked for."""

    @property
    def phases(self) -> tuple[frozenset[int], ...]:
        """The ops of each fragment's forward and backward pass: 2 k and 2 k + 1 are those of fragment k."""
        return tuple(ops for f in self.fragments for ops in (f.forward_ops, f.backward_ops))


def capture_fragments(
    fragments: Sequence[Fragment], options: CaptureOptions, name: str = "", parts: int | Sequence[float] = 1
) -> CapturedCall:
    """The call whose fragments these are, in the order in which their forward passes run; over so many parts of its batch, or parts of
    these shares, each fragment for which that is proven to compute the same.

    No argument is changed. Raises CaptureError with the framework's reason.
    """
    traced = [_Traced.of(fragment, name, options) for fragment in fragments]
    if parts == 1:
        return _FragmentsBuilder(fragments, traced, options).capture(name)
    whole = []
    for k, fragment in enumerate(fragments):
        try:
            traced[k] = traced[k].in_parts(fragment, options, parts)
        except CaptureError as e:
            whole.append(f"in fragment {k + 1} of {len(fragments)} {e}" if len(fragments) > 1 else str(e))
    sizes = next((one.sizes for one in traced if one.sizes), ())
    return replace(_FragmentsBuilder(fragments, traced, options).capture(name), parts=sizes, why_whole="; ".join(whole))


@dataclass(frozen=True)
class _Traced:
    """A fragment's joint graph, and how what it returns is made of its outputs."""

    module: "fx.GraphModule"
    nodes: _Nodes
    returned: tuple[Returned, ...]
    made_from: Mapping[int, frozenset[int]]
    devices: "tuple[torch.device, ...]"
    """See CapturedFragment."""
    drawn_on: "frozenset[torch.device]"
    """The devices whose generators it draws from as the user's code runs it."""
    sizes: tuple[int, ...] = ()
    """The examples of each part of the batch that has nodes of its own; none: it is whole."""

    @classmethod
    def of(cls, fragment: Fragment, name: str, options: CaptureOptions) -> "_Traced":
        """Traced on the kind of device that will run it, wherever the arguments are."""
        import torch

        weights = [i for i in fragment.state if fragment.args[i].requires_grad and fragment.args[i].is_leaf]
        flat, device = flat_module(fragment.module, weights), options.device
        examples = [a.detach().requires_grad_(a.requires_grad) if a.requires_grad else a for a in fragment.args]
        with (
            tracing(f"a call of {name or 'the module'}"),
            tracing_alone(),
            with_node_notes(),
            recurrent_layers_kept(),
            distributions_unchecked(),
            under(fragment.autocast),
            torch.enable_grad(),
        ):
            joint = joint_graph(flat, examples)
            nodes, returned = _Nodes.of(joint, fragment.state), flat.returned
            devices = tuple(_device_of(node) for node in nodes.outputs)
            drawn_on = frozenset(_device_of(node) for node in nodes.calls if draws(node))
            if any(a.device.type != device for a in examples):
                if device == "cpu":
                    raise CaptureError(f"its tensors are on {_listed({a.device for a in examples})}; give it devices of that kind")
                joint = joint_graph(flat, without_values(examples, device))
                as_written, nodes = nodes, _Nodes.of(joint, fragment.state)
                if _dtypes(as_written) != _dtypes(nodes):
                    raise CaptureError("autocast is on for another kind of device than it is to run on")
        made_from = _made_from(nodes)
        views = {returned[i].output for i in computed_with(fragment.module) if returned[i].view is not None and not returned[i].detached}
        if any(not views.isdisjoint(others) for others in made_from.values()):
            raise CaptureError("it returns a view of what it also computes with, which would have no gradient; return a copy (.clone())")
        if flat.returned != returned:
            raise CaptureError("it returns what it was given, on another device")
        if len({devices[i] for i in nodes.tangents}) > 1:  # autograd goes through them in threads of their own, side by side
            raise CaptureError("it returns tensors with gradients on several devices")
        if drawn_on and {d.type for d in drawn_on} != {device} and not options.relaxed_random:
            raise CaptureError(f"it draws random numbers on {_listed(drawn_on)}, and is to run on devices of another kind")
        if len(drawn_on) > 1 and not options.relaxed_random:
            raise CaptureError(f"it draws random numbers on several devices, {_listed(drawn_on)}")
        return cls(joint, nodes, tuple(returned), made_from, devices, drawn_on)

    def in_parts(self, fragment: Fragment, options: CaptureOptions, parts: int | Sequence[float]) -> "_Traced":
        """The same over parts of the batch. Raises CaptureError where examples are mixed, or may be."""
        with tracing_alone():
            module, sizes = split_batch(self.module, self.nodes, parts, batch_norm_per_part=options.batch_norm_per_part)
        return replace(self, module=module, nodes=_Nodes.of(module, fragment.state), sizes=sizes)

    @property
    def normalised(self) -> tuple[int, ...]:
        """See CapturedFragment."""
        return self.sizes if any(PART in node.meta for node in normalising(self.nodes.calls)) else ()


class _FragmentsBuilder(_Builder):
    """Adds each fragment's forward pass in turn, then the backward passes, the last one's first."""

    def __init__(self, fragments: Sequence[Fragment], traced: Sequence[_Traced], options: CaptureOptions) -> None:
        state = {n: a for f in fragments for n, a in zip(f.names, f.args, strict=True) if n is not None}
        all_nodes = [t.nodes for t in traced]
        classes = classes_of_modules(node for nodes in all_nodes for node in nodes.calls)
        modules = {name: classes.get(name, "") for name in sorted({n.rpartition(".")[0] for n in state} - {""})}
        written = [n for nodes in all_nodes for n in nodes.buffer_values]
        if twice := sorted({n for n in written if written.count(n) > 1}):
            raise CaptureError(f"buffer {twice[0]!r} is changed by two fragments of one call; let nothing break the graph between")
        merged = replace(
            all_nodes[0],
            state={n: s for nodes in all_nodes for n, s in nodes.state.items()},
            constants={n: c for nodes in all_nodes for n, c in nodes.constants.items()},
            buffer_values={n: b for nodes in all_nodes for n, b in nodes.buffer_values.items()},
        )
        super().__init__(Owner(state, modules), merged, options)
        self.fragments, self.traced = fragments, traced
        self.forward = [_forward_nodes(nodes) for nodes in all_nodes]
        self.first_input = [sum(len(f.args) for f in fragments[:k]) for k in range(len(fragments))]
        self.outputs_ops: list[int] = []
        self.linked: dict[tuple[int, int], int] = {}
        """(Fragment, argument) -> the op that takes it in."""
        self.gradient_ops: dict[tuple[int, int], int] = {}
        """(Fragment, argument) -> the op that hands over its gradient."""
        self.counted: set[str] = set()
        """Parameters of which what the optimizer keeps is counted."""

    def capture(self, name: str) -> CapturedCall:
        forward_ops, backward_ops = [], {}
        for k in range(len(self.fragments)):
            self._begin(k)
            forward_ops.append(self._added(lambda k=k: self._add_forward(k)))
        for k in reversed(range(len(self.fragments))):
            self._begin(k)
            backward_ops[k] = self._added(lambda k=k: self._add_backward(k)) if self.traced[k].nodes.tangents else frozenset()
        graph, binding = self._finish(name, (None, -1))
        parts = tuple(self._part(k, forward_ops[k], backward_ops[k]) for k in range(len(self.fragments)))
        return CapturedCall(graph, binding, parts)

    def _added(self, add: Any) -> frozenset[int]:
        first = len(self.ops)
        add()
        return frozenset(range(first, len(self.ops)))

    def _lives_with_readers(self) -> bool:
        """Every device has a call's parameters, so those that parts of the batch read are no reason to be on one device."""
        return not any(t.sizes for t in self.traced)

    def _begin(self, k: int) -> None:
        self.id_prefix = f"{k}." if len(self.fragments) > 1 else ""
        self.forward_of_seq = {}

    def _add_forward(self, k: int) -> None:
        nodes, before = self.traced[k].nodes, len(self.ops) - 1
        _require_unwritten(nodes, self.forward[k])
        for node, index in nodes.plain.items():
            if node.users:
                self._add_input(node, self.first_input[k] + index)
                self._link(k, index)
        for node in nodes.calls:
            if node in self.forward[k] and node.target is not operator.getitem and not _is_view(node):
                self._add_call(node)
        outputs = tuple(nodes.outputs)
        v = self._add(Op(f"{self.id_prefix}{OUTPUTS}", OUTPUTS), BoundOp(outputs=outputs, views=self._views(outputs)))
        for node in outputs:
            self._read(node, v)
        self.outputs_ops.append(v)
        if k:  # Python that runs between two fragments needs what the first returned
            for w in range(before + 1, len(self.ops)):
                self._order_after(self.outputs_ops[k - 1], w)

    def _link(self, k: int, index: int) -> None:
        """An edge from the op of an earlier fragment that made the argument."""
        v, made = len(self.ops) - 1, self.fragments[k].links.get(index)
        self.linked[k, index] = v
        if made is None:
            return
        earlier, number = made
        returned = self.traced[earlier].returned[number]
        if returned.output is None:
            return
        base = self._base(self.traced[earlier].nodes.outputs[returned.output])
        if isinstance(base, tuple):
            self._edge(base[0], v, self.tensor_bytes[base], base[1])

    def _add_backward(self, k: int) -> None:
        nodes = self.traced[k].nodes
        begin = self._add_tangents(k)
        for node in nodes.calls:
            if node not in self.forward[k] and node.target is not operator.getitem and not _is_view(node):
                self._add_call(node)
                self._order_after(begin, len(self.ops) - 1)
        for parameter in dict.fromkeys(self.state_names[p] for p in nodes.gradients):
            self._add_gradient(k, parameter)
            self._order_after(begin, len(self.ops) - 1)
        for index, node in nodes.input_gradients.items():
            number = self.first_input[k] + index
            v = self._add(
                Op(f"{GRADIENT}.input_{number}", GRADIENT, phase="backward"),
                BoundOp(input_gradient=number, gradients=(node,), views=self._views([node])),
            )
            self.gradient_ops[k, index] = v
            self._read(node, v)
            self._order_after(begin, v)

    def _add_tangents(self, k: int) -> int:
        nodes = self.traced[k].nodes
        tangents = tuple(nodes.tangents.values())
        size = sum(_bytes(n.meta["val"]) for n in tangents)
        v = self._add(Op(f"{self.id_prefix}{TANGENTS}", TANGENTS, phase="backward", output_bytes=size), BoundOp(tangents=tangents))
        for i, node in nodes.tangents.items():
            self._own(node, v, str(i))
        self.groups.join(v, self.outputs_ops[k])
        self._order(self.outputs_ops[k], v)
        self._order_after(self.outputs_ops[-1], v)  # the loss is made when all fragments have run
        for (later, index), gradient in self.gradient_ops.items():
            if self.fragments[later].links.get(index, (None,))[0] == k:
                self._order_after(gradient, v)
        return v

    def _add_gradient(self, k: int, parameter: str) -> None:
        """The gradient and what the optimizer keeps stay with the parameter from step to step."""
        nodes = self.traced[k].nodes
        kept = 0 if parameter in self.counted else _bytes(self.state[parameter]) * (1 + self.options.optimizer_slots)
        self.counted.add(parameter)
        op = Op(
            id=f"{self.id_prefix}{GRADIENT}.{parameter}",
            op=GRADIENT,
            phase="backward",
            persistent_bytes=kept,
            module=parameter.rpartition(".")[0] or None,
        )
        taken_in = {w for w, b in enumerate(self.bound) if b.input_index is not None or b.tangents}
        self._add_where_it_lives(parameter, op, nodes, taken_in)

    def _part(self, k: int, forward_ops: frozenset[int], backward_ops: frozenset[int]) -> CapturedFragment:
        nodes, fragment = self.traced[k].nodes, self.fragments[k]
        state = {i: self.state_names[n] for i, n in enumerate(fragment.names) if n is not None}
        argument = {name: i for i, name in reversed(state.items())}
        read = self._read_for(k)
        saved_args, saved_outputs = self._saved(k, argument, read)
        return CapturedFragment(
            forward_ops=forward_ops,
            backward_ops=backward_ops,
            num_args=len(fragment.args),
            first_input=self.first_input[k],
            state=state,
            written=tuple(argument[self.state_names[n]] for n in nodes.buffer_values),
            consumed=frozenset(argument[self.state_names[n]] for n in consumed(nodes.outputs, nodes.state, nodes.buffer_values)),
            returned=self.traced[k].returned,
            differentiable=tuple(i in nodes.tangents for i in range(len(nodes.outputs))),
            reached_by=_reached_by(nodes, {n: argument[self.state_names[n]] for n in nodes.gradients}),
            made_from=self.traced[k].made_from,
            saved_args=saved_args,
            saved_outputs=saved_outputs,
            gradients_of={v: read[node] for v in backward_ops if (node := self.bound[v].node) in read},
            heads=_heads(nodes),
            draws_on=next(iter(self.traced[k].drawn_on), None),
            devices=self.traced[k].devices,
            homes=frozenset((*self.traced[k].devices, *(a.device for a in fragment.args))),
            dtypes=_dtypes(nodes),
            calls_others=any(is_foreign(node.target) for node in nodes.calls),
            normalised=self.traced[k].normalised,
        )

    def _read_for(self, k: int) -> "dict[fx.Node | None, frozenset[int]]":
        """Node of the backward pass -> the outputs whose gradients it goes on with."""
        nodes = self.traced[k].nodes
        behind, found = _outputs_behind(nodes), dict[Any, frozenset[int]]()
        for node in reversed(nodes.calls):
            if node not in self.forward[k]:
                # What is made without a gradient, as a weight's transpose, is read where one comes to it.
                found[node] = behind[node] or frozenset().union(*(found.get(user, frozenset()) for user in node.users))
        return found

    def _saved(
        self, k: int, argument: Mapping[str, int], read_for: "Mapping[fx.Node | None, frozenset[int]]"
    ) -> tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]:
        """The arguments and outputs that the backward pass reads, which nobody may change in between; see CapturedFragment."""
        nodes = self.traced[k].nodes
        args: defaultdict[int, frozenset[int]] = defaultdict(frozenset)
        outputs: defaultdict[int, frozenset[int]] = defaultdict(frozenset)
        plain = {self.home[n][0]: i for n, i in nodes.plain.items() if n in self.home}
        returned = {self._base(n): i for i, n in enumerate(nodes.outputs)}
        written = {self.state_names[n] for n in nodes.buffer_values}
        for node, reading in read_for.items():
            for read in () if node is None else node.all_input_nodes:
                base = self._base(read)
                if isinstance(base, str):
                    if base not in written:
                        args[argument[base]] |= reading
                elif base is not None and base[0] in plain:
                    args[plain[base[0]]] |= reading
                elif base in returned:
                    outputs[returned[base]] |= reading
        return dict(args), dict(outputs)


def _device_of(node: "fx.Node") -> "torch.device":
    value = node.meta["val"]
    found: torch.device = (value[0] if isinstance(value, (tuple, list)) else value).device
    return found


def _dtypes(nodes: _Nodes) -> "frozenset[torch.dtype]":
    return frozenset(n.meta["val"].dtype for n in nodes.calls if hasattr(n.meta.get("val"), "dtype"))


def _listed(devices: "Iterable[torch.device]") -> str:
    return ", ".join(sorted(map(str, devices)))


def _forward_nodes(nodes: _Nodes) -> "set[fx.Node]":
    """The nodes of a forward pass: the outputs, the buffers' new values, what is kept for the backward pass, and what all these come
    from."""
    behind = _behind(nodes.calls, nodes.tangents.values())
    kept = [n for n in nodes.calls if n.meta.get("partitioner_tag") == "is_forward" and n not in behind]
    return ancestors([*nodes.outputs, *nodes.buffer_values.values(), *kept])


def _require_unwritten(nodes: _Nodes, forward: "set[fx.Node]") -> None:
    """Forward overwrites buffers, so what backward reads must not be one of those. BatchNorm's backward takes its running averages and does
    not use them."""
    for node in nodes.calls:
        if node in forward or "batch_norm_backward" in str(node.target):
            continue
        for read in node.all_input_nodes:
            if nodes.state.get(read) in nodes.buffer_values:
                raise CaptureError(
                    f"the backward pass needs the old value of buffer {nodes.state[read]!r}, which forward changes; "
                    "let forward use a copy of it (buffer.clone())"
                )


def _outputs_behind(nodes: _Nodes) -> "dict[fx.Node, frozenset[int]]":
    """The outputs whose gradients each node computes with."""
    found: dict[fx.Node, frozenset[int]] = {node: frozenset((i,)) for i, node in nodes.tangents.items()}
    for node in nodes.calls:
        found[node] = frozenset().union(*(found.get(n, frozenset()) for n in node.all_input_nodes))
    return found


def _heads(nodes: _Nodes) -> tuple[frozenset[int], ...]:
    """See CapturedFragment. What adds up gradients of a weight that several outputs are computed with reads nothing else."""
    outputs_of, found = _outputs_behind(nodes), [frozenset((i,)) for i in nodes.tangents]
    reading = {outputs_of[n] for n in nodes.calls if any(not outputs_of.get(read) for read in n.all_input_nodes)}
    for outputs in sorted(filter(None, reading), key=len):
        apart = [head for head in found if head.isdisjoint(outputs)]
        found = [*apart, outputs.union(*(head for head in found if head not in apart))]
    return tuple(found)


def _reached_by(nodes: _Nodes, arguments: Mapping[str, int]) -> dict[int, frozenset[int]]:
    """Argument -> the outputs whose gradients its own comes from; none where an autograd.Function makes it from nothing, which comes with
    the only output's. `arguments`: the number of each parameter that has a gradient. Raises CaptureError where there are more outputs."""
    outputs_of = _outputs_behind(nodes)
    found: dict[int, frozenset[int]] = {}
    for name, node in nodes.gradients.items():
        found[arguments[name]] = found.get(arguments[name], frozenset()) | outputs_of.get(node, frozenset())
    found |= {i: outputs_of.get(node, frozenset()) for i, node in nodes.input_gradients.items()}
    if len(nodes.tangents) > 1 and not all(found.values()):
        raise CaptureError("a gradient in it comes from none of its outputs', and nothing says with which of several it is asked for")
    return found


def _made_from(nodes: _Nodes) -> dict[int, frozenset[int]]:
    trained = {nodes.outputs[i]: i for i in nodes.tangents}
    behind: dict[fx.Node, frozenset[int]] = {}
    for node in nodes.calls:
        behind[node] = frozenset().union(*({trained[n]} if n in trained else behind.get(n, ()) for n in node.all_input_nodes))
    return {trained[n]: others for n, others in behind.items() if n in trained} if len(trained) > 1 else {}
