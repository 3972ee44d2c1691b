"""Lowering: device programs of a captured PyTorch step -> lists of closures over a device's slots, as fast as Python calls aten.

A slot holds one tensor or view while it lives. Each closure does one instruction; `segments` say which belong to which op, so that
profiling and accounting see op by op what the step runs.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any, Protocol, cast

import torch
from torch import fx

from baechi_ext.capture.torch_joint import Binding, BoundOp
from baechi_ext.errors import BaechiError
from baechi_ext.ir.op_graph import OpGraph
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.op_error import OpError, Storages, storages_of
from baechi_runtime.torch.lowering.program import DeviceProgram, Free, Receive, Run, Send, moves_nothing
from baechi_runtime.torch.lowering.runnable import runnable

Slots = list[Any]
Action = Callable[[Slots], object]
Key = tuple[int, str] | fx.Node
TOKEN = torch.empty(1, dtype=torch.uint8, device="meta")
"""The likeness of what is sent where a reader on another device only waits: no message is shorter."""


@dataclass(frozen=True)
class Segment:
    """One op's actions on its device: receive and view its inputs, compute, send, free."""

    op: int
    arrivals: tuple[Action, ...]
    """Take tensors in from other devices, or get ready to."""
    views: tuple[Action, ...]
    compute: Action
    after: tuple[Action, ...]
    skip: Action | None = None
    """Fills with zeros what `compute` would; None where an op makes no tensors."""


@dataclass(frozen=True)
class LoweredProgram:
    """A device's program, ready to run on slots that are `empty`."""

    segments: tuple[Segment, ...]
    epilogue: tuple[Action, ...]
    """Receives for a later program, and buffer writes, after the last op: no op may read a new value where it means the old one."""
    num_slots: int
    loss_slot: int | None
    slot_of: Mapping[Key, int] = field(default_factory=dict)
    writes: tuple[Action, ...] = ()
    """Buffer writes that are left to the caller, who does them when no device has failed."""
    make_slots: Callable[[int], Slots] = lambda size: [None] * size
    """Makes so many slots, with nothing in them."""

    def empty(self, size: int = 0) -> Slots:
        """Slots to run on; of another program, too, that has so many."""
        return self.make_slots(max(size, self.num_slots))

    @cached_property
    def actions(self) -> tuple[tuple[int | None, Action], ...]:
        """All instructions in order, each with its op; None in the epilogue."""
        of_ops = ((s.op, action) for s in self.segments for action in (*s.arrivals, *s.views, s.compute, *s.after))
        return (*of_ops, *((None, action) for action in self.epilogue))

    def skipping(self, ops: Collection[int]) -> "LoweredProgram":
        """The program without what these ops compute: their readers find zeros."""
        segments = (replace(s, compute=s.skip) if s.op in ops and s.skip is not None else s for s in self.segments)
        return replace(self, segments=tuple(segments))

    def run(self, slots: Slots | None = None) -> Slots:
        """One step of this program, on what earlier programs of the device left in `slots`; the slots hold what is left: the loss and
        the new values of buffers.

        Raises OpError, naming the op, for whatever an instruction raises; the project's own errors pass.
        """
        if slots is None:
            slots = self.empty()
        op = None
        try:
            with torch.no_grad():
                for op, action in self.actions:  # noqa: B007 - read where an instruction fails
                    action(slots)
        except BaechiError:
            raise
        except Exception as e:
            raise OpError(op, e, self.live(slots)) from e
        return slots

    def live(self, slots: Slots) -> Storages:
        """The tensors in the slots, by their names in the graph; views go by what they look at, where that is here."""
        keys = sorted(self.slot_of.items(), key=lambda item: not isinstance(item[0], tuple))
        return storages_of((key[1] if isinstance(key, tuple) else key.name, slots[slot]) for key, slot in keys)


class Exchange(Protocol):
    """Carries tensors from device to device: Mailboxes between threads, Channels between processes."""

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        """A function that sends a value of `tensor` to device `target`. `gone` is called when a send is over for its sender."""

    def taker(self, tensor: int, target: int) -> Callable[[], Any]:
        """A function that waits for `tensor` at device `target`."""


class HandingStep(Protocol):
    """A step that is part of a caller's own, which it takes gradients from and hands results over to: of a binding without a loss."""

    tangents: Sequence[torch.Tensor | None] | None
    outputs: list[torch.Tensor]
    gradients: dict[str | int, torch.Tensor]


@dataclass(frozen=True)
class StepContext:
    """State that all devices of one placed step share."""

    graph: OpGraph
    binding: Binding
    step: TrainingStep
    mailboxes: Exchange
    optimizers: dict[str, torch.optim.Optimizer]
    """For each parameter its own, so that an update can run as soon as its gradient is there, or one for several; see `updates`."""
    gradients: dict[str, torch.Tensor] | None = None
    """Where given, every gradient is kept in it; otherwise a gradient lives until its update."""
    pre_hooks: Mapping[int, tuple[Action, ...]] = field(default_factory=dict)
    """Op -> what to do before it, e.g. to announce that tensors may come in."""
    state_in_slots: bool = False
    """Parameters and buffers are read from their nodes' slots, which are filled before a program runs; otherwise they are the step's."""


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
        coming: list[Action] = []
        received: set[int] = set()
        for instruction in program:
            match instruction:
                case Receive(tensor=t):
                    coming.append(self._receive(t))
                    received.add(t)
                case Run(op=v):
                    views = tuple(self._call(view) for view in bound[v].views if view not in made)
                    made.update(bound[v].views)
                    compute = self._compute(v)
                    frees = self._free([view for view in bound[v].views if last_use.get(view) == v])
                    arrivals = (*context.pre_hooks.get(v, ()), *coming)
                    segments.append(Segment(v, arrivals, views, compute, frees, self._skip(v)))
                    coming = []
                case Send(tensor=t, target=target):
                    segments[-1] = replace(segments[-1], after=(*segments[-1].after, self._send(t, target)))
                case Free(tensor=t) if self._tensor_key(t) not in self._kept:
                    segments[-1] = replace(segments[-1], after=(*segments[-1].after, *self._free([self._tensor_key(t)])))
                    if t in received and self.device.let_go is not None:
                        segments[-1] = replace(segments[-1], after=(*segments[-1].after, self.device.let_go))
        loss = context.binding.loss if any(s.op == context.binding.loss_op for s in segments) else None
        loss_slot = None if loss is None else self._slot(loss)
        writes = tuple(self._write(*write) for s in segments for write in context.binding.buffer_writes.get(s.op, ()))
        apart = context.state_in_slots
        epilogue = tuple(coming) if apart else (*coming, *writes)
        return LoweredProgram(tuple(segments), epilogue, len(self.slot_of), loss_slot, dict(self.slot_of), writes if apart else ())

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
        """Keys of what is needed after the last op: the loss and the new values of buffers."""
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

        def receive(slots: Slots) -> None:
            slots[slot] = take()

        return receive

    def _send(self, tensor: int, target: int) -> Action:
        slot, give = self._slot_of_key(self._tensor_key(tensor)), self.context.mailboxes.giver(tensor, target)
        if moves_nothing(self.context.graph.tensors[tensor]):
            token = torch.empty_like(TOKEN, device=self.device.torch_device)
            return lambda _: give(token)

        def send(slots: Slots) -> None:
            give(slots[slot])

        return send

    def _free(self, keys: Sequence[Key]) -> tuple[Action, ...]:
        freed = tuple(self._slot_of_key(k) for k in keys)
        if not freed:
            return ()

        def free(slots: Slots) -> None:
            for slot in freed:
                slots[slot] = None

        return (free,)

    def _compute(self, v: int) -> Action:
        """The op's closure, which fills its slots."""
        bound = self.context.binding.ops[v]
        if bound.input_index is not None:
            return self._input(v, bound.input_index, bound.rows)
        if bound.state is not None:
            return self._read_state(v, bound.state)
        if bound.parameters and self._has_loss:
            return self._update(bound)
        key = self.context.binding.state_names[bound.parameters[0]] if bound.parameters else bound.input_gradient
        if key is not None:
            return self._hand_over_gradient(bound, key)
        if bound.tangents:
            return self._take_tangents(bound)
        if bound.node is None:  # the end of a pass that may return nothing but what it was given
            return self._hand_over_outputs(bound)
        if isinstance(bound.node.meta["val"], (tuple, list)):
            return self._call(bound.node, {int(key[1].rsplit(":", 1)[1]): self._slot_of_key(key) for key in self._keys_of.get(v, ())})
        return self._call(bound.node)

    def _skip(self, v: int) -> Action | None:
        """Fills the slots of a call's op with zeros."""
        node = self.context.binding.ops[v].node
        if node is None or self._has_loss:
            return None
        value, device = node.meta["val"], self.device.torch_device
        if isinstance(value, (tuple, list)):
            places = [(self._slot_of_key(key), value[int(key[1].rsplit(":", 1)[1])]) for key in self._keys_of.get(v, ())]
        else:
            places = [(self._slot(node), value)]

        def skip(slots: Slots) -> None:
            for slot, like in places:
                slots[slot] = torch.zeros(like.shape, dtype=like.dtype, device=device, layout=like.layout)

        return skip

    @property
    def _has_loss(self) -> bool:
        """True for a training step; a call has none."""
        return self.context.binding.loss is not None

    @cached_property
    def _keys_of(self) -> dict[int, list[tuple[int, str]]]:
        keys: dict[int, list[tuple[int, str]]] = {}
        for key in dict.fromkeys(self.context.binding.home.values()):
            keys.setdefault(key[0], []).append(key)
        return keys

    def _read_state(self, v: int, name: str) -> Action:
        """Fills the op's slot with a parameter or buffer as it stands: by reference, since its update waits for all readers; a buffer that
        the step writes by value, since nobody waits for its readers."""
        slot, value = self._slot_of_key(self._keys_of[v][0]), self.state[name]
        copied = any(name == written for writes in self.context.binding.buffer_writes.values() for written, _ in writes)

        def read(slots: Slots) -> None:
            slots[slot] = value.data.clone() if copied else value.data

        return read

    def _input(self, v: int, index: int, rows: tuple[int, int, int] | None) -> Action:
        slot = self._slot_of_key(self._keys_of[v][0])
        step, device = self.context.step, self.device.torch_device

        def here() -> torch.Tensor:
            value = step.inputs[index]
            return (value if rows is None else value.narrow(*rows).contiguous()).to(device)

        def read(slots: Slots) -> None:
            slots[slot] = here()

        # A step's own inputs are there once and for all, as eager's are; a call has others every time.
        kept = torch.ones((), device=device) if index < 0 else here() if device.type != "cpu" and self._has_loss else None

        def read_kept(slots: Slots) -> None:
            slots[slot] = kept

        return read if kept is None else read_kept

    def _update(self, bound: BoundOp) -> Action:
        """Adds up the gradients of a parameter's names, and steps its optimizer, if it is the last of those that this updates together."""
        name = self.context.binding.state_names[bound.parameters[0]]
        parameter, optimizer, kept = self.state[name], self.context.optimizers[name], self.context.gradients
        summed, let_go = self._sum_of_gradients(bound), self.device.let_go
        together = optimizer.param_groups[0]["params"]

        def take(slots: Slots) -> None:
            parameter.grad = summed(slots)
            if kept is not None:
                kept[name] = parameter.grad

        def update(slots: Slots) -> None:
            take(slots)
            optimizer.step()
            for each in together:
                each.grad = None
            if let_go is not None:
                let_go(slots)

        return update if together[-1] is parameter else take

    def _hand_over_gradient(self, bound: BoundOp, key: str | int) -> Action:
        """Adds up the gradients of a parameter's names, or of an input, and gives the sum to the step."""
        step, summed = cast(HandingStep, self.context.step), self._sum_of_gradients(bound)

        def hand_over(slots: Slots) -> None:
            step.gradients[key] = summed(slots)

        return hand_over

    def _sum_of_gradients(self, bound: BoundOp) -> Callable[[Slots], torch.Tensor]:
        first, *rest = [self._slot(g) for g in bound.gradients]
        return lambda slots: reduce(lambda total, slot: total + slots[slot], rest, slots[first])

    def _hand_over_outputs(self, bound: BoundOp) -> Action:
        step, places = cast(HandingStep, self.context.step), [(self.constant(node), self._slot(node)) for node in bound.outputs]

        def hand_over(slots: Slots) -> None:
            step.outputs = [slots[slot] if constant is None else constant for constant, slot in places]

        return hand_over

    def _take_tangents(self, bound: BoundOp) -> Action:
        """Takes the gradient that the step was given for each output: zeros where one is missing, ones where it was given none at all, as
        when it is profiled."""
        step, device = cast(HandingStep, self.context.step), self.device.torch_device
        places = [(self._slot(node), node.meta["val"]) for node in bound.tangents]

        def take(slots: Slots) -> None:
            given = step.tangents
            for i, (slot, like) in enumerate(places):
                if given is None:
                    slots[slot] = torch.ones(like.shape, dtype=like.dtype, device=device)
                elif (own := given[i]) is None:
                    slots[slot] = torch.zeros(like.shape, dtype=like.dtype, device=device)
                else:
                    slots[slot] = own.to(device)

        return take

    def _write(self, name: str, node: fx.Node) -> Action:
        # Through .data, as BatchNorm does it: for autograd it is no change of what a backward pass reads.
        slot = self._slot(node)
        if self.context.state_in_slots:
            states = self.context.binding.state_nodes.items()
            held = self._slot(next(n for n, own in states if own == name and n.graph is node.graph))
            return lambda slots: slots[held].data.copy_(slots[slot])
        buffer = self.state[name]
        return lambda slots: buffer.data.copy_(slots[slot])

    def _call(self, node: fx.Node, elements: Mapping[int, int] | None = None) -> Action:
        """Calls the node's target on its arguments; fills the node's slot, or the slots of the elements that are read."""
        device = self.device.torch_device
        target = runnable(node, device)
        named = {k: self._argument(device if isinstance(a, torch.device) else a) for k, a in node.kwargs.items()}
        if fixed := {k: constant for k, (constant, fill) in named.items() if fill is None}:
            target = partial(target, **fixed)
        filled = [k for k in named if k not in fixed]
        if filled:
            target = _by_position(target, filled)
        args = _filler([*map(self._argument, node.args), *(named[k] for k in filled)])
        if elements is not None:
            wanted = tuple(elements.items())

            def call_tuple(slots: Slots) -> None:
                value = target(*args(slots))
                for element, slot in wanted:
                    slots[slot] = value[element]

            return call_tuple
        slot = self._slot(node)

        def call(slots: Slots) -> None:
            slots[slot] = target(*args(slots))

        return call

    def _argument(self, argument: Any) -> "_Argument":
        if isinstance(argument, fx.Node):
            constant = self.constant(argument)
            return (constant, None) if constant is not None else (None, operator.itemgetter(self._slot(argument)))
        if isinstance(argument, (list, tuple)):
            parts = [self._argument(a) for a in argument]
            is_constant = all(fill is None for _, fill in parts)
            return (type(argument)(constant for constant, _ in parts), None) if is_constant else (None, _filler(parts))
        return argument, None

    def constant(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a node before the step runs: a parameter, a buffer, or a constant of the graph; None where it has none by then."""
        binding = self.context.binding
        if node in binding.state_nodes:
            return None if self.context.state_in_slots else self.state[binding.state_nodes[node]]
        if node in binding.constants:
            return binding.constants[node].to(self.device.torch_device)
        return None


def _by_position(target: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The function, which takes those of these names as its last positional arguments."""
    return lambda *args: target(*args[: -len(names)], **dict(zip(names, args[-len(names) :], strict=True)))


_Argument = tuple[Any, Callable[[Slots], Any] | None]
"""(constant, None) or (None, function of the slots)."""


def _filler(arguments: Sequence[_Argument]) -> Callable[[Slots], list[Any]]:
    """Arguments as a function of the slots: constants are put in once, slots are filled in at each call."""
    template = [constant for constant, _ in arguments]
    fills = [(i, f) for i, (_, f) in enumerate(arguments) if f is not None]

    def fill(slots: Slots) -> list[Any]:
        filled = template.copy()
        for i, f in fills:
            filled[i] = f(slots)
        return filled

    return fill
