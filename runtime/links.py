"""Probing links: what handing a tensor from one device of the executor to another takes, and the line through it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from baechi_ext.cost import LinkFit, fit_link
from baechi_ext.ir import Link
from runtime.mailbox import Mailboxes

if TYPE_CHECKING:
    from runtime.thread_executor import ThreadExecutor

PROBE_BYTES = tuple(4 * 4**i for i in range(12))
"""4 bytes to 16 MiB."""
_WARMUP, _REPEATS = 5, 30


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """One-way times in microseconds per tensor size, warm-up left out, and the line through their medians."""

    samples_us: dict[int, tuple[float, ...]]
    fit: LinkFit
    send: LinkFit | None = None
    """What sending takes from the sending device, where it takes anything; part of the one-way time."""
    receive: LinkFit | None = None

    def medians(self) -> list[tuple[float, float]]:
        """(bytes, median one-way microseconds)."""
        return [(size, statistics.median(samples)) for size, samples in self.samples_us.items()]

    def typical_error(self) -> float:
        """The median over the sizes of how far the line is off, relative to the measured median."""
        return statistics.median(abs(self.fit.latency_us + size * self.fit.us_per_byte - us) / us for size, us in self.medians())

    def to_link(self) -> Link:
        """The link as the simulator means it: what the devices spend is charged to them, the rest of the one-way time to the link."""
        if self.send is None or self.receive is None:
            return self.fit.to_link()
        return Link(
            us_per_byte=max(0.0, self.fit.us_per_byte - self.send.us_per_byte - self.receive.us_per_byte),
            latency_us=max(0.0, self.fit.latency_us - self.send.latency_us - self.receive.latency_us),
            send_us=self.send.latency_us,
            send_us_per_byte=self.send.us_per_byte,
            receive_us=self.receive.latency_us,
            receive_us_per_byte=self.receive.us_per_byte,
        )

    def __str__(self) -> str:
        if self.send is None or self.receive is None:
            return str(self.fit)
        return f"{self.fit}, of which sending takes {self.send} and receiving {self.receive} from the devices"

    def to_json(self) -> dict[str, Any]:
        return {
            **self.to_link().to_json(),
            "one_way": {"us_per_byte": self.fit.us_per_byte, "latency_us": self.fit.latency_us, "r_squared": self.fit.r_squared},
            "samples_us": {str(size): list(samples) for size, samples in self.samples_us.items()},
        }


def probe_link(executor: "ThreadExecutor", source: int, target: int, sizes: Sequence[int]) -> LinkProbe:
    """The link between two devices of the executor, measured by sending tensors there and back: half a round trip each.

    The receiver waits asleep, as a device does that has nothing else to run. Raises ExecutionError where a device does not answer.
    """
    samples = {}
    for size in sizes:
        rounds = _round_trips_us(executor, (source, target), size, _WARMUP + _REPEATS)
        samples[size] = tuple(us / 2 for us in rounds[_WARMUP:])
    return LinkProbe(samples, fit_link([(size, statistics.median(s)) for size, s in samples.items()]))


def _round_trips_us(executor: "ThreadExecutor", ends: tuple[int, int], size: int, count: int) -> list[float]:
    import torch

    source, target = ends
    boxes = Mailboxes(executor.timeout_seconds)
    there, back = (0, target), (0, source)
    tensor = executor.call(source, partial(torch.zeros, size // 4, device=executor.devices[source].torch_device))
    near, far = executor.devices[source], executor.devices[target]

    def ping(give: Callable[[Any], None], take: Callable[[], Any]) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.perf_counter_ns()
            give(near.pack(tensor))
            near.unpack(take())
            near.synchronize()
            times.append((time.perf_counter_ns() - begin) / 1000)
        return times

    def pong(give: Callable[[Any], None], take: Callable[[], Any]) -> list[float]:
        for _ in range(count):
            value = far.unpack(take())
            far.synchronize()
            give(far.pack(value))
        return []

    tasks: list[Callable[[], list[float]]] = [list for _ in executor.devices]
    tasks[source] = partial(ping, boxes.giver(*there), boxes.taker(*back))
    tasks[target] = partial(pong, boxes.giver(*back), boxes.taker(*there))
    return executor.run_all(tasks, on_failure=boxes.abort)[source]
