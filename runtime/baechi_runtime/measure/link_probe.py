"""The link between two devices, as it was measured."""

import statistics
from dataclasses import dataclass

from baechi_ext.cost import LinkFit
from baechi_ext.ir import Link

PROBE_BYTES = (4, 256, *(4**i for i in range(7, 13)))
"""4 bytes to 16 MiB, closer where the size begins to tell."""


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """One-way times in microseconds per tensor size, warm-up left out, and the line through their medians."""

    samples_us: dict[int, tuple[float, ...]]
    fit: LinkFit
    send: LinkFit | None = None
    """The sending device's own part of the one-way time, where it has one."""
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
