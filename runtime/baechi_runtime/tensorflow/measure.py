"""Clocks and memory of real TensorFlow steps: time on each server's core, others' load, and peak bytes by the allocators."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from baechi_runtime.measure.samples import LoadOfOthers
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.tensorflow.servers.accounting import held_bytes
from baechi_runtime.tensorflow.servers.clocks import cpu_ns
from baechi_runtime.tensorflow.servers.devices import Devices, Servers, available_cores
from baechi_runtime.tensorflow.servers.session import PlacedSession


def timed_step(run: Callable[[], object], devices: Devices | None) -> StepTimes:
    """One step; `devices` run it, None: this process."""
    before, begin = _clocks(devices), time.perf_counter_ns()
    run()
    wall_us = (time.perf_counter_ns() - begin) / 1000
    return StepTimes(wall_us, tuple((b - a) / 1000 for a, b in zip(before, _clocks(devices), strict=True)))


def _clocks(devices: Devices | None) -> list[int]:
    """CPU time of each device's process; empty where devices have none of their own, or one on another machine."""
    if not isinstance(devices, Servers) or len(devices.servers) < len(devices.names):
        return []
    return [cpu_ns(server.process.pid) for server in devices.servers]


def load_of_others(groups: Callable[[], Sequence[Devices]], *, one_machine: bool) -> LoadOfOthers:
    """Begins to count what others take of the cores; `groups` returns all devices that have run on this machine by the time it is asked."""

    def own_seconds() -> float:
        return time.process_time() + sum(seconds for d in groups() if isinstance(d, Servers) for seconds in d.cpu_seconds())

    return LoadOfOthers(own_seconds, available_cores() if one_machine else ())


def oversubscribed(groups: Sequence[Devices]) -> bool:
    """True if servers share cores."""
    return any(isinstance(d, Servers) and len(d.names) > len(d.cores) for d in groups)


def peak_bytes(session: PlacedSession, devices: Devices) -> tuple[int, ...]:
    """Peak bytes of each device's allocator, by the trace of a step: variables, inputs, live tensors, received copies, and
    temporaries; with all that is loaded there besides. Empty where devices share an allocator."""
    if devices.shared_memory:
        return ()
    held = [0] * len(devices.names)
    session.run()
    for entry in session.trace().step_stats.dev_stats:
        if entry.device in devices.names:
            device = devices.names.index(entry.device)
            held[device] = max([held[device], *map(held_bytes, _allocations(entry))])
    return tuple(held)


def _allocations(entry: Any) -> list[Any]:
    return [memory for stats in entry.node_stats for memory in stats.memory]
