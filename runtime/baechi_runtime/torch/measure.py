"""Measuring real steps: eager, one-device and placed, interleaved, so that what else the machine does falls on all alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from baechi_runtime.measure.samples import LoadOfOthers, Measurement
from baechi_runtime.measure.timing import WARMUP, StepTimes, measure_in_turn
from baechi_runtime.models.training_step import EagerStep, TrainingStep
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.lowering.executor import Executor
from baechi_runtime.torch.lowering.random_state import as_it_was


class Runs(Protocol):
    """A step that can be run: a placed one, or an engine's."""

    def run(self) -> tuple[Tensor, StepTimes]:
        """The loss and the times of one step."""


def measure(
    executor: Executor,
    step: TrainingStep,
    placed: Mapping[str, Runs],
    *,
    num_steps: int,
    on_step: Callable[[int], None] = lambda i: None,
    warmup: int = WARMUP,
) -> Measurement:
    """Times `num_steps` rounds of one eager step (on device 0) and one of every placed step.

    Parameters, buffers and random state go on from round to round, as in training, and are put back at the end.
    """
    eager = EagerStep(step, executor.devices[0].torch_device)
    variants: dict[str, Callable[[], StepTimes]] = {"eager": partial(executor.call, 0, partial(_eager_times, executor, eager))}
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


def _eager_times(executor: Executor, eager: EagerStep) -> StepTimes:
    begin = time.perf_counter_ns()
    eager.run()
    executor.devices[0].synchronize()
    return StepTimes((time.perf_counter_ns() - begin) / 1000, ())


def load_of_others(executor: Timed) -> LoadOfOthers:
    """Begins to count what others take of the executor's cores."""
    one_machine = len({d.node for d in executor.devices}) == 1
    return LoadOfOthers(executor.cpu_seconds, executor.devices[0].cores if one_machine else ())


def oversubscribed(devices: Sequence[TorchDevice]) -> bool:
    """True if there are more CPU devices than cores."""
    cores = [(d.node, getattr(d, "core", None)) for d in devices]
    return all(core is not None for _, core in cores) and len(set(cores)) < len(cores)
