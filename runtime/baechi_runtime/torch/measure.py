"""Measuring real steps: eager, one-device and placed, interleaved, so that what else the machine does falls on all alike; and what devices
hold in a step."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import ExecutionError
from baechi_ext.ir import Cluster
from baechi_ext.simulate import Timeline
from baechi_runtime.host import process_memory
from baechi_runtime.measure.samples import LoadOfOthers, Measurement
from baechi_runtime.measure.timing import WARMUP, StepTimes, measure_in_turn
from baechi_runtime.models.training_step import EagerStep, TrainingStep
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.processes.executor import Executor, LoadedStep


def measure(
    executor: Executor,
    step: TrainingStep,
    placed: Mapping[str, LoadedStep],
    *,
    num_steps: int,
    on_step: Callable[[int], None] = lambda i: None,
    warmup: int = WARMUP,
) -> Measurement:
    """Times `num_steps` rounds of one eager step (on device 0) and one of every placed step.

    Parameters, buffers and random state go on from round to round, as in training, and are put back at the end.
    """
    eager = EagerStep(step, executor.devices[0].torch_device)
    variants: dict[str, Callable[[], StepTimes]] = {"eager": partial(executor.call, 0, partial(eager_times, executor, eager))}
    variants |= {name: lambda loaded=loaded: loaded.run()[1] for name, loaded in placed.items()}  # type: ignore[misc]
    with as_it_was(step):
        measurement = measure_on(executor, variants, num_steps=num_steps, on_step=on_step, warmup=warmup)
    eager.optimizer.zero_grad(set_to_none=True)
    return measurement


class Timed(Protocol):
    """Devices whose steps are timed: an executor, or workers of which each runs the script."""

    devices: tuple[TorchDevice, ...]

    def cpu_seconds(self) -> float:
        """CPU time that all of them have used."""


def measure_on(
    executor: Timed,
    variants: Mapping[str, Callable[[], StepTimes]],
    *,
    num_steps: int,
    on_step: Callable[[int], None] = lambda i: None,
    warmup: int = WARMUP,
) -> Measurement:
    """See `measure_in_turn`, of steps on the executor's devices."""
    load, shared = partial(load_of_others, executor), oversubscribed(executor.devices)
    return measure_in_turn(variants, load, num_steps=num_steps, oversubscribed=shared, on_step=on_step, warmup=warmup)


def eager_times(executor: Executor, eager: EagerStep) -> StepTimes:
    """The times of one unplaced step, in the thread of device 0."""
    begin = time.perf_counter_ns()
    eager.run()
    executor.devices[0].synchronize()
    return StepTimes((time.perf_counter_ns() - begin) / 1000, ())


def load_of_others(executor: Timed) -> LoadOfOthers:
    """Begins to count what others take of the executor's cores."""
    one_machine = len({d.node for d in executor.devices}) == 1
    return LoadOfOthers(executor.cpu_seconds, cores_of(executor.devices) if one_machine else ())


def cores_of(devices: Sequence[TorchDevice]) -> tuple[int, ...]:
    """The cores that a step on these devices of one machine takes: their own, or where they are no cores all that this process may use."""
    own = [getattr(d, "core", None) for d in devices]
    return devices[0].cores if None in own else tuple(sorted({core for core in own if core is not None}))


def oversubscribed(devices: Sequence[TorchDevice]) -> bool:
    """True if there are more CPU devices than cores."""
    cores = [(d.node, getattr(d, "core", None)) for d in devices]
    return all(core is not None for _, core in cores) and len(set(cores)) < len(cores)


def measured_peak_bytes(executor: Executor, timeline: Timeline, binding: Binding, step: TrainingStep) -> tuple[int, ...]:
    """Peak bytes per device of one real step: parameters, buffers and optimizer state of the ops there, live tensors, received
    copies, and temporaries of the op that runs. The step's state is put back. Raises ExecutionError where a part of a GPU held more than
    its limit.
    """
    with as_it_was(step):
        peak = executor.load(timeline, binding, step).peak_bytes()
    require_room(executor.devices, timeline.cluster, peak)
    return peak


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
