"""Tensors on their way between the CUDA devices of one process. The host waits for none of them: streams do, for events."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from baechi_ext.simulate import Timeline
from baechi_runtime.torch.lowering.devices import CudaDevice
from baechi_runtime.torch.lowering.ops import Action
from baechi_runtime.torch.lowering.program import moves_nothing

Copy = tuple[torch.Tensor, torch.cuda.Event]
"""A tensor, and the event behind which it is there."""


class Handovers:
    """An Exchange whose copies begin as soon as a tensor is computed. The sender keeps it until the copy is predicted to be done, and then
    waits for that on its own stream; with `phases` until the phase is over."""

    def __init__(self, timeline: Timeline, devices: Sequence[CudaDevice], *, phases: bool = False) -> None:
        self._timeline, self._devices = timeline, devices
        self._here: dict[tuple[int, int], Copy] = {}
        self._going: dict[tuple[int, int], Copy] = {}
        self.pre_hooks: dict[int, tuple[Action, ...]] = {}
        if not phases:
            self._let_go_when_predicted()

    def _let_go_when_predicted(self) -> None:
        order, start_us = self._timeline.device_order(), self._timeline.start_us
        position = {v: i for ops in order for i, v in enumerate(ops)}
        for sent in self._timeline.transfers:
            here = order[sent.source]
            made_at = position[self._timeline.graph.tensors[sent.tensor].producer]
            after = max(made_at + 1, bisect_left(here, sent.end_us, key=start_us.__getitem__))
            if after < len(here) and not moves_nothing(self._timeline.graph.tensors[sent.tensor]):
                hook = partial(self._let_go, sent.source, (sent.tensor, sent.target))
                self.pre_hooks[here[after]] = (*self.pre_hooks.get(here[after], ()), hook)

    def _let_go(self, source: int, sent: tuple[int, int], _: Any = None) -> None:
        _, done = self._going.pop(sent)
        self._devices[source].compute.wait_event(done)

    def begin(self) -> None:
        """Before a step, or a phase of one, with all devices idle; what a failed one left is dropped."""
        self._here.clear()
        self._going.clear()
        for device in self._devices:
            device.begin()

    def end(self) -> None:
        """After it: what comes next on each device comes after its copies."""
        for (tensor, target) in list(self._going):
            self._let_go(self._source(tensor), (tensor, target))

    def _source(self, tensor: int) -> int:
        return self._timeline.placement[self._timeline.graph.tensors[tensor].producer]

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[torch.Tensor], None]:
        """A function that begins to send a value of `tensor` to device `target`. `gone` is not called: the host does not know."""
        key, source, taker = (tensor, target), self._devices[self._source(tensor)], self._devices[target]
        here, going = self._here, self._going
        if moves_nothing(self._timeline.graph.tensors[tensor]):

            def tell(token: torch.Tensor) -> None:
                here[key] = token, source.compute.record_event()

            return tell

        def give(value: torch.Tensor) -> None:
            copy, done = taker.take_in(value, source)
            here[key], going[key] = (copy, done), (value, done)

        return give

    def taker(self, tensor: int, target: int) -> Callable[[], torch.Tensor]:
        """A function that returns the value of `tensor` on device `target`, whose stream waits for it."""
        key, here, wait = (tensor, target), self._here, self._devices[target].compute.wait_event

        def take() -> torch.Tensor:
            value, done = here.pop(key)
            wait(done)
            return value

        return take
