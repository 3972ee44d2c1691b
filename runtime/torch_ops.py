"""Lowering: device programs of a captured PyTorch step -> lists of closures over a device's slots, as fast as Python calls aten.

A slot holds one tensor or view while it lives. Each closure does one instruction; `segments` say which belong to which op, so that
profiling and accounting see op by op what the step runs.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx

from baechi_ext.capture.torch_joint import Binding, BoundOp
from baechi_ext.capture.torch_private import as_if_recording
from baechi_ext.errors import BaechiError, ExecutionError
from baechi_ext.ir.op_graph import OpGraph
from runtime.program import DeviceProgram, Free, Receive, Run, Send
from runtime.step import TrainingStep
from runtime.torch_devices import TorchDevice

Slots = list[Any]
Action = Callable[[Slots], None]
Key = tuple[int, str] | fx.Node


@dataclass(frozen=True)
class Segment:
    """What one op does on its device: receive and view its inputs, compute, send, free."""

    op: int
    before: tuple[Action, ...]
    compute: Action
    after: tuple[Action, ...]
    output_slots: tuple[int, ...]
    arrivals: int = 0
    """How many of `before`, its first ones, take tensors in from other devices, or get ready to."""
    departs: bool = False
    """Whether `after` gives tensors away."""
    capturable: bool = False
    """Whether a CUDA graph can do again what the op does, view by view and kernel by kernel."""


_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "Cannot allocate memory")
"""What torch, the C++ library, oneDNN and the system call it."""


class OpError(Exception):
    """An instruction of an op (None: of the writing back of buffers) raised `cause`; `live` are the tensors that the device held then."""

    def __init__(self, op: int | None, cause: Exception, live: "LiveTensors | None" = None) -> None:
        super().__init__(op, cause)
        self.op = op
        self.cause = cause
        self.live = LiveTensors() if live is None else live

    def explain(
        self, device: str, graph: OpGraph, limit_bytes: float | None = None, held: Mapping[str, torch.Tensor] | None = None
    ) -> str:
        """One line: device, op, and what happened; where memory ran out also how much was held, in which tensors, and what to try.

        `limit_bytes` is what the device may hold, where that is kept; `held` is what it holds whether a step runs or not, by name.
        """
        where = "writing back buffers" if self.op is None else f"op {graph.ops[self.op].id!r}"
        reason = (str(self.cause).splitlines() or [""])[0]
        if isinstance(self.cause, (MemoryError, torch.OutOfMemoryError)) or any(words in str(self.cause) for words in _OUT_OF_MEMORY):
            limit = "" if limit_bytes is None else f" (its limit is {limit_bytes:.0f} bytes, and the step takes more than its profile says)"
            return (
                f"device {device} ran out of memory in {where}{limit}: {reason}; {self.live.beside(held or {})}; raise --device_memory, "
                "profile again without --cost_path, use more devices, or a smaller batch"
            )
        return f"device {device} failed in {where}: {type(self.cause).__name__}: {reason}"


_NAMED = 3
"""So many of the largest tensors are named where memory runs out."""


@dataclass(frozen=True)
class LiveTensors:
    """The storages that tensors were in: where each begins -> (the tensor's name, bytes)."""

    storages: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Iterable[tuple[str, Any]]) -> "LiveTensors":
        """The first name of a storage counts. What is no tensor is passed over."""
        found: dict[int, tuple[str, int]] = {}
        for name, value in named:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                found.setdefault(storage.data_ptr(), (name, storage.nbytes()))
        return cls(found)

    def beside(self, held: Mapping[str, torch.Tensor]) -> str:
        """How many bytes these and `held` are, and which of them are the largest."""
        sizes = (dict(self.storages) | dict(LiveTensors.of(held.items()).storages)).values()
        largest = sorted(sizes, key=lambda item: (-item[1], item[0]))[:_NAMED]
        named = ", ".join(f"{name} ({size} bytes)" for name, size in largest)
        return f"it held {sum(size for _, size in sizes)} bytes then, most of them in {named or 'no tensor'}"


@dataclass(frozen=True)
class LoweredProgram:
    """A device's program, ready to run on `[None] * num_slots`."""

    segments: tuple[Segment, ...]
    epilogue: tuple[Action, ...]
    """What comes in for a later program, and buffer writes, after the last op: no op may read a new value where it means the old one."""
    num_slots: int
    loss_slot: int | None
    slot_of: Mapping[Key, int] = field(default_factory=dict)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All instructions in order."""
        return tuple(action for _, action in self._actions_of_ops) + self.epilogue

    @cached_property
    def _actions_of_ops(self) -> tuple[tuple[int, Action], ...]:
        return tuple((s.op, action) for s in self.segments for action in (*s.before, s.compute, *s.after))

    def run(self, slots: Slots | None = None) -> Slots:
        """One step of this program, on what earlier programs of the device left in `slots`; the slots hold what is left: the loss and
        the new values of buffers.

        Raises OpError, naming the op, for whatever an instruction raises; the project's own errors pass.
        """
        if slots is None:
            slots = [None] * self.num_slots
        position = 0
        try:
            with torch.no_grad():
                for position, action in enumerate(self.actions):  # noqa: B007 - read where an instruction fails
                    action(slots)
        except BaechiError:
            raise
        except Exception as e:
            op = self._actions_of_ops[position][0] if position < len(self._actions_of_ops) else None
            raise OpError(op, e, self._live(slots)) from e
        return slots

    def _live(self, slots: Slots) -> LiveTensors:
        """What the slots hold, by the tensors' names in the graph; views go by what they look at, where that is here."""
        keys = sorted(self.slot_of.items(), key=lambda item: not isinstance(item[0], tuple))
        return LiveTensors.of((key[1] if isinstance(key, tuple) else key.name, slots[slot]) for key, slot in keys)


class Exchange(Protocol):
    """How tensors get from device to device: Mailboxes between threads, Channels between processes."""

    def giver(self, tensor: int, target: int) -> Callable[[Any], None]:
        """A function that sends a value of `tensor` to device `target`."""

    def taker(self, tensor: int, target: int) -> Callable[[], Any]:
        """A function that waits for `tensor` at device `target`."""

    def abort(self) -> None:
        """Ends all waits with an error, where that is possible."""


@dataclass(frozen=True)
class StepContext:
    """What all devices of one placed step share."""

    graph: OpGraph
    binding: Binding
    step: TrainingStep
    mailboxes: Exchange
    optimizers: dict[str, torch.optim.Optimizer]
    """One per parameter, so that an update can run as soon as its gradient is there; kept from plan to plan."""
    gradients: dict[str, torch.Tensor] | None = None
    """Where given, every gradient is kept in it; otherwise a gradient lives until its update."""
    posts: Mapping[int, tuple[Callable[[Slots], None], ...]] = field(default_factory=dict)
    """Op -> what to do before it, e.g. to announce that tensors may come in."""


class Lowering:
    """Lowers one device's program."""

    def __init__(self, context: StepContext, device: TorchDevice, index: int) -> None:
        self.context = context
        self.device = device
        self.index = index
        self.state = context.step.state()
        self.slot_of: dict[Key, int] = {}

    def lower(self, program: DeviceProgram) -> LoweredProgram:
        context = self.context
        bound = context.binding.ops
        last_use = self._last_view_uses(program)
        made: set[fx.Node] = set()
        segments: list[Segment] = []
        before: list[Action] = []
        for instruction in program:
            match instruction:
                case Receive(tensor=t):
                    before.append(self._receive(t))
                case Run(op=v):
                    before = [*context.posts.get(v, ()), *before]
                    arrivals = len(before)
                    for view in bound[v].views:
                        if view not in made:
                            made.add(view)
                            before.append(self._call(view))
                    compute, outputs = self._compute(v)
                    frees = self._free([view for view in bound[v].views if last_use.get(view) == v])
                    segments.append(Segment(v, tuple(before), compute, frees, outputs, arrivals, capturable=self._capturable(bound[v])))
                    before = []
                case Send(tensor=t, target=target):
                    segments[-1] = replace(_append(segments[-1], (self._send(t, target),)), departs=True)
                case Free(tensor=t) if self._tensor_key(t) not in self._kept:
                    segments[-1] = _append(segments[-1], self._free([self._tensor_key(t)]))
        loss = self._slot(context.binding.loss) if any(s.op == context.binding.loss_op for s in segments) else None
        epilogue = before + [w for s in segments for w in self._buffer_writes(s.op)]
        return LoweredProgram(tuple(segments), tuple(epilogue), len(self.slot_of), loss, dict(self.slot_of))

    def _last_view_uses(self, program: DeviceProgram) -> dict[fx.Node, int]:
        """View -> the last op of the program that needs it; views that outlive the ops are left out."""
        last: dict[fx.Node, int] = {}
        for instruction in program:
            if isinstance(instruction, Run):
                views = self.context.binding.ops[instruction.op].views
                last.update(dict.fromkeys((view for view in views if view not in self._kept), instruction.op))
        return last

    @cached_property
    def _kept(self) -> set[Key]:
        """What is needed after the last op: the loss and the new values of buffers."""
        binding = self.context.binding
        nodes = [] if binding.loss is None else [binding.loss]
        nodes += [node for writes in binding.buffer_writes.values() for _, node in writes]
        return {binding.home.get(node, node) for node in nodes}

    def _tensor_key(self, tensor: int) -> tuple[int, str]:
        t = self.context.graph.tensors[tensor]
        return t.producer, t.name

    def _slot(self, node: fx.Node) -> int:
        return self._slot_of_key(self.context.binding.home.get(node, node))

    def _slot_of_key(self, key: Key) -> int:
        return self.slot_of.setdefault(key, len(self.slot_of))

    def _receive(self, tensor: int) -> Action:
        slot, take = self._slot_of_key(self._tensor_key(tensor)), self.context.mailboxes.taker(tensor, self.index)
        unpack = self.device.unpack

        def receive(slots: Slots) -> None:
            slots[slot] = unpack(take())

        return receive

    def _send(self, tensor: int, target: int) -> Action:
        slot, give = self._slot_of_key(self._tensor_key(tensor)), self.context.mailboxes.giver(tensor, target)
        pack = self.device.pack

        def send(slots: Slots) -> None:
            give(pack(slots[slot]))

        return send

    def _free(self, keys: Sequence[Key]) -> tuple[Action, ...]:
        freed = tuple(self._slot_of_key(k) for k in keys)
        if not freed:
            return ()

        def free(slots: Slots) -> None:
            for slot in freed:
                slots[slot] = None

        return (free,)

    def _compute(self, v: int) -> tuple[Action, tuple[int, ...]]:
        """The op's closure and the slots it fills."""
        bound = self.context.binding.ops[v]
        if bound.input_index is not None:
            return self._input(v, bound.input_index)
        if bound.parameters and self.context.binding.loss is not None:
            return self._update(bound), ()
        if bound.parameters or bound.input_gradient is not None:
            return self._hand_over_gradient(bound), ()
        if bound.outputs:
            return self._hand_over_outputs(bound), ()
        if bound.tangents:
            return self._take_tangents(bound)
        if bound.node is None:
            raise ExecutionError(f"op {self.context.graph.ops[v].id!r} is bound to nothing that can run")
        elements = {int(name.rsplit(":", 1)[1]): self._slot_of_key(key) for key in self._keys_of.get(v, ()) for name in (key[1],)}
        if isinstance(bound.node.meta["val"], (tuple, list)):
            return self._call(bound.node, elements), tuple(elements.values())
        return self._call(bound.node), (self._slot(bound.node),)

    def _capturable(self, bound: BoundOp) -> bool:
        """Not what reads the host's memory, or makes tensors whose sizes depend on values."""
        if bound.input_index is not None:
            return bound.input_index < 0
        if bound.parameters and self.context.binding.loss is not None:
            return replayable(self.context.optimizers[self.context.binding.state_names[bound.parameters[0]]])
        if bound.node is None:
            return False
        tags = getattr(bound.node.target, "tags", ())
        return not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(tags)

    @cached_property
    def _keys_of(self) -> dict[int, list[tuple[int, str]]]:
        keys: dict[int, list[tuple[int, str]]] = {}
        for key in dict.fromkeys(self.context.binding.home.values()):
            keys.setdefault(key[0], []).append(key)
        return keys

    def _input(self, v: int, index: int) -> tuple[Action, tuple[int, ...]]:
        slot = self._slot_of_key(self._keys_of[v][0])
        step, device = self.context.step, self.device.torch_device
        if index < 0:
            ones = torch.ones((), device=device)

            def tangent(slots: Slots) -> None:
                slots[slot] = ones

            return tangent, ()

        def read(slots: Slots) -> None:
            slots[slot] = step.inputs[index].to(device, non_blocking=True)

        return read, (slot,)

    def _update(self, bound: BoundOp) -> Action:
        """Adds up the gradients of a parameter's names, and steps its optimizer."""
        name = self.context.binding.state_names[bound.parameters[0]]
        parameter, optimizer, kept = self.state[name], self.context.optimizers[name], self.context.gradients
        first, *rest = [self._slot(g) for g in bound.gradients]

        def update(slots: Slots) -> None:
            gradient = slots[first]
            for slot in rest:
                gradient = gradient + slots[slot]
            parameter.grad = gradient
            optimizer.step()
            parameter.grad = None
            if kept is not None:
                kept[name] = gradient

        return update

    def _hand_over_gradient(self, bound: BoundOp) -> Action:
        """Adds up the gradients of a parameter's names and gives the sum to the step."""
        name = self.context.binding.state_names[bound.parameters[0]] if bound.parameters else bound.input_gradient
        step = self.context.step
        first, *rest = [self._slot(g) for g in bound.gradients]

        def hand_over(slots: Slots) -> None:
            gradient = slots[first]
            for slot in rest:
                gradient = gradient + slots[slot]
            step.gradients[name] = gradient

        return hand_over

    def _hand_over_outputs(self, bound: BoundOp) -> Action:
        step, places = self.context.step, [(self.constant(node), self._slot(node)) for node in bound.outputs]

        def hand_over(slots: Slots) -> None:
            step.outputs = [slots[slot] if constant is None else constant for constant, slot in places]

        return hand_over

    def _take_tangents(self, bound: BoundOp) -> tuple[Action, tuple[int, ...]]:
        """What the step was given for each output; ones where it was given nothing, as when it is profiled."""
        step, device = self.context.step, self.device.torch_device
        places = [(self._slot(node), node.meta["val"]) for node in bound.tangents]

        def take(slots: Slots) -> None:
            given = step.tangents
            for i, (slot, like) in enumerate(places):
                if given is None:
                    slots[slot] = torch.ones(like.shape, dtype=like.dtype, device=device)
                elif given[i] is None:
                    slots[slot] = torch.zeros(like.shape, dtype=like.dtype, device=device)
                else:
                    slots[slot] = given[i].to(device)

        return take, tuple(slot for slot, _ in places)

    def _buffer_writes(self, v: int) -> list[Action]:
        return [self._write(self.state[name], self._slot(node)) for name, node in self.context.binding.buffer_writes.get(v, ())]

    @staticmethod
    def _write(buffer: torch.Tensor, slot: int) -> Action:
        def write(slots: Slots) -> None:
            buffer.data.copy_(slots[slot])  # as BatchNorm does: for autograd it is no change of what a backward pass reads

        return write

    def _call(self, node: fx.Node, elements: Mapping[int, int] | None = None) -> Action:
        """Calls the node's target on its arguments; fills the node's slot, or the slots of the elements that are read."""
        target, arguments = _runnable(node.target), _Arguments(node, self)
        args, kwargs = arguments.args, arguments.kwargs
        if elements is not None:
            wanted = tuple(elements.items())

            def call_tuple(slots: Slots) -> None:
                value = target(*args(slots), **kwargs(slots))
                for element, slot in wanted:
                    slots[slot] = value[element]

            return call_tuple
        slot = self._slot(node)
        if arguments.constant_kwargs is not None and not arguments.constant_kwargs:

            def call_plain(slots: Slots) -> None:
                slots[slot] = target(*args(slots))

            return call_plain

        def call(slots: Slots) -> None:
            slots[slot] = target(*args(slots), **kwargs(slots))

        return call

    def constant(self, node: fx.Node) -> torch.Tensor | None:
        """What a node stands for before the step runs: a parameter, a buffer, or a constant of the graph."""
        binding = self.context.binding
        if node in binding.state_nodes:
            return self.state[binding.state_nodes[node]]
        if node in binding.constants:
            return binding.constants[node].to(self.device.torch_device)
        return None


def _runnable(target: Callable[..., Any]) -> Callable[..., Any]:
    """What to call for a node's target where gradients are not recorded."""
    if target is torch.ops.aten.view.default:  # autograd's own word: a gradient that comes in may have other strides than when captured
        return torch.ops.aten.reshape.default
    if target is not torch.ops.aten.mkldnn_rnn_layer.default:
        return target

    def with_workspace(*args: Any) -> Any:
        with as_if_recording():
            return target(*args)

    return with_workspace


def replayable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer is kernels alone. Others count their steps on the host, unless they are told to be `capturable`."""
    return isinstance(optimizer, torch.optim.SGD) or all(group.get("capturable", False) for group in optimizer.param_groups)


class _Arguments:
    """A node's arguments as functions of the slots: constants are put in once, slots are filled in at each call."""

    def __init__(self, node: fx.Node, lowering: Lowering) -> None:
        self._lowering = lowering
        device = lowering.device.torch_device
        self._args = [self._prepare(a) for a in node.args]
        self._kwargs = {k: self._prepare(device if isinstance(a, torch.device) else a) for k, a in node.kwargs.items()}
        self.constant_kwargs = None if any(f for _, f in self._kwargs.values()) else {k: c for k, (c, _) in self._kwargs.items()}

    def _prepare(self, argument: Any) -> tuple[Any, Callable[[Slots], Any] | None]:
        """(constant, None) or (None, function of the slots)."""
        if isinstance(argument, fx.Node):
            constant = self._lowering.constant(argument)
            if constant is not None:
                return constant, None
            return None, operator.itemgetter(self._lowering._slot(argument))
        if isinstance(argument, (list, tuple)):
            parts = [self._prepare(a) for a in argument]
            if all(f is None for _, f in parts):
                return type(argument)(c for c, _ in parts), None
            return None, lambda slots: [c if f is None else f(slots) for c, f in parts]
        return argument, None

    @property
    def args(self) -> Callable[[Slots], list[Any]]:
        template = [c for c, _ in self._args]
        fills = [(i, f) for i, (_, f) in enumerate(self._args) if f is not None]

        def fill(slots: Slots) -> list[Any]:
            filled = template.copy()
            for i, f in fills:
                filled[i] = f(slots)
            return filled

        return fill

    @property
    def kwargs(self) -> Callable[[Slots], dict[str, Any]]:
        constant = self.constant_kwargs
        if constant is not None:
            return lambda slots: constant
        items = list(self._kwargs.items())
        return lambda slots: {k: c if f is None else f(slots) for k, (c, f) in items}


def _append(segment: Segment, actions: tuple[Action, ...]) -> Segment:
    return replace(segment, after=segment.after + actions)
