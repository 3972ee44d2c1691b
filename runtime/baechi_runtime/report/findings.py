"""Findings of a command: lines for people, and a report. Of steps also the fields of a plan, and each sentence once."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import printable
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline

if TYPE_CHECKING:
    from baechi_runtime.report.report import Report


class Findings(ABC):
    """The findings of a command, or on a placed module: lines for people, and one JSON object."""

    @abstractmethod
    def report(self) -> "Report":
        """All that is reported."""

    @abstractmethod
    def lines(self) -> Iterable[str]:
        """For a person."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__
    """At a Python prompt, and in a notebook, they are what they say."""

    def to_json(self) -> dict[str, Any]:
        """The report's JSON object (docs/files.md)."""
        return self.report().to_json()

    def print(self) -> None:
        """Writes the lines on stdout."""
        sys.stdout.write("".join(f"{printable(line)}\n" for line in self.lines()))


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanFindings(Findings):
    """A report on a plan; `result` and `single` are None where there is no plan."""

    result: PlanResult | None
    single: Timeline | None
    """The prediction for the same step on one device."""
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return () if self.result is None else tuple(d.name for d in self.result.timeline.cluster.devices)

    @property
    def num_ops(self) -> tuple[int, ...]:
        """Ops on each device."""
        return () if self.result is None else tuple(map(len, self.result.timeline.device_order()))

    @property
    def predicted_us(self) -> float | None:
        return None if self.result is None else self.result.timeline.makespan_us

    @property
    def predicted_single_us(self) -> float | None:
        return None if self.single is None else self.single.makespan_us

    def planned(self) -> dict[str, Any]:
        """The fields of a Planned report."""
        if self.result is None:
            return {"notes": list(self.notes)}
        placed, single, timeline = self.predicted_us, self.predicted_single_us, self.result.timeline
        return {
            "notes": list(self.notes),
            "method": self.result.plan.method,
            "num_devices": len(self.result.plan.cluster),
            "status": self.result.status,
            "predicted_speedup": single / placed if single is not None and placed else 1.0,
            "lower_bound_us": self.result.lower_bound_us,
            "placement_seconds": self.result.placement_seconds,
            "transfers": len(timeline.transfers),
            "bytes_moved": timeline.bytes_moved,
        }


def labelled(label: str, text: str) -> str:
    """A line of facts, as `made by` is one."""
    return f"{label:<14} {text}"


def prediction_error(predicted_us: float, measured_us: float) -> str:
    """Says how far a prediction is off."""
    error = predicted_us / measured_us - 1
    return f"prediction {abs(error):.1%} too {'low' if error < 0 else 'high'}"


def load_text(load_of_others: float | None) -> str:
    """Says what other processes took of the machine."""
    share = "an unknown share" if load_of_others is None else f"{load_of_others:.1%}"
    return f"{share} of the cores used by other processes while measuring"
