"""Measuring real steps: eager, one-device and placed, interleaved, so that what else the machine does falls on all alike."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from runtime.executor import Executor, LoadedStep
from runtime.samples import LoadOfOthers, Measurement, Samples
from runtime.step import EagerStep, TrainingStep
from runtime.thread_executor import StepTimes
from runtime.torch_devices import TorchDevice

WARMUP = 4


def measure(
    executor: Executor,
    step: TrainingStep,
    placed: Mapping[str, LoadedStep],
    *,
    num_steps: int,
    warmup: int = WARMUP,
    on_step: Callable[[int], None] = lambda i: None,
) -> Measurement:
    """Times `num_steps` rounds of one eager step (on device 0) and one of every placed step.

    Parameters, buffers and random state go on from round to round, as in training, and are put back at the end.
    """
    eager = EagerStep(step, executor.devices[0].torch_device)
    saved = step.snapshot()
    variants: dict[str, Callable[[], StepTimes]] = {"eager": lambda: executor.call(0, lambda: _eager_times(executor, eager))}
    variants |= {name: lambda loaded=loaded: loaded.run()[1] for name, loaded in placed.items()}
    try:
        return measure_in_turn(executor, variants, num_steps=num_steps, warmup=warmup, on_step=on_step)
    finally:
        eager.optimizer.zero_grad(set_to_none=True)
        step.restore(saved)


def measure_in_turn(
    executor: Executor,
    variants: Mapping[str, Callable[[], StepTimes]],
    *,
    num_steps: int,
    warmup: int = WARMUP,
    on_step: Callable[[int], None] = lambda i: None,
) -> Measurement:
    """Times `num_steps` rounds of one step of every variant, each by its own clock."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    busy: dict[str, list[Sequence[float]]] = {name: [] for name in variants}
    gc.collect()
    gc.disable()
    try:
        load = load_of_others(executor)
        for i in range(warmup + num_steps):
            on_step(i)
            if i == warmup:
                load = load_of_others(executor)
            times = {name: step() for name, step in variants.items()}
            if i >= warmup:
                for name, step_times in times.items():
                    taken[name].append(step_times.wall_us)
                    busy[name].append(step_times.busy_us)
        share = load.share()
    finally:
        gc.enable()
    return Measurement(
        samples={name: Samples(tuple(us)) for name, us in taken.items()},
        busy_us={name: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for name, rows in busy.items() if any(rows)},
        load_of_others=share,
        oversubscribed=oversubscribed(executor.devices),
    )


def _eager_times(executor: Executor, eager: EagerStep) -> StepTimes:
    begin = time.perf_counter_ns()
    eager.run()
    executor.devices[0].synchronize()
    return StepTimes((time.perf_counter_ns() - begin) / 1000, ())


def load_of_others(executor: Executor) -> LoadOfOthers:
    """From now on."""
    one_machine = len({d.node for d in executor.devices}) == 1
    return LoadOfOthers(executor.cpu_seconds, executor.devices[0].cores if one_machine else ())


def oversubscribed(devices: Sequence[TorchDevice]) -> bool:
    """Whether there are more CPU devices than cores."""
    cores = [(d.node, getattr(d, "core", None)) for d in devices]
    return all(core is not None for _, core in cores) and len(set(cores)) < len(cores)
