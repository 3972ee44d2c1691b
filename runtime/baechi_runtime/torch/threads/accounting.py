"""Memory accounting of a placed step: what each device really holds, op by op, counted over the live tensors' storages.

Host memory is one for all threads, so a thread's share can't be read from the system: it is counted, with temporaries as profiled. A CUDA
device's allocator counts itself, and a worker process sees what the system says of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from baechi_ext.capture.torch_private import dense_parts
from baechi_ext.simulate import Timeline
from baechi_runtime.torch.lowering.ops import LoweredProgram, Segment


def counting(
    program: LoweredProgram, timeline: Timeline, state: Iterable[torch.Tensor], found: list[tuple[int, int, int]]
) -> LoweredProgram:
    """The program, which adds to `found` for each op how many bytes of distinct storages are in its slots while it runs, with that op's
    temporaries, and after it. Those of parameters and buffers, the `state`, are left out: they are resident, whoever looks at them."""

    def counted(segment: Segment) -> Segment:
        temporary_bytes, running = int(timeline.graph.ops[segment.op].temporary_bytes), [0]

        def while_it_runs(slots: Any) -> None:
            running[0] = slots.bytes + temporary_bytes

        def after_it(slots: Any) -> None:
            found.append((segment.op, running[0], slots.bytes))

        return replace(segment, after=(while_it_runs, *segment.after, after_it))

    left_out = {value.untyped_storage().data_ptr() for value in state}
    slots = partial(CountedSlots, left_out=left_out)
    return replace(program, segments=tuple(map(counted, program.segments)), make_slots=slots)


class CountedSlots(list[Any]):
    """Slots that know how many bytes the storages of what is in them are, but for those left out."""

    def __init__(self, size: int, left_out: set[int]) -> None:
        super().__init__([None] * size)
        self.bytes = 0
        self._left_out = left_out
        self._slots_of: dict[int, int] = {}
        """First address of a storage -> the number of slots that it is in."""

    def __setitem__(self, slot: Any, value: Any) -> None:
        for pointer, size in self._storages(value):
            count = self._slots_of.get(pointer, 0)
            self._slots_of[pointer] = count + 1
            self.bytes += 0 if count else size
        for pointer, size in self._storages(self[slot]):
            self._slots_of[pointer] -= 1
            if not self._slots_of[pointer]:
                del self._slots_of[pointer]
                self.bytes -= size
        super().__setitem__(slot, value)

    def copy(self) -> "CountedSlots":
        """Slots with the same in them."""
        same = CountedSlots(len(self), self._left_out)
        for slot, value in enumerate(self):
            same[slot] = value
        return same

    def _storages(self, value: Any) -> list[tuple[int, int]]:
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        storages = [part.untyped_storage() for tensor in tensors if tensor is not None for part in dense_parts(tensor)]
        return [(s.data_ptr(), s.nbytes()) for s in storages if s.data_ptr() not in self._left_out]


def held_tensors(
    names: Iterable[str], state: Mapping[str, torch.Tensor], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """The named parameters and buffers, and what their optimizers keep for them, by name."""
    held = {name: state[name] for name in names}
    for name in list(held):
        if name in optimizers:
            slots = optimizers[name].state.get(state[name], {})
            held |= {f"{slot} of {name}": value for slot, value in slots.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
    return held


def resident_bytes(names: Sequence[str], state: Mapping[str, torch.Tensor], optimizers: Mapping[str, torch.optim.Optimizer]) -> int:
    """Bytes of the named parameters and buffers, and of what their optimizers keep for them."""
    return sum(value.nbytes for value in held_tensors(names, state, optimizers).values())
