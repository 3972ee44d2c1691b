"""The devices' speeds as they show side by side: the same work, done over and over by all devices at once, in windows of time.

Costs are of device 0, in time that its own clock counts, so time that other programs take is not in them. A device that shares its core
gets less done in a window than its clock says; one with a slower core takes longer by its clock as well.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_RATIO = 1.15
"""A device counts as slower from here on: less is no more than a prediction is off by."""
_AGREEING = 0.9
"""The share of windows that have to show it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The time that one device took for its work while all were at theirs."""

    wall_us: tuple[float, ...]
    """Wall microseconds per unit of work, a number per window."""
    clock_us: tuple[float, ...]
    """The same by the device's own clock."""


def speeds_of(paces: Sequence[Pace]) -> tuple[float, ...]:
    """The speed of each device with the costs of device 0; all 1 where no device is certainly slower than the fastest, window by window."""
    fastest = min(paces, key=lambda pace: statistics.median(pace.wall_us))
    slower = [_times_slower(pace.wall_us, fastest.wall_us) for pace in paces]
    # Costs that were measured on a slower core have its slowness in them already.
    in_costs = _times_slower(paces[0].clock_us, fastest.clock_us) if slower[0] > 1 else 1.0
    return tuple(round(in_costs / times, 2) for times in slower)


def _times_slower(us: Sequence[float], least_us: Sequence[float]) -> float:
    agreeing = sum(a >= LEAST_RATIO * b for a, b in zip(us, least_us, strict=True))
    return statistics.median(us) / statistics.median(least_us) if agreeing >= _AGREEING * len(us) else 1.0


def note_on(names: Sequence[str], speeds: Sequence[float]) -> str:
    """The report's note on devices of unequal speeds."""
    said = ", ".join(f"{name} {speed:g}" for name, speed in zip(names, speeds, strict=True))
    return f"measured side by side, the devices have the speeds {said}; --device_speeds=1 plans for equal ones"
