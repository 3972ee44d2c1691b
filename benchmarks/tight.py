"""Which methods find a plan where memory is tight: limits of planted plans (benchmarks/planted.py), so that every case has one.

    python -m benchmarks.tight [--set=tuning,held_out] [--cases=training-] [--methods=auto,m_etf] [--slack=1.02,1.05] [--out=FILE.json]

`auto` runs until it has a plan, at most for --time_limit seconds; its seconds are those until then. Other methods know no limit but
their own. Every plan is simulated again here. Slack 1 leaves exactly the bytes of the plan that a search of minutes came to.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.check import memory_violations, placement_violations
from baechi_ext.ir.files import read_json, require_writable, write_json
from baechi_ext.place.common import PlaceOptions, SearchProgress
from baechi_ext.place.registry import METHODS, place
from baechi_ext.simulate import simulate
from benchmarks.machine import machine
from benchmarks.planted import PLANS, SETS

SEARCH = "auto"


def run(args: argparse.Namespace, result: dict[str, Any]) -> None:
    plans = read_json(PLANS, "planted plans")["plans"]
    for name in args.set:
        for case in SETS[name]:
            if args.cases and not any(part in case.name for part in args.cases):
                continue
            for slack in args.slack:
                cluster = case.cluster(plans[case.name], slack)
                cells = {method: placed(method, case.graph, cluster, args) for method in args.methods}
                result["rows"].append({"set": name, "case": case.name, "ops": len(case.graph), "slack": slack, "cells": cells})
                told = "  ".join(f"{method} {cell['status']} {cell['seconds']:.1f} s" for method, cell in cells.items())
                sys.stderr.write(f"{name}  {case.name}  {slack:g}  {told}\n")
                if args.out is not None:
                    write_json(args.out, result)


def placed(method: str, graph: OpGraph, cluster: Cluster, args: argparse.Namespace) -> dict[str, Any]:
    """Whether the method finds a plan, in how many seconds, and the plan's makespan."""
    options = PlaceOptions(args.seed, time_limit_seconds=args.time_limit, watch=until_it_fits if method == SEARCH else None)
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        plan = place(method, graph, cluster, options).plan
    except InfeasibleError as e:
        plan, status = None, e.status
    seconds = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    if plan is None:
        return {"status": status, **seconds}
    timeline = simulate(graph, cluster, plan.placement, plan.priority)
    wrong = placement_violations(graph, cluster, plan.placement) + memory_violations(cluster, timeline.peak_memory_bytes)
    return {"status": "invalid" if wrong else "feasible", "makespan_us": timeline.makespan_us, **seconds}


def until_it_fits(progress: SearchProgress) -> None:
    if progress.excess_bytes == 0:
        raise KeyboardInterrupt


def show(result: dict[str, Any], console: Console) -> None:
    """How many cases each method has a plan for, by set and slack, and the median and the most seconds of those."""
    methods = list(result["rows"][0]["cells"]) if result["rows"] else []
    table = Table("set", "slack", "cases", *methods, title="plans found (median seconds, most seconds)")
    kinds = dict.fromkeys((row["set"], row["slack"]) for row in result["rows"])
    for name, slack in kinds:
        rows = [row for row in result["rows"] if (row["set"], row["slack"]) == (name, slack)]
        table.add_row(name, f"{slack:g}", str(len(rows)), *(_summary([row["cells"][m] for row in rows]) for m in methods))
    console.print(table)


def _summary(cells: Sequence[dict[str, Any]]) -> str:
    seconds = sorted(cell["seconds"] for cell in cells if cell["status"] in ("feasible", "optimal"))
    return f"{len(seconds)} ({seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f})" if seconds else "0"


def main(argv: Sequence[str] | None = None) -> None:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def numbers(text: str) -> list[float]:
        return [float(number) for number in names(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", type=names, default=list(SETS), help="tuning, held_out; default: both")
    parser.add_argument("--cases", type=names, default=[], help="only cases whose name contains one of these")
    parser.add_argument("--methods", type=names, default=[SEARCH, "m_etf", "m_sct", "heft"])
    parser.add_argument("--slack", type=numbers, default=[1.0, 1.02, 1.05], help="limits, in parts of what the planted plan needs")
    parser.add_argument("--time_limit", type=float, default=10.0, help="for auto, and for solvers (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    unknown = [name for name in args.set if name not in SETS] + [m for m in args.methods if m not in METHODS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; sets are {', '.join(SETS)}; methods are {', '.join(METHODS)}")
    if args.out is not None:
        require_writable(args.out)
    command = "python -m benchmarks.tight " + " ".join(sys.argv[1:])
    result = {"command": command, **machine(), "options": {"time_limit": args.time_limit, "seed": args.seed}, "rows": []}
    run(args, result)
    show(result, Console(width=140, highlight=False))


if __name__ == "__main__":
    main()
