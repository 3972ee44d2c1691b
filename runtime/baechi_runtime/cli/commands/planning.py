"""The commands about plans of graphs in files: place, simulate, explain, diff and export. They return exit codes."""

from functools import partial
from pathlib import Path
from typing import Any

from baechi_ext.cost.hardware import costs_on
from baechi_ext.ir import OpGraph, Plan
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.cli.commands.output import Output, fail
from baechi_runtime.cli.commands.stages import stage_of
from baechi_runtime.cli.flags.placing import ClusterRequest
from baechi_runtime.cli.flags.planning import DiffRequest, ExplainRequest, ExportRequest, PlaceRequest, SimulateRequest
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.train_request import HardwareRequest, refuse
from baechi_runtime.host.interrupts import exit_code
from baechi_runtime.report import exports, tables
from baechi_runtime.report.elsewhere import Elsewhere
from baechi_runtime.report.progress import progress


def place(request: PlaceRequest, output: Output) -> int:
    """Makes a plan; 130 where a search was interrupted, 143 by SIGTERM, 129 by SIGHUP, with its best plan written."""
    cluster, graph, elsewhere = request.cluster, _read(request.graph), None
    if request.hardware is not None:
        source = None
        if request.measured_on is not None:
            source = stage_of("torch", "torch.hardware_probe").hardware_of(request.measured_on)
        graph = costs_on(graph, request.hardware, source)
        elsewhere = Elsewhere(request.hardware, source, one_device_timeline(graph, cluster.devices[cluster.fastest].speed), graph)
    with output.infeasible_printed():
        result = pipeline.plan_watched(graph, cluster, request.plan, pipeline.plan)
        if elsewhere is not None:
            result = pipeline.whole_if_faster(result, graph, cluster, request.plan, elsewhere.single)
    if request.out is not None:
        result.plan.save(request.out, output.made_by)
    return _report_plan(result, output, request.out, elsewhere)


def plan_elsewhere(asked: HardwareRequest, output: Output) -> int:
    """Plans a built-in model's step for hardware that is not here."""
    plan_only, out = stage_of("torch", "torch.plan_only").plan_only, asked.request.out
    output.keep_settings(out, "train")
    with output.infeasible_printed():
        placement, elsewhere = plan_only(asked)
    if out is not None:
        placement.save(Path(out), output.made_by)
    return _report_plan(placement.result, output, out, elsewhere)


def _report_plan(result: PlanResult, output: Output, out: str | None, elsewhere: Elsewhere | None) -> int:
    """Prints a plan that is not run; the exit code of the search."""
    from baechi_runtime.report.printed import Placed

    timeline, plan = result.timeline, result.plan
    known: dict[str, Any] = {"busy_us": list(timeline.busy_us), "transfers": len(timeline.transfers), "notes": list(result.notes)}
    facts = {"method": f"{plan.method} ({result.status}, {result.placement_seconds:.3g} s)", "plan": out or "not written (no --out)"}
    if elsewhere is not None:
        known["elsewhere"] = elsewhere.to_json(result)
        facts |= elsewhere.facts(result)
    elif plan.method in pipeline.SEARCHES and len(timeline.cluster) > 1 and not result.splits:
        facts["verdict"] = result.why_whole
    if result.notes:
        facts["note"] = "; ".join(result.notes)
    output.report(lambda: Placed(**plan.to_json(), **known), partial(tables.print_timeline, timeline, result.lower_bound_us, facts))
    if result.interrupted:
        return fail("interrupted; this is the best plan found until then", exit_code())
    return 0


def simulate(request: SimulateRequest, output: Output) -> int:
    """Says what a plan is worth."""
    from baechi_runtime.report.comparing_plans import simulated

    graph = _read(request.graph)
    with progress(f"simulating {len(graph)} ops"):
        report = simulated(graph, request.what_if)
    output.report(report.report, report.print)
    return 0


def explain(request: ExplainRequest, output: Output) -> int:
    """Says what bounds a plan, or where else an op could be."""
    from baechi_ext.hybrid.plan import load_plan
    from baechi_ext.ir.hints import as_pinned
    from baechi_runtime.report.explaining import explained
    from baechi_runtime.report.plan_files import as_planned, on_devices, other_costs, plan_and_graph, shard_plan_at

    sharded = shard_plan_at(request.plan)
    if sharded is not None:
        from baechi_runtime.report.sharded_plans import explain_sharded

        others = request.graph is not None or request.cluster != ClusterRequest()
        refuse(others, f"{request.plan} is a shard plan, which holds its layers and devices; drop --graph and what describes a cluster")
        output.report(*explain_sharded(sharded, request.op))
        return 0
    plan_file, graph_file = plan_and_graph(request.plan, request.graph)
    with progress(f"reading {plan_file} and its graph"):
        graph = OpGraph.load(graph_file)
        plan = load_plan(plan_file, graph, request.cluster.file)
    plan = on_devices(as_pinned(plan.on(request.cluster.cluster(plan.cluster))))
    with progress(f"explaining a plan of {len(graph)} ops"):
        found = explained(plan, request.op, other_costs(as_planned(plan_file, graph)))
    output.report(found.report, found.print)
    return 0


def diff(request: DiffRequest, output: Output) -> int:
    """Says what two plans differ in."""
    from baechi_ext.explain import diff_plans
    from baechi_ext.hybrid.plan import load_plan
    from baechi_runtime.report.comparing_plans import print_diff
    from baechi_runtime.report.plan_files import on_devices, other_costs, plan_and_graph, shard_plan_at
    from baechi_runtime.report.printed import Difference

    sharded = shard_plan_at(request.before), shard_plan_at(request.after)
    if any(sharded):
        from baechi_runtime.report.sharded_plans import diff_sharded

        refuse(all(sharded) and request.graph is not None, f"{request.before} is a shard plan, which holds its layers; drop --graph")
        output.report(*diff_sharded((request.before, sharded[0]), (request.after, sharded[1])))
        return 0
    before, graph_file = plan_and_graph(request.before, request.graph)
    after, _ = plan_and_graph(request.after, str(graph_file))
    graph = _read(graph_file)
    with progress(f"comparing two plans of {len(graph)} ops"):
        plans = [on_devices(load_plan(file, graph)) for file in (before, after)]
        diff = diff_plans(*plans)
        sides = zip("AB", plans, (diff.before, diff.after), strict=True)
        notes = [f"{name}: {note}" for name, plan, timeline in sides for note in other_costs(plan, timeline)]
    output.report(lambda: Difference(**diff.to_json(), notes=notes), lambda: print_diff(diff, notes))
    return 0


def export(request: ExportRequest, output: Output) -> int:
    """Writes a plan for another program, to stdout where no file is given."""
    plan = Plan.load(request.plan, _read(request.graph))
    with progress(f"exporting a plan of {len(plan.graph)} ops as {request.format}"):
        exported = exports.export(plan, request.format, output.made_by)
    if request.out is not None:
        exported.save(request.out)
    elif not output.json:
        print(exported.text.rstrip("\n"))
        return 0
    lines = [*exported.lines, f"written to      {request.out}"]
    output.report(lambda: exported.printed, lambda: print("\n".join(lines)))
    return 0


def _read(graph: str | Path) -> OpGraph:
    with progress(f"reading {graph}"):
        return OpGraph.load(graph)
