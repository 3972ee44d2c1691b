"""Why an op is where it is: the step with it, and all that has to share its device, on each of the devices."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from baechi_ext.errors import OptionError
from baechi_ext.explain.path import OP, Paths
from baechi_ext.ir.hints import not_called, ops_called
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import Plan
from baechi_ext.simulate.simulator import Simulator

PINNED, NO_OTHER, NO_ROOM, BEST, EQUAL, WORSE = "pinned", "no other device", "no room elsewhere", "best", "as good", "better elsewhere"
"""Why ops are where they are: a pin; nothing else to choose; nothing else fits; all else is slower; something else is as fast; or they
had better be elsewhere, as far as these ops alone and this order go."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan with the ops on `device` and all else, the priorities too, as it is.

    `transfers` and `bytes_moved`: of tensors that the ops make or read. `fits`: no device exceeds its limit.
    """

    device: int
    step_us: float
    peak_memory_bytes: tuple[int | float, ...]
    fits: bool
    transfers: int
    bytes_moved: int | float


@dataclass(frozen=True)
class OpChoices:
    """All choices for `asked`, ops, and `moved`, which adds the others of their colocation groups; `step_us`: the plan as it is.

    `here`: how many of the moved ops are on each device now. `runs_us`: how long the asked ops run there, with what transfers take from
    their devices; `critical_us`: how long of it on the critical path.
    """

    graph: OpGraph
    asked: tuple[int, ...]
    moved: tuple[int, ...]
    here: tuple[int, ...]
    step_us: float
    runs_us: float
    critical_us: float
    choices: tuple[Choice, ...]

    @property
    def device(self) -> int | None:
        """The device of all moved ops; None where they are on several devices."""
        devices = [d for d, count in enumerate(self.here) if count]
        return devices[0] if len(devices) == 1 else None

    @property
    def pin(self) -> int | None:
        """The device that one of the moved ops is pinned to."""
        return next((self.graph.pins[v] for v in self.moved if v in self.graph.pins), None)

    @property
    def best(self) -> Choice | None:
        """The fastest other choice that fits."""
        others = [choice for choice in self.choices if choice.fits and choice.device != self.device]
        return min(others, key=lambda choice: choice.step_us, default=None)

    @property
    def verdict(self) -> str:
        """The reason why the ops are where they are: one of the constants above."""
        best, rounding = self.best, _ROUNDING * self.step_us
        if self.pin is not None:
            return PINNED
        if len(self.choices) == 1:
            return NO_OTHER
        if best is None:
            return NO_ROOM
        if abs(best.step_us - self.step_us) <= rounding:
            return EQUAL
        return BEST if best.step_us > self.step_us else WORSE

    def to_json(self) -> dict[str, Any]:
        """The output of `baechi explain PLAN OP --json` (docs/files.md); devices are indices."""
        ops = [self.graph.ops[v] for v in self.asked]
        return {
            "ops": [op.id for op in ops],
            "moved_ops": [self.graph.ops[v].id for v in self.moved],
            "compute_us": sum(op.compute_us for op in ops),
            "persistent_bytes": sum(op.persistent_bytes for op in ops),
            "device": self.device,
            "on_devices": list(self.here),
            "pin": self.pin,
            "verdict": self.verdict,
            "step_us": self.step_us,
            "critical_us": self.critical_us,
            "choices": [asdict(choice) for choice in self.choices],
        }


class Mover:
    """Answers for many ops of one plan. What a plan takes with ops elsewhere is simulated each time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.simulator = Simulator(plan.graph, plan.cluster)
        self.timeline = self.simulator.run(plan.placement, plan.priority)

    @cached_property
    def _critical_us(self) -> dict[int, float]:
        path = Paths(self.timeline).critical()
        return {stretch.op: stretch.end_us - stretch.start_us for stretch in path if stretch.kind == OP}

    def choices(self, ops: Iterable[int]) -> OpChoices:
        """The choices for ops by their positions, which move together."""
        graph, placement, asked = self.plan.graph, self.plan.placement, tuple(ops)
        groups = dict.fromkeys(graph.ops[v].colocation for v in asked)
        together = {w for group in groups if group is not None for w in graph.groups[group]}
        moved = tuple(sorted({*asked, *together}))
        here = [0] * len(self.plan.cluster)
        for v in moved:
            here[placement[v]] += 1
        found = tuple(self._choice(moved, d, is_here=here[d] == len(moved)) for d in range(len(here)))
        start_us, end_us, step_us = self.timeline.start_us, self.timeline.end_us, self.timeline.makespan_us
        runs_us, critical_us = sum(end_us[v] - start_us[v] for v in asked), sum(self._critical_us.get(v, 0.0) for v in asked)
        return OpChoices(graph, asked, moved, tuple(here), step_us, runs_us, critical_us, found)

    def _choice(self, moved: Sequence[int], device: int, *, is_here: bool) -> Choice:
        graph, placement = self.plan.graph, list(self.plan.placement)
        for v in moved:
            placement[v] = device
        known = self.timeline.makespan_us, self.timeline.peak_memory_bytes
        step_us, peaks = known if is_here else self.simulator.evaluate(placement, self.plan.priority)
        fits = all(peak <= room for peak, room in zip(peaks, self.plan.cluster.rooms, strict=True))
        sent = {(t, placement[w]) for t in _tensors_of(graph, moved) for w in graph.tensors[t].readers}
        sent = {(t, d) for t, d in sent if d != placement[graph.tensors[t].producer]}
        return Choice(device, step_us, tuple(peaks), fits, len(sent), sum(graph.tensors[t].bytes for t, _ in sent))


def op_choices(plan: Plan, op: str) -> OpChoices:
    """The choices for one op, by its id, or for all ops that a pattern, as of a pin, is for: a module's name, say.

    Raises OptionError where nothing is called so.
    """
    index = plan.graph.index
    found = [index[op]] if op in index else ops_called(plan.graph, op)
    if not found:
        raise OptionError(f"{op!r} matches nothing: {not_called(plan.graph)}")
    return Mover(plan).choices(found)


def _tensors_of(graph: OpGraph, ops: Iterable[int]) -> set[int]:
    """The tensors that ops make or read."""
    return {t for v in ops for t in (*graph.inputs[v], *graph.outputs[v])}
