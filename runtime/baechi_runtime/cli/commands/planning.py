"""The commands about plans of graphs in files: place, simulate, explain, diff and export. They return exit codes."""

import argparse
from functools import partial
from pathlib import Path

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.files import require_writable
from baechi_runtime.cli.commands.output import fail, made_by, print_json, report_on
from baechi_runtime.cli.flags import common as flags
from baechi_runtime.drivers import pipeline
from baechi_runtime.host.interrupts import exit_code
from baechi_runtime.report import exports, tables
from baechi_runtime.report.progress import progress


def place(args: argparse.Namespace) -> int:
    """Makes a plan; 130 where a search was interrupted, 143 by SIGTERM, with its best plan written."""
    request, cluster = flags.plan_request(args), flags.placers_view(args, flags.cluster_of(args))
    if args.out is not None:
        require_writable(args.out)
    graph = _read(args.graph)
    try:
        result = pipeline.plan_watched(graph, cluster, request, pipeline.plan)
    except InfeasibleError as e:
        if args.json:
            print_json(args, e.to_json())
        raise
    if args.out is not None:
        result.plan.save(args.out, made_by(args))
    timeline = result.timeline
    known = {"busy_us": timeline.busy_us, "transfers": len(timeline.transfers), "notes": list(result.notes)}
    facts = {
        "method": f"{result.plan.method} ({result.status}, {result.placement_seconds:.3g} s)",
        "plan": args.out or "not written (no --out)",
    }
    if request.method in pipeline.SEARCHES and len(cluster) > 1 and not result.splits:
        facts["verdict"] = result.why_whole
    if result.notes:
        facts["note"] = "; ".join(result.notes)
    print_text = partial(tables.print_timeline, timeline, result.lower_bound_us, facts)
    report_on(args, lambda: {**result.plan.to_json(), **known}, print_text)
    if result.interrupted:
        return fail("interrupted; this is the best plan found until then", exit_code())
    return 0


def simulate(args: argparse.Namespace) -> int:
    """Says what a plan is worth."""
    from baechi_runtime.report.comparing_plans import WhatIf, simulated

    graph, given = _read(args.graph), None if args.cluster is None else Cluster.load(args.cluster)
    factors = args.comm_cost_factor, args.cost_factor, args.seed
    asked = WhatIf(args.plan, given, lambda cluster: flags.cluster_of(args, cluster), *factors, tuple(args.pin))
    with progress(f"simulating {len(graph)} ops"):
        report = simulated(graph, asked)
    report_on(args, report.to_json, report.print)
    return 0


def explain(args: argparse.Namespace) -> int:
    """Says what bounds a plan, or where else an op could be."""
    from baechi_ext.explain import PlanExplanation, explain_plan, op_choices
    from baechi_ext.hybrid.plan import load_plan
    from baechi_runtime.report.explaining import print_choices, print_explanation
    from baechi_runtime.report.plan_files import as_planned, on_devices, other_costs, plan_and_graph, shard_plan_at

    sharded = shard_plan_at(args.plan)
    if sharded is not None:
        from baechi_runtime.report.sharded_plans import explain_sharded

        report_on(args, *explain_sharded(sharded, args.op))
        return 0
    plan_file, graph_file = plan_and_graph(args.plan, args.graph)
    with progress(f"reading {plan_file} and its graph"):
        graph = OpGraph.load(graph_file)
        plan = load_plan(plan_file, graph, None if args.cluster is None else Cluster.load(args.cluster))
    plan = on_devices(plan.on(flags.cluster_of(args, plan.cluster)))
    with progress(f"explaining a plan of {len(graph)} ops"):
        explained = explain_plan(plan) if args.op is None else op_choices(plan, args.op)
        notes = other_costs(as_planned(plan_file, graph))
    if isinstance(explained, PlanExplanation):
        print_text = partial(print_explanation, explained, notes)
    else:
        print_text = partial(print_choices, explained, args.op, plan.cluster, notes)
    report_on(args, lambda: {**explained.to_json(), "notes": list(notes)}, print_text)
    return 0


def diff(args: argparse.Namespace) -> int:
    """Says what two plans differ in."""
    from baechi_ext.explain import diff_plans
    from baechi_ext.hybrid.plan import load_plan
    from baechi_runtime.report.comparing_plans import print_diff
    from baechi_runtime.report.plan_files import as_planned, on_devices, other_costs, plan_and_graph, shard_plan_at

    sharded = shard_plan_at(args.before), shard_plan_at(args.after)
    if any(sharded):
        from baechi_runtime.report.sharded_plans import diff_sharded

        report_on(args, *diff_sharded((args.before, sharded[0]), (args.after, sharded[1])))
        return 0
    before, graph_file = plan_and_graph(args.before, args.graph)
    after, _ = plan_and_graph(args.after, str(graph_file))
    graph = _read(graph_file)
    with progress(f"comparing two plans of {len(graph)} ops"):
        diff = diff_plans(*(on_devices(load_plan(file, graph)) for file in (before, after)))
        notes = [f"{name}: {note}" for name, file in (("A", before), ("B", after)) for note in other_costs(as_planned(file, graph))]
    report_on(args, lambda: {**diff.to_json(), "notes": notes}, lambda: print_diff(diff, notes))
    return 0


def export(args: argparse.Namespace) -> int:
    """Writes a plan for another program."""
    plan = Plan.load(args.plan, _read(args.graph))
    with progress(f"exporting a plan of {len(plan.graph)} ops as {args.format}"):
        exported = exports.export(plan, args.format, made_by(args))
    if args.out is not None:
        exported.save(args.out)
    lines = [*exported.lines, f"written to      {args.out or 'nothing (no --out)'}"]
    report_on(args, lambda: exported.printed, lambda: print("\n".join(lines)))
    return 0


def _read(graph: str | Path) -> OpGraph:
    with progress(f"reading {graph}"):
        return OpGraph.load(graph)
