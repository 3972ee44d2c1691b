"""A placed fragment in the middle of the caller's own computation: to autograd it is one function, from those arguments that are trained to
its outputs. Its forward runs the forward programs on all devices, its backward the backward programs with the gradients that come in."""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from baechi_ext.capture.torch_fragments import CapturedFragment
from baechi_ext.capture.torch_private import backward_again
from baechi_ext.errors import BaechiError
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.torch.calls.phases import Phases
from baechi_runtime.torch.calls.recording import CallRecorder

Gradients = Mapping[int, Tensor]
"""Gradients by argument."""
Check = Callable[[Sequence[Tensor | None], Gradients], Gradients]
"""Checks a call's gradients, made from those of its outputs; returns those to use."""
_TIMES = 200


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
    failed: Callable[[BaechiError], None] | None = None
    """Told why a backward pass ran unplaced; raises where that is not wanted."""

    def run(self, args: Sequence[Tensor], check: Check | None = None) -> tuple[Tensor, ...]:
        """Run the fragment; its results have gradients where those of the captured one have."""
        wanted = tuple(self.part.reached_by)  # a call with others would have been traced anew
        found = _APPLY(_Call(self, tuple(args), wanted, check), *[args[i] for i in wanted])
        outputs = [found] if isinstance(found, Tensor) else found
        return tuple(r.of(outputs, args) for r in self.part.returned)


class _Call:
    """One call under way."""

    def __init__(self, loaded: LoadedFragment, args: tuple[Tensor, ...], wanted: tuple[int, ...], check: Check | None) -> None:
        self.loaded, self.args, self.wanted, self.check = loaded, args, wanted, check
        self.kept: list[list[Any]] | None = None
        self._forward_times: StepTimes | None = None
        self.recorded = None if check is not None or loaded.recorder is None else loaded.recorder.phases()
        self.placed = loaded.placed if self.recorded is None else self.recorded
        self.random: Tensor | None = None
        """The generator's state before the call, where it draws random numbers."""
        self.autocast = (torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"))

    def forward(self) -> list[Tensor]:
        part, args = self.loaded.part, self.args
        if part.seeded:
            self.random = torch.get_rng_state()
        self._before = {i: args[i].detach().clone() for i in self.loaded.counted if i in part.consumed}
        try:
            outputs, self.kept, self._forward_times = self.placed.forward(args)
        except BaechiError:
            if self.random is not None:
                torch.set_rng_state(self.random)
            raise
        if self.loaded.counted:
            torch.autograd.graph.increment_version([args[i] for i in self.loaded.counted])
        home = args[0].device if args else torch.device("cpu")
        outputs = [o if o.device == home else o.to(home) for o in outputs]
        self._versions = [a._version for a in args]
        # Held weakly: an output holds this call, and what is gone can't be changed any more.
        self._outputs = [(i, weakref.ref(outputs[i]), outputs[i]._version) for i in part.saved_outputs]
        return outputs

    def backward(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        if torch.is_grad_enabled():
            gradients: Gradients = self._unplaced(tangents, recorded=True)
        else:
            try:
                gradients = self._gradients(tangents)
            except BaechiError as e:
                if self.loaded.failed is None:
                    raise
                gradients = self._unplaced(tangents, recorded=False)
                self.loaded.failed(e)
            else:
                if self.check is not None:
                    gradients = self.check(tangents, gradients)
        return [gradients.get(i) for i in self.wanted]

    def _unplaced(self, tangents: Sequence[Tensor | None], *, recorded: bool) -> Gradients:
        """The gradients from another run of the fragment as the user's code runs it, from the same random state; `recorded`, for
        create_graph=True, they have gradients of their own."""
        written = self.loaded.part.written
        self._require_unchanged([i for i in range(len(self.args)) if i not in written])
        buffers = {i: self._before.get(i, self.args[i]).detach().clone() for i in written}
        args = [buffers.get(i, a) for i, a in enumerate(self.args)]
        with torch.random.fork_rng(devices=(), enabled=self.random is not None), torch.enable_grad(), torch.autocast("cpu", *self.autocast):
            if self.random is not None:
                torch.set_rng_state(self.random)
            outputs = self.loaded.part.outputs_among(self.loaded.graph(*args))
        used = [(i, t) for i, t in enumerate(tangents) if t is not None]
        if any(i not in outputs for i, _ in used):
            raise RuntimeError("gradients of gradients through views that a placed call returned can't be had; return copies (.clone())")
        sources = [self.args[i] for i in self.wanted]
        roots, given = [outputs[i] for i, _ in used], [t for _, t in used]
        found = torch.autograd.grad(roots, sources, given, allow_unused=True, create_graph=recorded)
        return {i: g for i, g in zip(self.wanted, found, strict=True) if g is not None}

    def _require_unchanged(self, read: Sequence[int]) -> None:
        """Raises RuntimeError where one of the arguments `read`, or an output that the backward pass reads, was changed since the call."""
        part, args = self.loaded.part, self.args
        changed = [f"argument {part.state.get(i, i)}" for i in read if args[i]._version != self._versions[i]]
        held = ((i, ref(), version) for i, ref, version in self._outputs)
        changed += [f"output {i}" for i, tensor, version in held if tensor is not None and tensor._version != version]
        if changed:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: {changed[0]} of a placed "
                "call was changed between the call and its backward pass"
            )

    def _gradients(self, tangents: Sequence[Tensor | None]) -> dict[int, Tensor]:
        if self.kept is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the values of a placed call are freed; "
                "give retain_graph=True to the first backward pass"
            )
        self._require_unchanged(self.loaded.part.saved_args)
        again = backward_again()
        kept = [slots.copy() for slots in self.kept] if again else self.kept
        if not again:
            self.kept = None
        part = self.loaded.part
        given = [t for t, d in zip(tangents, part.differentiable, strict=True) if d]
        gradients, times = self.placed.backward(given, kept)
        self._take(times)
        used = {i for i, t in enumerate(tangents) if t is not None}
        reached = {n: g for n, g in gradients.items() if not part.reached_by[n].isdisjoint(used)}
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
"""Function.apply without its look at each argument for what function transforms have left; a call under those is not placed."""
