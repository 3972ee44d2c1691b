"""A recorded step on groups, as a measured step of the plan whose devices are the groups.

Processes run calls and not the plan's ops, so a call's time, forward or backward, is shared out over its ops by their predicted times; so
is the time of a group's update. Of each group its busiest member is shown, whose times are those of a prediction: of the slowest device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.ir import OpGraph
from baechi_ext.ir.measured import MeasuredOp, MeasuredStep, MeasuredTransfer
from baechi_ext.simulate import Timeline

CLOCK = "monotonic"
_CALLS = (
    "on groups of devices calls are run and timed, not the plan's ops: where a call has several ops, each has a part of its time by their "
    "predicted times; an op's time has its messages inside the group"
)
_MEMBERS = "each group is shown by the one of its devices that worked longest"
_MEMORY = "what devices hold was not counted op by op"
_SUMS = "waiting for sums of gradients that are under way when the backward pass ends is part of no op"


@dataclass(frozen=True)
class MemberNotes:
    """What a process noted of a step, in nanoseconds of rank 0's clock."""

    busy_us: float
    calls: Sequence[tuple[str, str, int, int]]
    update: tuple[int, int] | None
    sent: Sequence[tuple[str, str, int, bool, int, int]]
    received: Sequence[tuple[str, str, int, bool, int, int]]

    @classmethod
    def of(cls, answer: Mapping[str, Any], ahead_ns: int) -> "MemberNotes":
        """From a rank's answer, whose clock is so much ahead."""
        said = {key: [(*n[:-2], n[-2] - ahead_ns, n[-1] - ahead_ns) for n in answer["notes"][key]] for key in ("calls", "sent", "received")}
        update = answer["notes"]["update"]
        return cls(answer["busy_us"], update=None if update is None else (update[0] - ahead_ns, update[1] - ahead_ns), **said)


@dataclass(frozen=True)
class GroupRecording:
    """One recorded step, before its times are put together."""

    begin_ns: int
    wall_us: float
    members: Sequence[MemberNotes]
    """By rank."""
    plan: HybridPlan
    timeline: Timeline
    """The prediction, whose devices are the groups."""
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it in a report."""
        return self.remarks

    def measured(self, graph: OpGraph, executor: str) -> MeasuredStep:
        """The recorded step, for people and files; `graph` is the plan's."""
        shown = [max(group, key=lambda rank: self.members[rank].busy_us) for group in self.plan.groups]
        transfers, lost = self._transfers(graph)
        notes = [_CALLS, *([_MEMBERS] if self.plan.group_size > 1 else []), _SUMS, _MEMORY, *self.remarks]
        if lost:
            notes.append(f"{lost} transfers between groups are of values that are no tensors of the graph (views); they are left out")
        return MeasuredStep(
            graph_fingerprint=graph.fingerprint,
            executor=executor,
            clock=CLOCK,
            wall_us=self.wall_us,
            ops=tuple(op for g, rank in enumerate(shown) for op in _one_at_a_time(self._ops(g, self.members[rank]))),
            transfers=tuple(sorted(transfers, key=lambda t: t.start_us)),
            memory=None,
            notes=tuple(notes),
        )

    def _us(self, ns: float) -> float:
        return max(0.0, ns - self.begin_ns) / 1000

    def _ops(self, group: int, member: MemberNotes) -> Iterator[MeasuredOp]:
        """The ops of a group, by when its calls ran."""
        ops = self.plan.graph.ops
        found: dict[tuple[str | None, str], list[int]] = {}
        for v in self.timeline.started:
            if self.plan.on_groups[v] == group:
                update = ops[v].phase == "update"
                found.setdefault((None if update else self.plan.shard[v].node, ops[v].phase), []).append(v)
        spans: dict[tuple[str | None, str], tuple[int, int]] = {(call, phase): (start, end) for call, phase, start, end in member.calls}
        if member.update is not None:
            spans[None, "update"] = member.update
        for key, span in spans.items():
            if key in found:  # a view has no ops
                yield from self._shared_out(found[key], group, *span)

    def _shared_out(self, ops: Sequence[int], group: int, start_ns: int, end_ns: int) -> Iterator[MeasuredOp]:
        weights = [self.timeline.graph.ops[v].compute_us for v in ops]
        if not any(weights):
            weights = [1.0] * len(ops)
        ends = [start_ns + (end_ns - start_ns) * done / sum(weights) for done in accumulate(weights, initial=0.0)]
        for v, (begin, end) in zip(ops, pairwise(ends), strict=True):
            yield MeasuredOp(self.plan.graph.ops[v].id, group, self._us(begin), self._us(end))

    def _transfers(self, graph: OpGraph) -> tuple[list[MeasuredTransfer], int]:
        """Those between groups: from when the first member gives its part away until the last has its own; and how many are left out."""
        spans: dict[tuple[str, str, int, bool], list[int]] = {}
        home = {split.node: group for split, group in zip(self.plan.shard, self.plan.on_groups, strict=True) if split.node is not None}
        received = [{tuple(n[:4]): n[4:] for n in member.received} for member in self.members]
        for place_members in zip(*self.plan.groups, strict=True):
            for rank in place_members:
                for name, call, target, back, given, gone in self.members[rank].sent:
                    to = place_members[home.get(call, 0) if back else target]
                    came, had = received[to].get((name, call, target, back), (gone, gone))
                    spans.setdefault((name, call, target, back), []).extend((given, max(given, had if gone > came else gone)))
        sent: dict[tuple[int, int, int], list[int]] = {}
        lost = 0
        for (_, call, target, back), times in spans.items():
            source = home.get(call)
            ends = (target, source) if back else (source, target)
            tensors = [] if source is None else self._tensors(call, ends, back=back)
            if not tensors:
                lost += 1
                continue
            key = next((k for k in ((t, *ends) for t in tensors) if k not in sent), (tensors[0], *ends))  # a tensor may be sent in pieces
            sent.setdefault(key, []).extend(times)
        found = []
        for (t, source, target), times in sent.items():
            producer = graph.ops[graph.tensors[t].producer].id
            found.append(MeasuredTransfer(producer, graph.tensors[t].name, source, target, self._us(min(times)), self._us(max(times))))
        return found, lost

    def _tensors(self, call: str, ends: tuple[int, int], *, back: bool) -> list[int]:
        """The tensors of the plan, the largest first, that a call's value, or its gradient, is on its way from one group to the other."""
        graph, shard, groups = self.plan.graph, self.plan.shard, self.plan.on_groups
        phase, found = "backward" if back else "forward", []
        for t, tensor in enumerate(graph.tensors):
            v = tensor.producer
            if groups[v] == ends[0] and graph.ops[v].phase == phase:
                readers = [w for w in tensor.readers if groups[w] == ends[1] and graph.ops[w].phase == phase]
                if any(shard[w].node == call for w in readers) if back else shard[v].node == call and readers:
                    found.append(t)
        return sorted(found, key=lambda t: -graph.tensors[t].bytes)


def _one_at_a_time(ops: Iterable[MeasuredOp]) -> Iterator[MeasuredOp]:
    """The ops in order; one whose call had not ended when the next began, as autograd may have it, begins when that has ended."""
    end_us = 0.0
    for op in sorted(ops, key=lambda op: (op.start_us, op.end_us)):
        start_us = max(op.start_us, end_us)
        end_us = max(start_us, op.end_us)
        yield MeasuredOp(op.id, op.device, start_us, end_us)
