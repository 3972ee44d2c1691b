"""The backward pass of a module that ran in blocks: each block's on its device's thread, as soon as the gradients of its results are
known; what is between them in the caller's thread. Independent branches go back at the same time.

Gradients of one tensor are added up in a fixed order, that of autograd: what read it last comes first. So the sums do not depend on who
was done first.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.calls.blocks.tape import BlockCall, Slot, Tape, leaves_of
from runtime.calls.blocks.threads import CALLER, Task, run_tasks


class Sum:
    """The gradients of one tensor, by the order of their readers."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._parts: dict[tuple[int, int], Tensor] = {}

    def add(self, order: tuple[int, int], gradient: Tensor) -> None:
        self._parts[order] = gradient

    def total(self) -> Tensor:
        """On the device of the tensor."""
        parts = [self._parts[order].to(self._like.device) for order in sorted(self._parts, reverse=True)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class BlockBackward:
    """One backward pass through a tape, from the gradients of `roots`: tensors of the caller's code."""

    def __init__(self, tape: Tape, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, keep: bool) -> None:
        self.tape = tape
        self.keep = keep
        self.tasks: list[Task] = []
        self._lock = threading.Lock()
        self._sums: dict[int, Sum] = {}
        """By id of a slot or a leaf."""
        self._feeders: dict[Slot, list[Task]] = defaultdict(list)
        self._root_gradients: dict[int, list[Tensor | None]] = {}
        self._plan(list(roots), list(gradients))

    def run(self) -> dict[int, Tensor]:
        """The gradients of parameters and arguments, by id of the leaf. Raises what autograd raises."""
        run_tasks(self.tape.threads, self.tasks)
        slots = {id(slot) for call in self.tape.calls for slot in call.slots}
        return {key: found.total() for key, found in self._sums.items() if key not in slots}

    def _add(self, to: Slot | Tensor, order: tuple[int, int], gradient: Tensor | None) -> None:
        if gradient is not None:
            with self._lock:
                key = id(to)
                if key not in self._sums:
                    self._sums[key] = Sum(to.value if isinstance(to, Slot) else to)
                self._sums[key].add(order, gradient)

    def _plan(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        calls = self.tape.calls
        last = len(calls)
        ends = leaves_of(roots)
        end = Task(CALLER, -last, lambda: self._between(last, roots, gradients, ends))
        self.tasks.append(end)
        live = self._fed_by(ends)
        for slot in live:
            self._feeders[slot].append(end)
        for call in reversed(calls):
            if not any(slot in self._feeders for slot in call.slots):
                continue
            back = Task(call.block.device, -call.order, lambda call=call: self._through(call))
            back.follow([feeder for slot in call.slots for feeder in self._feeders.get(slot, ())])
            self.tasks.append(back)
            for slot in call.sources:
                if slot is not None:
                    self._feeders[slot].append(back)
            if call.roots:
                leaves = leaves_of(call.roots)
                between = Task(CALLER, -call.order, lambda call=call, leaves=leaves: self._before(call, leaves))
                between.follow([back])
                self.tasks.append(between)
                for slot in self._fed_by(leaves):
                    self._feeders[slot].append(between)

    def _fed_by(self, leaves: Iterable[Tensor]) -> list[Slot]:
        return [self.tape.slots[id(leaf)] for leaf in leaves if id(leaf) in self.tape.slots]

    def _through(self, call: BlockCall) -> None:
        """Back through a block, on its device's thread."""
        device = self.tape.threads.devices[call.block.device]
        start = device.mark()
        pairs = [(o, self._sums[id(slot)].total()) for slot, o in zip(call.slots, call.outputs, strict=True) if id(slot) in self._sums]
        wanted = [*call.inner, *call.parameters]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            outputs, gradients = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, wanted, gradients, retain_graph=self.keep, allow_unused=True)
        inputs, parameters = found[: len(call.inner)], found[len(call.inner) :]
        for number, (slot, gradient) in enumerate(zip(call.sources, inputs, strict=True)):
            if slot is not None:
                self._add(slot, (call.order, -number), gradient)
        self._root_gradients[call.order] = [g for slot, g in zip(call.sources, inputs, strict=True) if slot is None]
        for number, (parameter, gradient) in enumerate(zip(call.parameters, parameters, strict=True)):
            self._add(parameter, (call.order, -number), gradient)
        end = device.mark()
        device.synchronize()
        call.profile.backward_us = device.elapsed_us(start, end)

    def _before(self, call: BlockCall, leaves: Sequence[Tensor]) -> None:
        """Back through what the caller's code did for a block's arguments."""
        pairs = [(r, g) for r, g in zip(call.roots, self._root_gradients.pop(call.order), strict=True) if g is not None]
        if pairs:
            self._between(call.order, [r for r, _ in pairs], [g for _, g in pairs], leaves)

    def _between(self, order: int, roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        gradients = [g.to(r.device) for r, g in zip(roots, gradients, strict=True)]
        found = torch.autograd.grad(roots, leaves, gradients, retain_graph=True, allow_unused=True)
        for number, (leaf, gradient) in enumerate(zip(leaves, found, strict=True)):
            self._add(self.tape.slots.get(id(leaf), leaf), (order, number), gradient)
