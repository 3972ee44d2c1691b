"""What a process of a group notes of a recorded step: when each call ran, forward and backward, and when parts were on their way."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from runtime.hybrid.wires import Key, Wires
from runtime.processes.noting_channels import NotingWork

Span = tuple[int, int]


class CallLog:
    """Nanoseconds of the host's monotonic clock. A call is run forward by a function, its moves' functions before it, and backward by the
    nodes of autograd that these made: a node runs by itself, so that a call's backward pass is from its first to its last. A leaf, where
    gradients of what pieces share are added up, has its turns right behind the nodes that it gets them from, and goes with each."""

    def __init__(self) -> None:
        self._forward: dict[str, Span] = {}
        self._backward: dict[str, Span] = {}
        self.sent: dict[Key, Span] = {}
        self.received: dict[Key, Span] = {}
        self._nodes: set[Any] = set()
        """Of this step: as long as they are held here they are told apart."""
        self._hooks: list[RemovableHandle] = []
        self._last = ""
        """The call whose node ran last."""

    def begin(self) -> None:
        """Before a step, and after the last: a clean sheet. Leaves outlive their step, so that hooks on them have to be taken back."""
        for hook in self._hooks:
            hook.remove()
        for notes in (self._forward, self._backward, self.sent, self.received, self._nodes, self._hooks):
            notes.clear()
        self._last = ""

    def noting(self, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which is of the call of that name, and notes when it and what autograd does for it run."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic_ns()
            result = function(*args, **kwargs)
            _extend(self._forward, call, begin, time.monotonic_ns())
            self._watch(call, result)
            return result

        return noted

    def calls(self) -> list[tuple[str, str, int, int]]:
        """Call, phase, start and end."""
        phases = ("forward", self._forward), ("backward", self._backward)
        return [(call, phase, *span) for phase, spans in phases for call, span in spans.items()]

    def _watch(self, call: str, result: Any) -> None:
        """Notes when the nodes run backward that lead from a result to what was there before."""
        todo = [r.grad_fn for r in (result if isinstance(result, list | tuple) else [result]) if isinstance(r, Tensor)]
        while todo:
            node = todo.pop()
            if node is None or node in self._nodes:
                continue
            self._nodes.add(node)
            todo += [before for before, _ in node.next_functions]
            whose = call if node.next_functions else None
            started: list[int] = []
            self._hooks += [
                node.register_prehook(lambda _, started=started: started.append(time.monotonic_ns())),
                node.register_hook(lambda *_, whose=whose, started=started: self._ran(whose, started[-1])),
            ]

    def _ran(self, call: str | None, start: int) -> None:
        """A node of a call ran; a leaf is of none."""
        self._last = call or self._last
        _extend(self._backward, self._last, start, time.monotonic_ns())


class NotingWires(Wires):
    """Wires that note when parts are on their way."""

    log: CallLog

    def give(self, key: Key, value: Tensor) -> None:
        """See `Wires`."""
        begin = time.monotonic_ns()
        self.log.sent[key] = begin, begin
        super().give(key, value)

    def take(self, key: Key) -> Tensor:
        """See `Wires`."""
        begin = time.monotonic_ns()
        value = super().take(key)
        self.log.received[key] = begin, time.monotonic_ns()
        return value

    def _keep(self, key: Key, value: Tensor, work: torch.distributed.Work) -> None:
        super()._keep(key, value, NotingWork(work, self.log.sent, key))


def named(spans: dict[Key, Span], call_of: Callable[[fx.Node], str]) -> list[tuple[str, str, int, bool, int, int]]:
    """For other processes: value, the call it is of, group, whether it is the gradient, and the span."""
    return [(node.name, call_of(node), target, back, *span) for (node, target, back), span in spans.items()]


def _extend(spans: dict[str, Span], call: str, start: int, end: int) -> None:
    known = spans.get(call)
    spans[call] = (start, end) if known is None else (min(start, known[0]), max(end, known[1]))
