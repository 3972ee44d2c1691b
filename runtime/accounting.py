"""Memory accounting of a placed step: what each device really holds, op by op, counted over the live tensors' storages.

Host memory is one for all threads, so a CPU device's share can't be read from the system: it is counted. A CUDA device's allocator
counts itself.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline
from runtime.step import TrainingStep
from runtime.thread_executor import PlacedStep, ThreadExecutor


def measured_peak_bytes(executor: ThreadExecutor, timeline: Timeline, binding: Binding, step: TrainingStep) -> tuple[int, ...]:
    """Peak bytes per device of one real step: parameters, buffers and optimizer state of the ops there, live tensors, received copies,
    and the profiled temporaries of the op that runs. The step's state is put back.
    """
    saved, rng = step.snapshot(), torch.get_rng_state()
    try:
        placed = executor.load(timeline, binding, step)
        allocators = [d.peak_bytes() is not None for d in executor.devices]
        if all(allocators):
            return _by_allocator(executor, placed)
        live = executor.run_all([partial(_live_peak, placed, timeline, i) for i in range(len(placed.programs))], placed.abort)
        resident = _resident_bytes(placed, timeline, binding)
    finally:
        step.restore(saved)
        torch.set_rng_state(rng)
    return tuple(a + b for a, b in zip(live, resident, strict=True))


def _by_allocator(executor: ThreadExecutor, placed: PlacedStep) -> tuple[int, ...]:
    for device in executor.devices:
        device.reset_peak()
    placed.run()
    return tuple(int(d.peak_bytes() or 0) for d in executor.devices)


def _live_peak(placed: PlacedStep, timeline: Timeline, index: int) -> int:
    """The most bytes of distinct storages in a device's slots right after any op computed, with that op's temporaries."""
    program = placed.programs[index]
    state = placed.state_storages()
    slots: list[Any] = [None] * program.num_slots
    peak = 0
    try:
        with torch.no_grad():
            for segment in program.segments:
                _do(segment.before, slots)
                segment.compute(slots)
                peak = max(peak, _storage_bytes(slots, state) + int(timeline.graph.ops[segment.op].temporary_bytes))
                _do(segment.after, slots)
            _do(program.epilogue, slots)
    except BaseException:
        placed.abort()
        raise
    return peak


def _do(actions: Sequence[Callable[[list[Any]], None]], slots: list[Any]) -> None:
    for action in actions:
        action(slots)


def _storage_bytes(slots: Sequence[Any], left_out: set[int]) -> int:
    storages = {}
    for value in slots:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for pointer, size in storages.items() if pointer not in left_out)


def _resident_bytes(placed: PlacedStep, timeline: Timeline, binding: Binding) -> list[int]:
    """Parameters, buffers and optimizer state per device, each on the device of its colocation group."""
    totals = [0] * len(placed.programs)
    state = placed.step.state()
    for name, reader in binding.state_reader.items():
        device = timeline.placement[reader]
        totals[device] += _bytes(state[name])
        if name in placed.optimizers:
            values = (value for slots in placed.optimizers[name].state.values() for value in slots.values())
            totals[device] += sum(_bytes(v) for v in values if isinstance(v, torch.Tensor) and v.dim() > 0)
    return totals


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
