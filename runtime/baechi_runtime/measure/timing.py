"""The timing loop: real steps of several variants, interleaved, so that what else the machine does falls on all alike."""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baechi_ext.collector import without_collection
from baechi_runtime.measure.samples import LoadOfOthers, Measurement, Samples

WARMUP = 4
"""Rounds before those that count."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step: wall time for who runs it, commands to other processes included, and what each device worked meanwhile, where that is
    known."""

    wall_us: float
    busy_us: tuple[float, ...]


def measure_in_turn(
    variants: Mapping[str, Callable[[], StepTimes]],
    load_of_others: Callable[[], LoadOfOthers],
    *,
    num_steps: int,
    oversubscribed: bool,
    on_step: Callable[[int], None] = lambda i: None,
    warmup: int = WARMUP,
) -> Measurement:
    """Times `num_steps` rounds of one step of every variant, each by its own clock, behind `warmup` rounds; `on_step` is called with each
    round's number. `load_of_others` begins to count what others take of the cores; `oversubscribed` says that devices share cores."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    busy: dict[str, list[Sequence[float]]] = {name: [] for name in variants}
    gc.collect()
    with without_collection():
        load = load_of_others()
        for i in range(warmup + num_steps):
            on_step(i)
            if i == warmup:
                load = load_of_others()
            times = {name: step() for name, step in variants.items()}
            if i >= warmup:
                for name, step_times in times.items():
                    taken[name].append(step_times.wall_us)
                    busy[name].append(step_times.busy_us)
        share = load.share()
    return Measurement(
        samples={name: Samples(tuple(us)) for name, us in taken.items()},
        busy_us={name: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for name, rows in busy.items() if any(rows)},
        load_of_others=share,
        oversubscribed=oversubscribed,
    )
