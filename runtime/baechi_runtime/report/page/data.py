"""The data of a run's page, as one JSON value: ops, tensors and steps as columns, since graphs have thousands of ops."""

from collections.abc import Iterable, Sequence
from typing import Any

from baechi_ext.explain import Mover, explain_plan
from baechi_ext.explain.path import critical_ops
from baechi_ext.ir.op_graph import PHASES, OpGraph
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.report.page.headline import headline
from baechi_runtime.report.palette import device_colour, text_colour
from baechi_runtime.report.reading import results_of
from baechi_runtime.report.report import Comparison
from baechi_runtime.report.run_steps import RunStep, steps_of

OPS_SIMULATED = 6_000_000
"""No more than this many ops are simulated for choices in all: some seconds."""
LEAST, MOST = 20, 1000
"""The number of ops, or groups, whose choices are simulated."""


def page_data(run: RunFolder, compared: Comparison = Comparison()) -> dict[str, Any]:  # noqa: B008 - frozen
    """The page data of a run and, where there is one, a comparison; all times are microseconds. Raises FileError for a damaged report."""
    report, steps = results_of(run, compared), steps_of(run)
    return {
        "headline": headline(run, report),
        "devices": _devices(run, report.measured_peaks),
        "phases": list(PHASES),
        "parts": _parts(run.graph),
        "ops": _ops(run.graph),
        "tensors": _tensors(run.graph),
        "placement": list(run.plan.placement),
        "predicted": _step(run, steps[0]) | {"critical": list(critical_ops(run.timeline))},
        "measured": _measured(run, steps),
        "methods": [row.shown() for row in compared.rows],
        "recommended": compared.recommended or "",
        "recommendation": compared.recommendation if run.report is not None else "",  # else it is the verdict
        "explanation": _explanation(run),
        "choices": choices_of(run),
    }


def _devices(run: RunFolder, measured: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {
            "name": device.name,
            "limit_bytes": device.memory_bytes,
            "speed": device.speed,
            "colour": device_colour(i),
            "text": text_colour(device_colour(i)),
            "peak_predicted_bytes": run.timeline.peak_memory_bytes[i],
            "peak_measured_bytes": measured[i] if i < len(measured) else None,
        }
        for i, device in enumerate(run.plan.cluster.devices)
    ]


def _parts(graph: OpGraph) -> list[dict[str, str]]:
    """The colours of the parts of the batch, and of text on them; empty where it is whole."""
    count = 1 + max((op.part for op in graph.ops if op.part is not None), default=-1)
    return [{"colour": device_colour(part), "text": text_colour(device_colour(part))} for part in range(count)]


def _ops(graph: OpGraph) -> dict[str, list[Any]]:
    fields = ("id", "op", "compute_us", "persistent_bytes", "output_bytes", "temporary_bytes", "colocation", "module", "pin", "part")
    columns: dict[str, list[Any]] = {name: [getattr(op, name) for op in graph.ops] for name in fields}
    return {
        **columns,
        "compute_us": _times(columns["compute_us"]),
        "phase": [PHASES.index(op.phase) for op in graph.ops],
        "forward_op": [graph.index.get(op.forward_op or "") for op in graph.ops],
    }


def _tensors(graph: OpGraph) -> dict[str, list[Any]]:
    return {
        "producer": [t.producer for t in graph.tensors],
        "name": [t.name for t in graph.tensors],
        "bytes": [t.bytes for t in graph.tensors],
        "readers": [list(t.readers) for t in graph.tensors],
    }


def _step(run: RunFolder, step: RunStep) -> dict[str, Any]:
    seen = [_times(step.span[v]) if v in step.span else (None, None) for v in range(len(run.graph))]
    return {
        "step_us": step.step_us,
        "start_us": [start for start, _ in seen],
        "end_us": [end for _, end in seen],
        "transfers": [[c.tensor, c.source, c.target, *_times((c.start_us, c.end_us))] for c in step.copies],
        "busy_us": _times(step.busy_us),
        "memory": step.memory and [[_times(at_us for at_us, _ in course), [held for _, held in course]] for course in step.memory],
    }


def _measured(run: RunFolder, steps: Sequence[RunStep]) -> dict[str, Any] | None:
    if run.measured is None:
        return None
    about = {"executor": run.measured.executor, "clock": run.measured.clock, "notes": list(run.measured.notes)}
    return _step(run, steps[-1]) | about


def _explanation(run: RunFolder) -> dict[str, Any]:
    """The explanation, without what can be seen in the timeline anyway."""
    summary = explain_plan(run.plan).to_json()
    kept = {name: summary[name] for name in ("transfers", "idle", "what_ifs")}
    return {"critical_path": {"parts": summary["critical_path"]["parts"]}, **kept}


def _times(us: Iterable[float]) -> list[float]:
    return [round(float(t), 2) for t in us]


def choices_of(run: RunFolder) -> dict[str, Any]:
    """For the ops of a run, what the step would be with them elsewhere: for the most costly ones where trying all would take long.

    `found`: choices, each for ops that move together; `of`: by op, which of them is its own, or null; `shown`: for how many."""
    graph, devices = run.graph, len(run.plan.cluster)
    units: dict[object, list[int]] = {}
    for v, op in enumerate(graph.ops):
        units.setdefault(v if op.colocation is None else op.colocation, []).append(v)
    costliest = sorted(units.values(), key=lambda unit: -sum(graph.ops[v].compute_us for v in unit))
    affordable = OPS_SIMULATED // max(1, graph.size * (devices - 1))
    costliest = costliest[: max(LEAST, min(MOST, affordable))]
    mover = Mover(run.plan)
    of: list[int | None] = [None] * len(graph)
    found: list[dict[str, Any]] = []
    for unit in costliest:
        for v in unit:
            of[v] = len(found)
        found.append(_choices_of(mover, unit))
    shown = f"It was predicted with other devices only for the {len(costliest)} most costly of {len(units)} ops and colocation groups."
    return {"of": of, "found": found, "shown": shown}


def _choices_of(mover: Mover, unit: list[int]) -> dict[str, Any]:
    choices = mover.choices(unit[:1])
    return {
        "moved": len(choices.moved),
        "verdict": choices.verdict,
        "step_us": choices.step_us,
        "choices": [{"device": c.device, "step_us": c.step_us, "fits": c.fits} for c in choices.choices],
    }
