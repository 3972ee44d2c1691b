"""Two ways back from the end of a simulated step to its start, both without a gap, so that what they consist of adds up to the step.

The critical path follows what held each op or transfer up last, be it data or something else that used its device or channel: to shorten
the step, something on it has to become shorter. The data path follows data alone, and shows how long that had to wait.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.timeline import Timeline, Transfer

OP, TRANSFER, HOST, DEVICE_BUSY, LINK_BUSY = "op", "transfer", "host", "device busy", "link busy"
"""Kinds of stretches of a path. The host's is the last, where it takes longer than the devices. Those of the end are waits, on data paths
alone."""
COMPUTE, HANDLING = "compute", "sending and receiving"
"""The two parts of an op's time: its own, and what transfers take from its device."""
START, DATA, DEVICE, LINK = "start", "data", "device", "link"
"""Why a stretch begins when it does: nothing held it up; it needs what ends then; its device, or a channel of its link, was in use. Of the
host's, it is the host."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One part of a path. `op` is the op that runs or waits for its device, the producer of the tensor that is sent or waits, or the last
    op, which could have ended before the host gives it out."""

    kind: str
    op: int
    transfer: Transfer | None
    start_us: float
    end_us: float
    cause: str

    def to_json(self, timeline: Timeline) -> dict[str, Any]:
        value: dict[str, Any] = {"kind": self.kind, "op": timeline.graph.ops[self.op].id}
        if self.transfer is None:
            value["device"] = timeline.placement[self.op]
        else:
            value |= transfer_to_json(timeline.graph, self.transfer)
        return {**value, "start_us": self.start_us, "end_us": self.end_us, "cause": self.cause}


@dataclass(frozen=True, slots=True)
class Part:
    """All stretches of a path of one kind in one place. Of transfers and waits for links `target` is where to, and there is no phase."""

    kind: str
    device: int
    target: int | None
    phase: str | None
    us: float

    def to_json(self, step_us: float) -> dict[str, Any]:
        return {**asdict(self), "share": self.us / step_us if step_us else 0.0}


def transfer_to_json(graph: OpGraph, transfer: Transfer) -> dict[str, Any]:
    """The tensor that a transfer moves, and between which devices."""
    tensor = graph.tensors[transfer.tensor]
    return {
        "op": graph.ops[tensor.producer].id,
        "tensor": tensor.name,
        "bytes": tensor.bytes,
        "source": transfer.source,
        "target": transfer.target,
    }


class Paths:
    """Finds both paths of a timeline, and what its stretches consist of."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.sent = {(x.tensor, x.target): x for x in timeline.transfers}

    @cached_property
    def last(self) -> int | None:
        """The op that ends the step, of several the one that started last; None where there is none."""
        return max(self.timeline.started, key=lambda v: (self.timeline.end_us[v], self.timeline.rank[v]), default=None)

    @cached_property
    def before(self) -> dict[int, int]:
        """For each op, the one that ran before it on its device."""
        return {w: v for order in self.timeline.device_order() for v, w in zip(order, order[1:], strict=False)}

    @cached_property
    def _ends(self) -> dict[tuple[str, int, float], Transfer]:
        """The transfer that gave a device's outgoing or incoming channel free at an instant."""
        found = {}
        for x in self.timeline.transfers:
            if x.end_us > x.start_us:
                found["out", x.source, x.end_us] = found["in", x.target, x.end_us] = x
        return found

    def handling_us(self, op: int) -> float:
        """Time that transfers added to the op's on its device."""
        timeline, device = self.timeline, self.timeline.placement[op]
        duration = timeline.end_us[op] - timeline.start_us[op]
        added = duration - timeline.graph.ops[op].compute_us / timeline.cluster.devices[device].speed
        return min(duration, added) if added > 1e-9 * timeline.makespan_us else 0.0

    def last_input(self, op: int) -> tuple[float, int, Transfer | None] | None:
        """The input that arrived last: when, its producer, and how it was sent; None for an op without inputs."""
        timeline, device = self.timeline, self.timeline.placement[op]
        best = None
        for t in timeline.graph.inputs[op]:
            producer, sent = timeline.graph.tensors[t].producer, self.sent.get((t, device))
            arrived_us = timeline.end_us[producer] if sent is None else sent.end_us
            if best is None or (arrived_us, self.timeline.rank[producer]) > (best[0], self.timeline.rank[best[1]]):
                best = arrived_us, producer, sent
        return best

    def critical(self) -> tuple[Stretch, ...]:
        """The critical path. Where several things ended at the instant that something began at, the op that started last counts."""
        found: list[Stretch] = []
        v, sent = self.last, None
        while v is not None:
            if sent is None:
                stretch, v, sent = self._before_op(v)
            else:
                stretch, v, sent = self._before_transfer(sent)
            found.append(stretch)
        return (*reversed(found), *self._host())

    def _host(self) -> Iterator[Stretch]:
        """The end of a step that takes its host longer than its devices."""
        last, timeline = self.last, self.timeline
        if last is not None and timeline.end_us[last] < timeline.makespan_us:
            yield Stretch(HOST, last, None, timeline.end_us[last], timeline.makespan_us, HOST)

    def _before_op(self, v: int) -> tuple[Stretch, int | None, Transfer | None]:
        """The op's stretch, and what comes before it: an op, or an op's tensor on its way."""
        timeline = self.timeline
        start_us, arrived, user = timeline.start_us[v], self.last_input(v), self.before.get(v)
        if user is not None and timeline.end_us[user] != start_us:
            user = None
        cause, before, sent = START if user is None else DEVICE, user, None
        if arrived is not None and arrived[0] == start_us and (user is None or self.timeline.rank[user] <= self.timeline.rank[arrived[1]]):
            cause, before, sent = DATA, arrived[1], arrived[2]
        if sent is not None and sent.end_us == sent.request_us:
            sent = None
        return Stretch(OP, v, None, start_us, timeline.end_us[v], cause), before, sent

    def _before_transfer(self, x: Transfer) -> tuple[Stretch, int | None, Transfer | None]:
        producer = self.timeline.graph.tensors[x.tensor].producer
        if x.start_us == x.request_us:
            return Stretch(TRANSFER, producer, x, x.start_us, x.end_us, DATA), producer, None
        ends = (self._ends.get(("out", x.source, x.start_us)), self._ends.get(("in", x.target, x.start_us)))
        blocker = max((y for y in ends if y is not None), key=lambda y: y.end_us - y.start_us)
        stretch = Stretch(TRANSFER, producer, x, x.start_us, x.end_us, LINK)
        return stretch, self.timeline.graph.tensors[blocker.tensor].producer, blocker

    def data(self) -> tuple[Stretch, ...]:
        """The data path."""
        timeline, found, v = self.timeline, [], self.last
        while v is not None:
            start_us, arrived = timeline.start_us[v], self.last_input(v)
            found.append(Stretch(OP, v, None, start_us, timeline.end_us[v], START if arrived is None else DATA))
            ready_us, producer, sent = arrived or (0.0, None, None)
            if start_us > ready_us:
                found.append(Stretch(DEVICE_BUSY, v, None, ready_us, start_us, DATA))
            if sent is not None and producer is not None:
                if sent.end_us > sent.start_us:
                    found.append(Stretch(TRANSFER, producer, sent, sent.start_us, sent.end_us, DATA))
                if sent.start_us > sent.request_us:
                    found.append(Stretch(LINK_BUSY, producer, sent, sent.request_us, sent.start_us, DATA))
            v = producer
        return (*reversed(found), *self._host())

    def parts(self, path: Iterable[Stretch]) -> tuple[Part, ...]:
        """The parts of a path, the longest first."""
        sums: defaultdict[tuple[str, int, int | None, str | None], float] = defaultdict(float)
        for stretch in path:
            device, us = self.timeline.placement[stretch.op], stretch.end_us - stretch.start_us
            if stretch.transfer is not None:
                sums[stretch.kind, stretch.transfer.source, stretch.transfer.target, None] += us
            elif stretch.kind == OP:
                phase, handling_us = self.timeline.graph.ops[stretch.op].phase, self.handling_us(stretch.op)
                sums[COMPUTE, device, None, phase] += us - handling_us
                sums[HANDLING, device, None, phase] += handling_us
            else:
                sums[stretch.kind, device, None, None] += us
        found = [Part(*key, us) for key, us in sums.items() if us > 0]
        return tuple(sorted(found, key=lambda part: -part.us))


def critical_ops(timeline: Timeline) -> tuple[int, ...]:
    """The ops of the critical path, in the order they run."""
    return tuple(stretch.op for stretch in Paths(timeline).critical() if stretch.kind == OP)
