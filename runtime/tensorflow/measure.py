"""Measuring real steps of TensorFlow's: unplaced, on one device and placed, in turn; and what a step holds in memory."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.samples import LoadOfOthers, Measurement, Samples
from runtime.tensorflow.clocks import cpu_ns
from runtime.tensorflow.servers import Devices, Servers, available_cores
from runtime.tensorflow.session import PlacedSession

WARMUP = 4
UNPLACED = "eager"
"""The variant that is no placed one: the user's step as a tf.function, in this process."""


def measure(
    devices: Mapping[str, Devices],
    unplaced: Callable[[], object],
    sessions: Mapping[str, PlacedSession],
    *,
    num_steps: int,
    on_step: Callable[[int], None] = lambda i: None,
) -> Measurement:
    """Times `num_steps` rounds of an unplaced step and one of every session; `devices` says on which each of them runs. `on_step` is
    told the number of each round, those of the warm-up among them.

    Variables go on from round to round, as in training. A server's busy time is what its process spends on its core, transfers included.
    """
    taken: dict[str, list[float]] = {name: [] for name in (UNPLACED, *sessions)}
    busy: dict[str, list[Sequence[float]]] = {name: [] for name in sessions}
    groups = list({id(d): d for d in devices.values()}.values())
    gc.collect()
    gc.disable()
    try:
        one_machine = all(len(d.servers) == len(d.names) for d in groups if isinstance(d, Servers))
        load = load_of_others(lambda: groups, one_machine=one_machine)
        for i in range(WARMUP + num_steps):
            on_step(i)
            if i == WARMUP:
                load = load_of_others(lambda: groups, one_machine=one_machine)
            times = {UNPLACED: _timed_us(unplaced)}
            for name, session in sessions.items():
                before = _clocks(devices[name])
                times[name] = _timed_us(session.run)
                if i >= WARMUP:
                    after = _clocks(devices[name])
                    busy[name].append([(b - a) / 1000 for a, b in zip(before, after, strict=True)])
            if i >= WARMUP:
                for name, us in times.items():
                    taken[name].append(us)
        share = load.share()
    finally:
        gc.enable()
    return Measurement(
        samples={name: Samples(tuple(us)) for name, us in taken.items()},
        busy_us={name: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for name, rows in busy.items()},
        load_of_others=share,
        oversubscribed=oversubscribed(groups),
    )


def _timed_us(run: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1000


def _clocks(devices: Devices) -> list[int]:
    """Of each device's process; none where they have no process of their own, or another machine's."""
    if not isinstance(devices, Servers) or len(devices.servers) < len(devices.names):
        return []
    return [cpu_ns(server.process.pid) for server in devices.servers]


def load_of_others(groups: Callable[[], Sequence[Devices]], *, one_machine: bool) -> LoadOfOthers:
    """From now on; `groups` says what runs at the end, or ran before, all of it on this machine."""

    def own_seconds() -> float:
        return time.process_time() + sum(sum(d.cpu_seconds()) for d in groups() if isinstance(d, Servers))

    return LoadOfOthers(own_seconds, available_cores() if one_machine else ())


def oversubscribed(groups: Sequence[Devices]) -> bool:
    """Whether servers share cores."""
    return any(isinstance(d, Servers) and len(d.names) > len(d.cores) for d in groups)


def peak_bytes(session: PlacedSession, devices: Devices) -> tuple[int, ...]:
    """What each device's allocator held at most in a step, by the trace of one: variables, inputs, live tensors, received copies, and
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


def held_bytes(memory: Any) -> int:
    """While an op ran: what was held at its end, and what it had given back by then."""
    return memory.allocator_bytes_in_use + max(0, memory.peak_bytes - memory.live_bytes)
