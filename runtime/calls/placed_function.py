"""A placed call in the middle of the caller's own computation: to autograd it is one function, from the module's parameters and inputs
to its outputs. Its forward runs the forward programs on all devices, its backward the backward programs with the gradients that come in."""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from baechi_ext.capture.torch_module import CapturedCall
from baechi_ext.capture.torch_private import backward_again
from baechi_ext.errors import ExecutionError
from runtime.calls.recording import CallRecorder, Phases
from runtime.thread_executor import StepTimes

NO_SECOND_ORDER = "a placed call has none of second order; leave this module unplaced, or go on unplaced with fallback"
Gradients = Mapping[str | int, Tensor]
_TIMES = 200


class Check(Protocol):
    """Looks on while a call's gradients are made from those of its outputs."""

    def compared(self, tangents: Sequence[Tensor | None], gradients: Gradients) -> Gradients:
        """The gradients to use."""

    def recorded(self, tangents: Sequence[Tensor | None], gradients: Gradients) -> Gradients:
        """The same gradients, made so that they have gradients themselves (create_graph=True), which a placed call can't give."""


@dataclass(frozen=True)
class LoadedCall:
    """A captured call that is placed and ready to run."""

    captured: CapturedCall
    placed: Phases
    live: Mapping[str, Tensor]
    """Parameters and buffers by their first name."""
    home: torch.device
    """Where the caller expects outputs."""
    times: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_TIMES))
    """Of the last calls that were neither checked nor recorded: forward and backward phase together."""
    recorder: CallRecorder | None = None

    def run(self, inputs: Sequence[Tensor], check: Check | None = None) -> list[Tensor]:
        """The outputs, which have gradients where the captured ones have."""
        names = [n for n in self.captured.reached_by if isinstance(n, str)]
        numbers = [i for i in self.captured.reached_by if isinstance(i, int)]
        call = _Call(self, tuple(inputs), (*names, *numbers), check)
        found = _Placed.apply(call, *(self.live[n] for n in names), *(inputs[i] for i in numbers))
        return [found] if isinstance(found, Tensor) else list(found)


class _Call:
    """One call under way."""

    def __init__(self, loaded: LoadedCall, inputs: tuple[Tensor, ...], wanted: tuple[str | int, ...], check: Check | None) -> None:
        self.loaded = loaded
        self.wanted = wanted
        self.check = check
        self.inputs = inputs
        self.kept: list[list[Any]] | None = None
        self._forward_times: StepTimes | None = None
        self.recorded = None if check is not None or loaded.recorder is None else loaded.recorder.phases()
        self.placed = loaded.placed if self.recorded is None else self.recorded

    def forward(self) -> list[Tensor]:
        loaded, inputs = self.loaded, self.inputs
        outputs, self.kept, self._forward_times = self.placed.forward(inputs)
        captured = loaded.captured
        outputs = [o.to(loaded.home) for o in outputs]
        watched = {f"parameter or buffer {n!r}": loaded.live[n] for n in captured.saved_state}
        watched |= {f"input {i}": inputs[i] for i in captured.saved_inputs}
        watched |= {f"output {i}": outputs[i] for i in captured.saved_outputs}
        # Held weakly: an output holds this call, and what is gone can't be changed any more.
        self._watched = [(what, weakref.ref(tensor), tensor._version) for what, tensor in watched.items()]
        return outputs

    def backward(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        recorded = torch.is_grad_enabled()
        if recorded and self.check is None:
            raise ExecutionError(f"gradients are to have gradients (create_graph=True): {NO_SECOND_ORDER}")
        with torch.no_grad():
            gradients = self._gradients(tangents)
        if self.check is not None:
            gradients = (self.check.recorded if recorded else self.check.compared)(tangents, gradients)
        return [gradients.get(n) for n in self.wanted]

    def _gradients(self, tangents: Sequence[Tensor | None]) -> dict[str | int, Tensor]:
        if self.kept is None:
            raise RuntimeError(
                "backward was called a second time for one call of a placed module, whose values are freed; "
                "give retain_graph=True to the first"
            )
        for what, held, version in self._watched:
            tensor = held()
            if tensor is not None and tensor._version != version:
                raise RuntimeError(f"{what} of a placed module was changed in place between its call and backward, which needs it")
        again = backward_again()
        kept = [slots.copy() for slots in self.kept] if again else self.kept
        if not again:
            self.kept = None
        captured = self.loaded.captured
        given = [t for t, d in zip(tangents, captured.differentiable, strict=True) if d]
        gradients, times = self.placed.backward(given, kept)
        self._take(times)
        used = {i for i, t in enumerate(tangents) if t is not None}
        reached = {n: g for n, g in gradients.items() if not captured.reached_by[n].isdisjoint(used)}
        return _apart(reached, [*(t for t in tangents if t is not None), *self.inputs])


    def _take(self, times: StepTimes) -> None:
        """Of the backward phase, which may be run a second time."""
        forward, self._forward_times = self._forward_times, None
        if forward is None or self.check is not None:
            return
        if self.recorded is not None:
            self.loaded.recorder.take(forward, times)  # type: ignore[union-attr]
        else:
            busy_us = tuple(a + b for a, b in zip(forward.busy_us, times.busy_us, strict=True))
            self.loaded.times.append(StepTimes(forward.wall_us + times.wall_us, busy_us))


def _apart(gradients: Gradients, others: Sequence[Tensor]) -> dict[str | int, Tensor]:
    """The gradients, those that share memory with another one or with `others` as copies: the caller may add to each in place."""
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
        differentiable = call.loaded.captured.differentiable
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.call.backward(tangents))
