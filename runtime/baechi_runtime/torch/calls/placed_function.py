"""A placed fragment in the middle of the caller's own computation: to autograd it is one function, from those arguments that are trained to
its outputs. Its forward runs the forward programs on all devices, its backward the backward programs with the gradients that come in.

Of several outputs each has a function of its own, behind which are the outputs that it is computed from: somebody may ask for the gradient
of one of those, as Grad-CAM does of feature maps, by torch.autograd.grad, retain_grad() or a hook.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_autocast import autocast_now, under
from baechi_ext.capture.torch_fragments import CapturedFragment
from baechi_ext.capture.torch_private import are_batched, backward_again, backward_pass, outside_vmap, reaches
from baechi_ext.errors import BaechiError, CaptureError
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.calls.phases import Phases
from baechi_runtime.torch.calls.recording import CallRecorder
from baechi_runtime.torch.lowering.random_state import RandomState, drawing_from, set_state, state_of

Gradients = Mapping[int, Tensor]
"""Gradients by argument."""
Check = Callable[[Sequence[Tensor | None], Gradients], Gradients]
"""Checks a call's gradients, made from those of its outputs; returns those to use."""
ASKED_FOR = "it returns what it also computes with, and a hook or retain_grad() asks for a gradient of that"
CASTS = "its backward pass runs under autocast, its forward pass, or a part of that, did not"
_FREED = (
    "Trying to backward through the graph a second time: the values of a placed call are freed; give retain_graph=True to the first "
    "backward pass"
)
_TIMES = 200


def share_memory(written: Iterable[int], args: Sequence[Tensor]) -> bool:
    """True if one of the arguments `written` lies on memory of another argument that is no parameter."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for i in written:
        spans.setdefault(args[i].untyped_storage().data_ptr(), []).append((i, *_span(args[i])))
    for i, a in enumerate(args):
        if type(a) is not nn.Parameter and a.layout == torch.strided and (others := spans.get(a.untyped_storage().data_ptr())):
            begin, end = _span(a)
            if any(j != i and begin < its_end and its_begin < end for j, its_begin, its_end in others):
                return True
    return False


def _span(a: Tensor) -> tuple[int, int]:
    """The addresses of its first byte and behind its last one; equal where it has none."""
    last = sum((size - 1) * stride for size, stride in zip(a.shape, a.stride(), strict=True)) if a.numel() else -1
    return a.data_ptr(), a.data_ptr() + (last + 1) * a.element_size()


@dataclass(frozen=True)
class LoadedFragment:
    """A captured fragment that is placed and ready to run."""

    part: CapturedFragment
    placed: Phases
    graph: Callable[..., Sequence[Tensor]]
    """The fragment as the user's code runs it; where parts of the batch may be normalised by themselves, with these."""
    times: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_TIMES))
    """Times of the last calls that were neither checked nor recorded: forward and backward phase together."""
    recorder: CallRecorder | None = None
    counted: tuple[int, ...] = ()
    """Arguments that it changes and of whose changes autograd keeps count: buffers, but for what BatchNorm averages."""
    casts: bool = True
    """False where a region of it switches autocast off."""
    failed: Callable[[BaechiError], None] | None = None
    """Told why a backward pass ran unplaced; raises where that is not wanted."""

    def run(self, args: Sequence[Tensor], check: Check | None = None) -> tuple[Tensor, ...]:
        """Run the fragment; its results have gradients where those of the captured one have."""
        wanted = tuple(self.part.reached_by)  # a call with others would have been traced anew
        call = _Call(self, tuple(args), wanted, check)
        found = _APPLY(call, *[args[i] for i in wanted])
        outputs = [found] if isinstance(found, Tensor) else [*found]
        if self.part.made_from:
            call.apart.join(call, outputs)
        return tuple(r.of(outputs, args) for r in self.part.returned)


class _Call:
    """One call under way."""

    def __init__(self, loaded: LoadedFragment, args: tuple[Tensor, ...], wanted: tuple[int, ...], check: Check | None) -> None:
        self.loaded, self.args, self.wanted, self.check = loaded, args, wanted, check
        self.kept: list[list[Any]] | None = None
        self._gone: set[frozenset[int]] = set()
        """The heads from which a backward pass has gone back, and freed what it read."""
        self._forward_times: StepTimes | None = None
        self.recorded = None if check is not None or loaded.recorder is None else loaded.recorder.phases()
        self.placed = loaded.placed if self.recorded is None else self.recorded
        self.random: Tensor | None = None
        """The generator's state before the call, where it draws random numbers."""
        self.foreign: RandomState | None = None
        """The state of all generators, where it calls ops of others, which may draw unseen."""
        self.apart = _Apart(loaded.part)
        self._starts: dict[int, Tensor] = {}
        """The wanted arguments as another run was given them."""
        self.autocast = autocast_now()

    def forward(self) -> list[Tensor]:
        part, args = self.loaded.part, self.args
        if part.draws_on is not None:
            self.random = state_of(part.draws_on)
        if part.calls_others:
            self.foreign = RandomState()
        self._before = {i: args[i].detach().clone() for i in part.consumed}
        try:
            outputs, self.kept, self._forward_times = self.placed.forward(args)
        except BaechiError:
            if part.draws_on is not None and self.random is not None:
                set_state(part.draws_on, self.random)
            if self.foreign is not None:
                self.foreign.restore()
            raise
        if self.loaded.counted:
            torch.autograd.graph.increment_version([args[i] for i in self.loaded.counted])
        # Detached: autograd will tie them to this call, which keeps what a backward pass reads, perhaps themselves or views of them.
        outputs = [o.detach() if o.device == home else o.to(home) for o, home in zip(outputs, part.devices, strict=True)]
        self._versions = [a._version for a in args]
        # Held weakly: an output holds this call, and what is gone can't be changed any more.
        self._outputs = {i: (weakref.ref(outputs[i]), outputs[i]._version) for i in part.saved_outputs}
        return self.apart.stood_in_for(outputs)

    def backward(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        tangents = self.apart.taken_in(tangents)
        heads = self._heads_of(tangents)
        casts = any(torch.is_autocast_enabled(kind) and not (did and self.loaded.casts) for kind, _, did in self.autocast)
        if casts and self.loaded.failed is not None:
            self.loaded.failed(CaptureError(CASTS))
        if casts or torch.is_grad_enabled() or self.apart.asked_for or are_batched(tangents):
            gradients: Gradients = self._unplaced(tangents, recorded=torch.is_grad_enabled())
        else:
            gradients = self._compared(tangents, heads)
        if not backward_again():
            self._gone |= heads
            if len(self._gone) == len(self.loaded.part.heads):
                self._let_go()
        return [gradients.get(i) for i in self.wanted]

    def _compared(self, tangents: Sequence[Tensor | None], heads: set[frozenset[int]]) -> Gradients:
        """The gradients, checked where they are to be; unplaced ones where that fails. Either draws the same random numbers, if any."""
        device = self.loaded.part.draws_on
        before = None if device is None else state_of(device)
        try:
            gradients: Gradients = self._gradients(tangents, heads)
        except BaechiError as e:
            if self.loaded.failed is None:
                raise
            if device is not None and before is not None:
                set_state(device, before)
            gradients = self._unplaced(tangents, recorded=False)
            self.loaded.failed(e)
            return gradients
        if self.check is None:
            return gradients
        if device is None or before is None or torch.equal(before, after := state_of(device)):
            return self.check(tangents, gradients)
        set_state(device, before)
        try:
            return self.check(tangents, gradients)
        finally:
            set_state(device, after)

    def _heads_of(self, tangents: Sequence[Tensor | None]) -> set[frozenset[int]]:
        """The heads that gradients come to. Raises RuntimeError where what one read is freed."""
        used = {i for i, t in enumerate(tangents) if t is not None}
        heads = {head for head in self.loaded.part.heads if not used.isdisjoint(head)}
        if self.kept is None or not heads.isdisjoint(self._gone):
            raise RuntimeError(_FREED)
        return heads

    def _let_go(self) -> None:
        """Whoever keeps the loss has this call, but no more of its batch than unplaced."""
        self.kept, self.args, self.check, self.random = None, (), None, None
        self._before, self._starts, self.foreign = {}, {}, None

    def _unplaced(self, tangents: Sequence[Tensor | None], *, recorded: bool) -> Gradients:
        """The gradients from another run of the fragment as the user's code runs it; `recorded`, for create_graph=True, they have gradients
        of their own."""
        again, self.apart.again = self.apart.again, {}
        outputs, used = again or self.run_again(), {i: t for i, t in enumerate(tangents) if t is not None}
        if any(i not in outputs for i in used):
            raise RuntimeError("gradients of gradients through views that a placed call returned can't be had; return copies (.clone())")
        with self.apart.cut(outputs, used):
            starts = [self._starts[i] for i in self.wanted]
            found = torch.autograd.grad(
                [outputs[i] for i in used], starts, [*used.values()], allow_unused=True, create_graph=recorded
            )
        return {i: g for i, g in zip(self.wanted, found, strict=True) if g is not None}

    def run_again(self) -> dict[int, Tensor]:
        """The outputs, by their numbers, of another run of the fragment as the user's code runs it, from the same random state.

        Where an argument was computed from another, or is another, it starts from aliases: gradients of one then have no part that goes
        through the other, which the caller's own backward pass adds. Of leaves autocast keeps a copy for all readers, of aliases not.
        """
        if not self.args:
            raise RuntimeError(_FREED)
        written = self.loaded.part.written
        self._require_unchanged([i for i in range(len(self.args)) if i not in written], list(self._outputs))
        buffers = {i: self._before.get(i, self.args[i]).detach().clone() for i in written}
        with torch.enable_grad(), outside_vmap(), ExitStack() as stack:
            self._starts = {i: self.args[i] for i in self.wanted}
            if len({*map(id, self._starts.values())}) < len(self._starts) or not all(a.is_leaf for a in self._starts.values()):
                self._starts = {i: a.view_as(a) if a.layout == torch.strided else a for i, a in self._starts.items()}
            args = [buffers.get(i, self._starts.get(i, a)) for i, a in enumerate(self.args)]
            stack.enter_context(under(self.autocast))
            if self.random is not None and (device := self.loaded.part.draws_on) is not None:
                stack.enter_context(drawing_from(self.random, device))
            if self.foreign is not None:
                stack.callback(RandomState().restore)
                self.foreign.restore()
            return self.loaded.part.outputs_among(self.loaded.graph(*args))

    def _require_unchanged(self, read: Iterable[int], outputs: Iterable[int]) -> None:
        """Raises RuntimeError where one of the arguments `read`, or of the outputs, was changed since the call."""
        part, args = self.loaded.part, self.args
        changed = [f"argument {part.state.get(i, i)}" for i in read if args[i]._version != self._versions[i]]
        held = ((i, self._outputs[i][0](), self._outputs[i][1]) for i in outputs)
        changed += [f"output {i}" for i, tensor, version in held if tensor is not None and tensor._version != version]
        if changed:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: {changed[0]} of a placed "
                "call was changed between the call and its backward pass"
            )

    def _gradients(self, tangents: Sequence[Tensor | None], heads: set[frozenset[int]]) -> dict[int, Tensor]:
        part = self.loaded.part
        used = {i for i, t in enumerate(tangents) if t is not None}
        read = ([i for i, o in saved.items() if not used.isdisjoint(o)] for saved in (part.saved_args, part.saved_outputs))
        self._require_unchanged(*read)
        kept: list[list[Any]] = self.kept or []
        # Another head may have its own pass, perhaps after an optimizer's step.
        if backward_again() or len(self._gone | heads) < len(part.heads):
            kept = [slots.copy() for slots in kept]
        else:
            self.kept = None
        given = [t for t, d in zip(tangents, part.differentiable, strict=True) if d]
        gradients, times = self.placed.backward(given, kept)
        self._take(times)
        reached = {n: g for n, g in gradients.items() if not (part.reached_by[n] and part.reached_by[n].isdisjoint(used))}
        home = {n: g if g.device == self.args[n].device else g.to(self.args[n].device) for n, g in reached.items()}
        return _apart(home, [*(t for t in tangents if t is not None), *self.args])

    def _take(self, times: StepTimes) -> None:
        """Note the times of a backward phase; a second one of the same call is not counted."""
        forward, self._forward_times = self._forward_times, None
        if forward is None or self.check is not None:
            return
        if self.recorded is not None:
            self.loaded.recorder.take(forward, times)  # type: ignore[union-attr]
        else:
            busy_us = tuple(a + b for a, b in zip(forward.busy_us, times.busy_us, strict=True))
            self.loaded.times.append(StepTimes(forward.wall_us + times.wall_us, busy_us))


def _apart(gradients: Gradients, others: Sequence[Tensor]) -> dict[int, Tensor]:
    """The gradients, with copies of those that share memory with another one or with `others`: the caller may add to each in place."""
    taken = {t.untyped_storage().data_ptr() for t in others if t.layout == torch.strided}
    apart = {}
    for name, gradient in gradients.items():
        if gradient.layout != torch.strided:  # of an embedding with sparse=True: made for it alone
            apart[name] = gradient
            continue
        memory = gradient.untyped_storage().data_ptr()
        apart[name] = gradient.clone() if memory in taken else gradient
        taken.add(memory)
    return apart


class _Apart:
    """The outputs of a call, each with a function of its own. In a backward pass that is to show the gradient of one that others are
    computed from, an inner one, each of them makes its own gradients, from a run of the fragment as the user's code runs it."""

    def __init__(self, part: CapturedFragment) -> None:
        self._made_from = part.made_from
        self._inner = sorted(frozenset[int]().union(*self._made_from.values()))
        self._waiting: dict[int, Tensor] = {}
        """The outputs, until autograd has them."""
        self._shown: list[tuple[weakref.ref[Tensor], Mapping[int, Any] | None]] = []
        """Each inner output, and its hooks, which outlive it."""
        self._end: Any = None
        """Reached only by a backward pass that makes all gradients there are."""
        self._pass = -1
        self._tangents: dict[int, Tensor] = {}
        self.asked_for = False
        """True if the backward pass under way is to show the gradient of an inner output, or may be."""
        self.again: dict[int, Tensor] = {}
        """The outputs of the run for it."""

    def stood_in_for(self, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs, with empty tensors for those that get a function of their own."""
        self._waiting = {i: outputs[i] for i in self._made_from}
        return [o.new_empty(0, dtype=torch.float32) if i in self._waiting else o for i, o in enumerate(outputs)]

    def value(self, i: int) -> Tensor:
        return self._waiting.pop(i)

    def join(self, call: _Call, outputs: list[Tensor]) -> None:
        """Put what the empty tensors stand for in their places."""
        end = torch.empty(0, requires_grad=True).clone()
        self._end = end.grad_fn
        for i, made_from in self._made_from.items():
            outputs[i] = _BEHIND(call, i, end, outputs[i], *(outputs[j] for j in sorted(made_from)))
        for output in (outputs[j] for j in self._inner if outputs[j].requires_grad):
            output.register_hook(lambda _: None).remove()  # from now on it has a place for hooks
            self._shown.append((weakref.ref(output), output._backward_hooks))

    def behind(self, call: _Call, i: int, tangent: Tensor) -> list[Tensor | None]:
        """Take in the gradient of an output; returns those of the outputs that it is computed from, where somebody asks for one."""
        if self._begins():
            held = [(ref(), hooks) for ref, hooks in self._shown]
            shown = any(hooks or (o is not None and o.retains_grad) for o, hooks in held)
            self.asked_for = bool(held) and (shown or not reaches(self._end))
            # A pass that makes some gradients alone (torch.autograd.grad) may be after parameters', and the next one be another.
            if shown and call.loaded.failed is not None:
                call.loaded.failed(CaptureError(ASKED_FOR))
        self._tangents[i] = tangent
        others = sorted(self._made_from[i])
        if not self.asked_for or not others:
            return [None] * len(others)
        outputs = self.again = self.again or call.run_again()
        trained, recorded = [outputs[j] for j in others if outputs[j].requires_grad], torch.is_grad_enabled()
        with self.cut(outputs, {i: tangent}) as met:
            torch.autograd.grad(outputs[i], trained, tangent, allow_unused=True, retain_graph=True, create_graph=recorded)
        return [met.get(j) for j in others]

    def taken_in(self, tangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients that come in, with those of the outputs that empty tensors stood for."""
        self._begins()
        return [self._tangents.pop(i, None) if i in self._made_from else t for i, t in enumerate(tangents)]

    @contextmanager
    def cut(self, outputs: Mapping[int, Tensor], tangents: Mapping[int, Tensor]) -> Iterator[dict[int, Tensor]]:
        """Within, in a pass that is to show inner gradients, a pass back through `outputs` from these gradients goes on behind an inner
        output with its own gradient alone; what else comes to it is in the dict."""
        met: dict[int, Tensor] = {}

        def hook(j: int, gradient: Tensor) -> Tensor:
            met[j] = gradient
            return tangents[j] if j in tangents else torch.zeros_like(gradient)

        inner = [j for j in self._inner if j in outputs and outputs[j].requires_grad] if self.asked_for else []
        handles = [outputs[j].register_hook(partial(hook, j)) for j in inner]
        try:
            yield met
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self) -> bool:
        """True the first time that a backward pass comes here."""
        before, self._pass = self._pass, backward_pass()
        if before == self._pass:
            return False
        self._tangents, self.asked_for, self.again = {}, False, {}
        return True


class _Behind(torch.autograd.Function):
    """One of several outputs of a call, in place of the empty tensor that stood for it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, i: int, *tensors: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.i = call, i
        return call.apart.value(i)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor | None) -> tuple[Tensor | None, ...]:
        if tangent is None:
            return (None,) * len(ctx.needs_input_grad)
        others: list[Tensor | None] = ctx.call.apart.behind(ctx.call, ctx.i, tangent)
        return (None, None, None, tangent.new_empty(0, dtype=torch.float32), *others)


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        outputs = call.forward()
        differentiable = call.loaded.part.differentiable
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.call.backward(tangents))


_APPLY = super(torch.autograd.Function, _Placed).apply
_BEHIND = super(torch.autograd.Function, _Behind).apply
"""Function.apply without its look at each argument for what function transforms have left; a call under those is not placed."""
