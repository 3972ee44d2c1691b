"""A run's steps, as predicted and as measured, in the one form in which pages, plots and traces show them. Times are microseconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baechi_ext.explain.memory import memory_courses
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.simulate import Transfer
from baechi_runtime.files.run_folder import RunFolder

PREDICTED, MEASURED = "predicted", "measured"


@dataclass(frozen=True)
class RunStep:
    """A step of a run: its ops are on the devices that the plan says."""

    kind: str
    step_us: float
    span: Mapping[int, tuple[float, float]]
    """Op -> (start, end), for the ops that were seen, in the order of their starts: causes before what they cause."""
    copies: Sequence[Transfer]
    busy_us: Sequence[float]
    memory: Sequence[Sequence[tuple[float, float]]] | None
    """For each device, (from when, bytes); None where nobody counted."""


def steps_of(run: RunFolder) -> list[RunStep]:
    """The predicted step, and the measured one where there is one."""
    timeline = run.timeline
    span = {v: (timeline.start_us[v], timeline.end_us[v]) for v in timeline.started}
    predicted = RunStep(PREDICTED, timeline.makespan_us, span, timeline.transfers, timeline.busy_us, memory_courses(timeline))
    return [predicted] if run.measured is None else [predicted, _measured(run, run.measured)]


def _measured(run: RunFolder, step: MeasuredStep) -> RunStep:
    graph = run.graph
    tensors = {(graph.ops[t.producer].id, t.name): i for i, t in enumerate(graph.tensors)}
    # By nanoseconds, as traces have them: of ops that start at one instant those that take no time come first.
    found = ((graph.index[op.id], (op.start_us, op.end_us)) for op in step.ops)
    span = dict(sorted(found, key=lambda item: ([round(us * 1000) for us in item[1]], graph.rank[item[0]])))
    # When a copy was asked for nobody measures.
    copies = [Transfer(tensors[t.op, t.tensor], t.source, t.target, t.start_us, t.start_us, t.end_us) for t in step.transfers]
    memory = None if step.memory is None else [[(held.at_us, held.bytes) for held in device] for device in step.memory]
    return RunStep(MEASURED, step.wall_us, span, copies, step.busy_us(len(run.plan.cluster)), memory)
