"""Run folders to make pages of."""

import json
from pathlib import Path
from typing import Any

from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.cluster import Link
from baechi_ext.ir.measured import MeasuredOp, MeasuredStep, MeasuredTransfer, ResidentBytes
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import place
from baechi_runtime.files.run_folder import RunFolder

HOSTILE = "<script>alert(1)</script>"
ENDING = "</script><img src=x onerror=alert(2)>"


def towers(layers: int = 4, towers: int = 3) -> dict[str, Any]:
    """A training step of some towers with forward, backward and update ops in modules; two ops and a module have hostile names."""
    nodes: list[dict[str, Any]] = [{"id": HOSTILE, "op": "input", "compute_us": 5, "output_bytes": 4096}]
    edges: list[tuple[str, str]] = []
    classes = {}
    for tower in range(towers):
        module = ENDING if tower == 0 else f"towers.{tower}"
        classes |= {module: HOSTILE, **{f"{module}.{i}": "Conv2d" for i in range(layers)}}
        names = [f"conv.{tower}.{i}" for i in range(layers)]
        if tower == 0:
            names[0] = ENDING
        for i, name in enumerate(names):
            common = {"module": f"{module}.{i}", "colocation": f"weight.{tower}.{i}", "output_bytes": 4096}
            nodes.append({"id": name, "op": "aten.conv", "compute_us": 100 + 7 * i + tower, "persistent_bytes": 1 << 14, **common})
            back = {"id": f"grad {name}", "op": "aten.conv_backward", "phase": "backward", "compute_us": 200 + 9 * i, "forward_op": name}
            nodes.append({**back, "temporary_bytes": 1 << 13, **common})
            nodes.append({"id": f"update {name}", "op": "sgd", "phase": "update", "compute_us": 10, "forward_op": name, **common})
        chain = [HOSTILE, *names, "loss", *(f"grad {name}" for name in reversed(names))]
        edges += [*zip(chain, chain[1:], strict=False), *((name, f"grad {name}") for name in names)]
        edges += [(f"grad {name}", f"update {name}") for name in names]
    nodes.append({"id": "loss", "op": "loss", "compute_us": 20, "output_bytes": 8})
    graph = {"name": f"towers {HOSTILE}", "modules": list(classes), "classes": list(classes.values())}
    return {"graph": graph, "nodes": nodes, "edges": [{"source": s, "target": t, "bytes": 4096} for s, t in edges]}


def parted(layers: int = 3, parts: int = 2) -> dict[str, Any]:
    """A training step over parts of its batch: each has ops of its own, and each layer a parameter and an update that all share."""
    nodes: list[dict[str, Any]] = []
    edges: list[tuple[str, str]] = []
    for i in range(layers):
        nodes += [{"id": f"w.{i}", "op": "parameter", "compute_us": 0, "persistent_bytes": 1 << 14, "colocation": f"w.{i}"}]
        nodes += [{"id": f"update.{i}", "op": "sgd", "phase": "update", "compute_us": 20, "colocation": f"w.{i}"}]
    for k in range(parts):
        names = [f"layer.{i}@{k}" for i in range(layers)]
        nodes += [{"id": name, "op": "linear", "compute_us": 100, "output_bytes": 4096, "part": k} for name in names]
        back = {"op": "linear_backward", "phase": "backward", "compute_us": 200, "output_bytes": 4096, "part": k}
        nodes += [{"id": f"grad.{name}", "forward_op": name, **back} for name in names]
        chain = [*names, *(f"grad.{name}" for name in reversed(names))]
        edges += zip(chain, chain[1:], strict=False)
        edges += [(f"w.{i}", name) for i, name in enumerate(names)] + [(f"grad.{name}", f"update.{i}") for i, name in enumerate(names)]
    return {"graph": {"name": "parted"}, "nodes": nodes, "edges": [{"source": s, "target": t, "bytes": 4096} for s, t in edges]}


def write_plan(folder: Path, value: dict[str, Any], method: str = "m_etf") -> Path:
    """A folder with a graph and a plan for two devices, as `baechi place` makes them."""
    folder.mkdir()
    (folder / "graph.json").write_text(json.dumps(value))
    graph = OpGraph.load(folder / "graph.json")
    cluster = Cluster.uniform(2, memory_bytes=1 << 20 if len(graph) < 100 else None, link=Link(us_per_byte=0.001, latency_us=5))
    place(method, graph, cluster, PlaceOptions()).plan.save(folder / "plan.json")
    return folder


def write_run(folder: Path, value: dict[str, Any]) -> Path:
    """A folder with all that `baechi train` writes; the measured step is the predicted one, a little slower."""
    write_plan(folder, value)
    run = RunFolder.load(folder)
    measured_step(run.plan, 1.25).save(folder / "measured.json")
    (folder / "report.json").write_text(json.dumps(report_of(run)))
    (folder / "compare.json").write_text(json.dumps(comparison()))
    return folder


def measured_step(plan: Plan, factor: float) -> MeasuredStep:
    """The plan's predicted step, that much slower, as if it had been measured."""
    timeline = RunFolder(Path(), plan.graph, plan, None, None, None).timeline
    ops = zip(plan.graph.ops, plan.placement, timeline.start_us, timeline.end_us, strict=True)
    tensors = plan.graph.tensors
    return MeasuredStep(
        graph_fingerprint=plan.graph.fingerprint,
        executor="thread",
        clock="perf_counter",
        wall_us=timeline.makespan_us * factor,
        ops=tuple(MeasuredOp(op.id, d, start * factor, end * factor) for op, d, start, end in ops),
        transfers=tuple(
            MeasuredTransfer(plan.graph.ops[tensors[t.tensor].producer].id, tensors[t.tensor].name, t.source, t.target,
                             t.start_us * factor, t.end_us * factor)
            for t in timeline.transfers
        ),
        memory=tuple((ResidentBytes(0.0, 1 << 14), ResidentBytes(100.0, 1 << 16)) for _ in plan.cluster.devices),
        notes=("one op was not seen to run",),
    )  # fmt: skip


def report_of(run: RunFolder) -> dict[str, Any]:
    """The part of report.json that a page reads."""
    step = run.timeline.makespan_us
    ratio = {"median": 1.4, "low": 1.3, "high": 1.5}
    return {
        "schema_version": 1,
        "model": f"towers {HOSTILE}",
        "executor": "thread",
        "command": ["baechi", "train", "--out=a folder"],
        "versions": {"baechi": "1.0", "torch": "2.0"},
        "predicted_step_us": {"single": 2 * step, "placed": step},
        "measured_step_us": {"placed": {"median": step * 1.25, "min": step, "samples": [step, step * 1.25, step * 1.5]}},
        "speedup_interval": ratio,
        "speedup_over_eager": ratio,
        "predicted_speedup": 2.0,
        "peak_memory_bytes": {"predicted": list(run.timeline.peak_memory_bytes), "measured": [1 << 17, 1 << 17]},
        "parity": {"passed": True, "compared": 12, "max_abs_diff": 0.0},
        "load_of_others": 0.01,
        "doubts": [],
        "notes": [f"a note on {HOSTILE}"],
    }


def comparison() -> dict[str, Any]:
    """A compare.json of two methods, one of which could not run."""
    measured = {"median": 900.0, "min": 880.0, "samples": [880.0, 900.0, 950.0]}
    first = {"method": "m_sct", "predicted_step_us": 870.0, "measured_step_us": measured, "ratio": {"median": 1.4, "low": 1.3, "high": 1.5}}
    return {
        "schema_version": 1,
        "kind": "baechi comparison",
        "methods": [{**first, "plan": "plan_m_sct.json"}, {"method": HOSTILE, "predicted_step_us": None, "note": f"failed: {ENDING}"}],
    }
