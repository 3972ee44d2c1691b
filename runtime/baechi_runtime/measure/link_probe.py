"""The link between two devices, as it was measured."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from baechi_ext.cost import LinkFit
from baechi_ext.ir import Link

PROBE_BYTES = (4, 256, *(4**i for i in range(7, 13)))
"""4 bytes to 16 MiB, closer where the size begins to tell."""
_LEAST_R_SQUARED, _LARGE_BYTES = 0.25, 2**20
_LEAST_US_PER_BYTE = 2e-6
"""500 GB/s: faster than two processes, or two GPUs, of one machine hand a copy over."""
_MOST_OF_ONE_WAY = 4.0
"""The one-way times that a small tensor may take from a device, since caches are cold. More is what other programs did meanwhile."""
_ADVICE = "end what else runs, or give --comm_cost_coeffs"
_COPY_REPEATS = 5


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """One-way times in microseconds per tensor size, warm-up left out, and the line through what is typical of them: their medians, or with
    TensorFlow's servers the least ones. Where tensors are handed over it is level."""

    samples_us: dict[int, tuple[float, ...]]
    fit: LinkFit
    send: LinkFit | None = None
    """The sending device's own part of the one-way time, where it has one."""
    receive: LinkFit | None = None
    doubt: str = ""
    """A sentence on why `fit` is not the line through the times, where it is not."""
    copied: bool = True
    """False where tensors are handed over as they are, whatever their size."""
    issue_us: float = 0.0
    """Time that a transfer takes the one thread that gives all devices their work, where there is such a thread."""
    copies: int = 2
    """Copies of a tensor on its way, at least: into what two processes share, and out of it where that is no place of the tensor's own."""

    @property
    def says_something(self) -> bool:
        """False where the line explains little of the times, or is faster than any copy; of small tensors the size tells nothing."""
        if max(self.samples_us) < _LARGE_BYTES:
            return True
        return self.fit.r_squared >= _LEAST_R_SQUARED and self.fit.us_per_byte >= _LEAST_US_PER_BYTE

    @property
    def charges_are_likely(self) -> bool:
        """False where a tensor takes so much from one of its devices that it was not the tensor."""
        charges = [charge.latency_us for charge in (self.send, self.receive) if charge is not None]
        return max(charges, default=0.0) <= _MOST_OF_ONE_WAY * self.fit.latency_us

    def medians(self) -> list[tuple[float, float]]:
        """(bytes, median one-way microseconds)."""
        return [(size, statistics.median(samples)) for size, samples in self.samples_us.items()]

    def typical_error(self) -> float:
        """The median over the sizes of how far the line is off, relative to the measured median."""
        return statistics.median(abs(self.fit.latency_us + size * self.fit.us_per_byte - us) / us for size, us in self.medians())

    def to_link(self) -> Link:
        """The link as the simulator means it: what the devices spend is charged to them, the rest of the one-way time to the link."""
        if self.send is None or self.receive is None:
            return replace(self.fit.to_link(), issue_us=self.issue_us)
        return Link(
            us_per_byte=max(0.0, self.fit.us_per_byte - self.send.us_per_byte - self.receive.us_per_byte),
            latency_us=max(0.0, self.fit.latency_us - self.send.latency_us - self.receive.latency_us),
            send_us=self.send.latency_us,
            send_us_per_byte=self.send.us_per_byte,
            receive_us=self.receive.latency_us,
            receive_us_per_byte=self.receive.us_per_byte,
            issue_us=self.issue_us,
        )

    @property
    def remark(self) -> str:
        """The one thing that a reader of the line must know, if there is one."""
        return self.doubt or ("" if self.copied else "tensors are handed over, not copied")

    def __str__(self) -> str:
        of_host = f", and {self.issue_us:.4g} us of the host" if self.issue_us else ""
        if not self.copied:
            return f"{self.fit.latency_us:.4g} us{of_host}, whatever the size: {self.remark}"
        if self.remark:
            return f"{self.fit.us_per_byte:.4g} us/B x bytes + {self.fit.latency_us:.4g} us{of_host}; {self.remark}"
        if self.send is None or self.receive is None:
            return f"{self.fit}{of_host}"
        return f"{self.fit}, of which sending takes {self.send} and receiving {self.receive} from the devices"


def sound(probe: Callable[[], LinkProbe], *, copies: bool) -> LinkProbe:
    """The first of two probes that says something, and what can be told of the devices' part; else, with the doubt, one without that part,
    or one whose link takes what copies of a tensor take in this machine's memory. Without `copies` tensors are handed over as they are: a
    slope would be of what other programs did meanwhile, so there is none."""
    first = probe()
    if not copies:
        return replace(first, copied=False, fit=LinkFit(0.0, statistics.median(us for _, us in first.medians()), 0.0))
    if first.says_something and first.charges_are_likely:
        return first
    second = probe()
    telling = [found for found in (second, first) if found.says_something]
    for found in telling:
        if found.charges_are_likely:
            return found
    if telling:
        doubt = "what transfers take from the devices was probed twice, and more came than transfers take, so it is counted as none"
        return replace(telling[0], send=None, receive=None, doubt=f"{doubt}; {_ADVICE}")
    least_us = min(us for found in (first, second) for samples in found.samples_us.values() for us in samples)
    fit = replace(second.fit, us_per_byte=second.copies * _copied_us_per_byte(), latency_us=least_us)
    none = f"r2 {second.fit.r_squared:.2f}, {second.fit.us_per_byte:.2g} us/B"
    copied = "a copy" if second.copies == 1 else f"{second.copies} copies"
    doubt = f"the link was probed twice, and its times fit no line ({none}), so these are of {copied} in memory"
    return replace(second, fit=fit, send=None, receive=None, doubt=f"{doubt}; {_ADVICE}")


def _copied_us_per_byte() -> float:
    source = np.ones(PROBE_BYTES[-1], dtype=np.uint8)
    target = np.zeros_like(source)
    taken = []
    for _ in range(_COPY_REPEATS):
        begin = time.perf_counter_ns()
        np.copyto(target, source)
        taken.append(time.perf_counter_ns() - begin)
    return min(taken) / 1000 / source.nbytes
