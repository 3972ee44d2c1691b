"""Clocks of real TensorFlow steps: time on each server's core, and others' load."""

import time
from collections.abc import Callable, Sequence

from baechi_runtime.host.processor import available_cores
from baechi_runtime.measure.samples import LoadOfOthers
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.tensorflow.servers.devices import Devices, Server


def timed_step(run: Callable[[], object], servers: Sequence[Server] = ()) -> StepTimes:
    """One step, and the time that each of the servers spent on its core meanwhile."""
    before, begin = [server.cpu_ns() for server in servers], time.perf_counter_ns()
    run()
    wall_us = (time.perf_counter_ns() - begin) / 1000
    return StepTimes(wall_us, tuple((server.cpu_ns() - ns) / 1000 for server, ns in zip(servers, before, strict=True)))


def load_of_others(groups: Callable[[], Sequence[Devices]], *, one_machine: bool) -> LoadOfOthers:
    """Begins to count what others take of the cores; `groups` returns all devices that have run on this machine by the time it is asked."""

    def own_seconds() -> float:
        return time.process_time() + sum(server.cpu_ns() for devices in groups() for server in devices.servers) / 1e9

    return LoadOfOthers(own_seconds, available_cores() if one_machine else ())


def oversubscribed(groups: Sequence[Devices]) -> bool:
    """True if servers share cores."""
    return any(len(devices.servers) > len(available_cores()) for devices in groups)
