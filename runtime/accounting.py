"""Memory accounting of a placed step: what each device really holds, op by op, counted over the live tensors' storages.

Host memory is one for all threads, so a thread's share can't be read from the system: it is counted, with temporaries as profiled. A CUDA
device's allocator counts itself, and a worker process sees what the system says of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import ExecutionError
from baechi_ext.ir import Cluster
from baechi_ext.simulate import Timeline
from runtime import process_memory
from runtime.cuda.graphs import WARM_UP_STEPS
from runtime.executor import Executor
from runtime.step import TrainingStep
from runtime.thread_executor import PlacedStep
from runtime.torch_devices import TorchDevice
from runtime.torch_ops import LoweredProgram


def measured_peak_bytes(executor: Executor, timeline: Timeline, binding: Binding, step: TrainingStep) -> tuple[int, ...]:
    """Peak bytes per device of one real step: parameters, buffers and optimizer state of the ops there, live tensors, received
    copies, and temporaries of the op that runs. The step's state is put back.
    """
    saved, rng = step.snapshot(), torch.get_rng_state()
    try:
        placed = executor.load(timeline, binding, step)
        if isinstance(placed, PlacedStep):
            return _of_threads(placed, timeline, binding)
        return placed.peak_bytes()
    finally:
        step.restore(saved)
        torch.set_rng_state(rng)


def require_room(devices: Sequence[TorchDevice], cluster: Cluster, peak_bytes: Sequence[int]) -> None:
    """Raises ExecutionError where a part of a GPU held more than its limit: no allocator keeps the parts' limits."""
    for device, limit, held in zip(devices, cluster.devices, peak_bytes, strict=False):
        if device.share > 1 and limit.memory_bytes is not None and held > limit.memory_bytes:
            raise ExecutionError(
                f"device {device.name} held {held} bytes in a step and its limit is {limit.memory_bytes:.0f}; the step takes more than its "
                "profile says: raise --device_memory, profile again without --cost_path, use more parts, or a smaller batch"
            )


def how_measured(executor: Executor) -> str:
    """Where `measured_peak_bytes` has its numbers from: "allocator" (torch's, of CUDA devices), "system" (what worker processes hold in
    memory, beyond what they hold when no step runs and the step is not theirs), or "accounting" (counted tensors)."""
    if all(d.torch_device.type != "cpu" for d in executor.devices):
        return "allocator"
    return "accounting" if executor.shared_memory or not process_memory.can_tell() else "system"


def _of_threads(placed: PlacedStep, timeline: Timeline, binding: Binding) -> tuple[int, ...]:
    executor = placed.executor
    if all(d.peak_bytes() is not None and d.share == 1 for d in executor.devices):
        for _ in range(WARM_UP_STEPS if placed.graphed else 0):
            placed.run()
        # The next step captures its graphs: what stays in their pool is allocated then.
        for device in executor.devices:
            device.reset_peak()
        placed.run()
        return tuple(int(d.peak_bytes() or 0) for d in executor.devices)
    state = placed.step.state()
    storages = {value.untyped_storage().data_ptr() for value in state.values()}
    tasks = [partial(_live_peak, placed, program, timeline, storages) for program in placed.programs]
    live = executor.run_all(tasks, placed.abort)
    owned: list[list[str]] = [[] for _ in placed.programs]
    for name, reader in binding.state_reader.items():
        owned[timeline.placement[reader]].append(name)
    return tuple(a + resident_bytes(names, state, placed.optimizers) for a, names in zip(live, owned, strict=True))


def _live_peak(placed: PlacedStep, program: LoweredProgram, timeline: Timeline, storages: set[int]) -> int:
    try:
        return live_peak_bytes(program, timeline, storages)
    except BaseException:
        placed.abort()
        raise


def live_peak_bytes(program: LoweredProgram, timeline: Timeline, state_storages: set[int]) -> int:
    """Runs a device's program; the most bytes of distinct storages in its slots right after any op computed, with that op's
    temporaries. Storages of parameters and buffers are left out."""
    slots: list[Any] = [None] * program.num_slots
    peak = 0
    with torch.no_grad():
        for segment in program.segments:
            _do(segment.before, slots)
            segment.compute(slots)
            peak = max(peak, _storage_bytes(slots, state_storages) + int(timeline.graph.ops[segment.op].temporary_bytes))
            _do(segment.after, slots)
        _do(program.epilogue, slots)
    return peak


def held_tensors(
    names: Iterable[str], state: Mapping[str, torch.Tensor], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """The named parameters and buffers, and what their optimizers keep for them, by name."""
    held = {name: state[name] for name in names}
    for name in list(held):
        if name in optimizers:
            slots = (item for kept in optimizers[name].state.values() for item in kept.items())
            held |= {f"{slot} of {name}": value for slot, value in slots if isinstance(value, torch.Tensor) and value.dim() > 0}
    return held


def resident_bytes(names: Sequence[str], state: Mapping[str, torch.Tensor], optimizers: Mapping[str, torch.optim.Optimizer]) -> int:
    """Bytes of the named parameters and buffers, and of what their optimizers keep for them."""
    return sum(_bytes(value) for value in held_tensors(names, state, optimizers).values())


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


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
