"""When devices have nothing to do, and what they wait for."""

from dataclasses import dataclass
from typing import Any

from baechi_ext.explain.path import Paths, transfer_to_json
from baechi_ext.simulate.timeline import Timeline, Transfer


@dataclass(frozen=True, slots=True)
class Gap:
    """A device is idle. `op` ends that, once its last input arrives; None: there is nothing left to do.

    The gap is `producer_us` until another device has made that input, then `queue_us` until the link is free, then `transfer_us`.
    """

    device: int
    start_us: float
    end_us: float
    op: int | None = None
    producer: int | None = None
    transfer: Transfer | None = None

    @property
    def us(self) -> float:
        return self.end_us - self.start_us

    @property
    def transfer_us(self) -> float:
        return 0.0 if self.transfer is None else self.end_us - max(self.start_us, self.transfer.start_us)

    @property
    def queue_us(self) -> float:
        if self.transfer is None:
            return 0.0
        return max(0.0, self.transfer.start_us - max(self.start_us, self.transfer.request_us))

    @property
    def producer_us(self) -> float:
        return 0.0 if self.op is None else self.us - self.queue_us - self.transfer_us

    def to_json(self, timeline: Timeline) -> dict[str, Any]:
        ids = timeline.graph.ops
        value: dict[str, Any] = {"device": self.device, "start_us": self.start_us, "end_us": self.end_us, "op": None}
        if self.op is not None and self.producer is not None:
            value |= {"op": ids[self.op].id, "producer": ids[self.producer].id, "producer_device": timeline.placement[self.producer]}
            value |= {"producer_us": self.producer_us, "queue_us": self.queue_us, "transfer_us": self.transfer_us}
        if self.transfer is not None:
            value["transfer"] = transfer_to_json(timeline.graph, self.transfer)
        return value


@dataclass(frozen=True)
class DeviceIdle:
    """All gaps of one device, in order; `tail_us`: after its last op."""

    device: int
    gaps: tuple[Gap, ...]

    @property
    def us(self) -> float:
        return sum(gap.us for gap in self.gaps)

    @property
    def waits_us(self) -> dict[str, float]:
        """The parts of that, by name."""
        parts = {name: sum(getattr(gap, name) for gap in self.gaps) for name in ("producer_us", "queue_us", "transfer_us")}
        return {**parts, "tail_us": sum(gap.us for gap in self.gaps if gap.op is None)}

    def to_json(self, timeline: Timeline) -> dict[str, Any]:
        return {"device": self.device, "idle_us": self.us, **self.waits_us, "gaps": [gap.to_json(timeline) for gap in self.gaps]}


def idle_devices(paths: Paths) -> tuple[DeviceIdle, ...]:
    """The gaps of each device of a timeline."""
    return tuple(DeviceIdle(d, tuple(_gaps(paths, d, order))) for d, order in enumerate(paths.timeline.device_order()))


def _gaps(paths: Paths, device: int, order: tuple[int, ...]) -> list[Gap]:
    timeline, now, found = paths.timeline, 0.0, []
    for v in order:
        start_us = timeline.start_us[v]
        if start_us > now:
            arrived = paths.last_input(v)
            _, producer, sent = arrived or (0.0, None, None)
            found.append(Gap(device, now, start_us, v, producer, sent))
        now = timeline.end_us[v]
    if timeline.makespan_us > now:
        found.append(Gap(device, now, timeline.makespan_us))
    return found
