"""The data of a run's page, as one JSON value: ops, tensors and steps as columns, since graphs have thousands of ops. What is predicted
is not in it: the page simulates the plan itself (simulate.js)."""

from collections.abc import Iterable
from os.path import commonprefix
from typing import Any

from baechi_ext.explain import explain_plan
from baechi_ext.explain.path import OP, Paths
from baechi_ext.ir.op_graph import PHASES, OpGraph
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.report.page.headline import headline
from baechi_runtime.report.palette import DEVICES, text_colour
from baechi_runtime.report.plan_files import bound_of
from baechi_runtime.report.reading import results_of
from baechi_runtime.report.report import Comparison, Run
from baechi_runtime.report.run_steps import steps_of

_BY_ALLOCATORS = "run_metadata"
"""The clock of recordings, TensorFlow's, that know what allocators held, where devices have such; others sum up live tensors."""


def page_data(run: RunFolder, compared: Comparison = Comparison()) -> dict[str, Any]:  # noqa: B008 - frozen
    """The page data of a run and, where there is one, a comparison; all times are microseconds. Raises FileError for a damaged report."""
    report = results_of(run, compared)
    return {
        "headline": headline(run, report),
        "palette": [{"colour": colour, "text": text_colour(colour)} for colour in DEVICES],
        "phases": list(PHASES),
        "classes": dict(zip(run.graph.modules, run.graph.classes, strict=False)),
        **graph_data(run.graph),
        "plan": _plan(run),
        "placement": list(run.plan.placement),
        "peaks": report.peaks.measured or [],
        "peaks_found": report.peaks.found,
        "predicted": {"step_us": run.timeline.makespan_us, **_critical(run)},
        "measured": _measured(run, report),
        "methods": [row.shown() for row in compared.rows],
        "recommended": compared.recommended or "",
        "recommendation": compared.recommendation if run.report is not None else "",  # else it is the verdict
        "explanation": _explanation(run),
    }


def graph_data(graph: OpGraph) -> dict[str, dict[str, list[Any]]]:
    """The ops and tensors of a graph, in columns: all that the page's simulator needs of it."""
    return {"ops": _ops(graph), "tensors": {name: [getattr(t, name) for t in graph.tensors] for name in ("producer", "name", "bytes")}}


def _ops(graph: OpGraph) -> dict[str, list[Any]]:
    fields = ("id", "op", "compute_us", "persistent_bytes", "output_bytes", "temporary_bytes", "issue_us", "colocation", "pin", "part")
    return {
        **{name: [getattr(op, name) for op in graph.ops] for name in fields},
        "phase": [PHASES.index(op.phase) for op in graph.ops],
        "module": _modules(graph),
        "inputs": [list(inputs) for inputs in graph.inputs],
        "resident": [v for v, op in enumerate(graph.ops) if op.resident],
    }


def _modules(graph: OpGraph) -> list[str | None]:
    """The module of each op, so that a backward pass has the groups of its forward pass: of one that knows none that of the forward op it
    belongs to, or else, as of sums of gradients, the innermost that all it reads are in."""
    found = [op.module for op in graph.ops]
    for v in graph.order:
        op = graph.ops[v]
        if found[v] is None and op.forward_op in graph.index:
            found[v] = found[graph.index[op.forward_op]]
        if found[v] is None and op.phase == "backward":
            read = [(found[graph.tensors[t].producer] or "").split(".") for t in graph.inputs[v]]
            found[v] = ".".join(commonprefix(read)) or None
    return found


def _plan(run: RunFolder) -> dict[str, Any]:
    """The plan's file without what is as long as the graph, and priorities in the ops' order. One of groups of devices names no graph."""
    value = run.plan.to_json()
    whole = {"placement", "op_digests", "peak_memory_bytes", "options", "command"} | ({"graph_fingerprint"} if run.hybrid else set())
    kept = {name: found for name, found in value.items() if name not in whole}
    kept["lower_bound_us"] = bound_of(run.plan, run.timeline)
    return kept | {"priority": None if run.plan.priority is None else list(run.plan.priority)}


def _critical(run: RunFolder) -> dict[str, list[Any]]:
    """The ops of the critical path, and its transfers by tensor and target: where a link was busy, of what its next op does not read."""
    path = Paths(run.timeline).critical()
    hops = [[stretch.transfer.tensor, stretch.transfer.target] for stretch in path if stretch.transfer is not None]
    return {"critical": [stretch.op for stretch in path if stretch.kind == OP], "hops": hops}


def _measured(run: RunFolder, report: Run) -> dict[str, Any] | None:
    if run.measured is None:
        return None
    step = steps_of(run)[-1]
    seen = [_times(step.span[v]) if v in step.span else (None, None) for v in range(len(run.graph))]
    return {
        "step_us": step.step_us,
        "start_us": [start for start, _ in seen],
        "end_us": [end for _, end in seen],
        "transfers": [[c.tensor, c.source, c.target, *_times((c.start_us, c.end_us))] for c in step.copies],
        "busy_us": _times(step.busy_us),
        "memory_found": report.peaks.found if run.measured.clock == _BY_ALLOCATORS else "computed",
        "memory": step.memory and [[_times(at_us for at_us, _ in course), [held for _, held in course]] for course in step.memory],
    }


def _explanation(run: RunFolder) -> dict[str, Any]:
    """The explanation, without what can be seen in the timeline anyway."""
    summary = explain_plan(run.plan).to_json()
    kept = {name: summary[name] for name in ("transfers", "idle", "what_ifs")}
    return {"critical_path": {"parts": summary["critical_path"]["parts"]}, **kept}


def _times(us: Iterable[float]) -> list[float]:
    return [round(float(t), 2) for t in us]
