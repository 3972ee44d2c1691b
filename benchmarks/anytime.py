"""What `auto` has after some seconds, beside what it has after many: how much of a long search a short one gives.

    python -m benchmarks.anytime GRAPH.json ... [--seconds=10,60,600] [--ccr=0.1,1,10] [--devices=4] [--memory=loose] [--out=FILE.json]

Clusters are those of benchmarks/families.py. Each time limit is a search of its own, after one that is not counted, which compiles
what is compiled. A search uses two threads: what others take of the cores meanwhile it has not, so that share stands beside it.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.files import require_writable, write_json
from baechi_ext.place.common import PlaceOptions
from benchmarks.families import cluster_for
from benchmarks.machine import machine
from benchmarks.placers import clocks, load_of_others
from runtime import pipeline
from runtime.tables import as_time


def searched(graph: OpGraph, cluster: Cluster, seconds: float, seed: int) -> dict[str, Any]:
    """One search: its limit, its plan's worth, what it took and what others took meanwhile."""
    begin, since = clocks(), time.perf_counter()
    options = PlaceOptions(seed=seed, time_limit_seconds=seconds)
    result = pipeline.plan(graph, cluster, pipeline.PlanRequest("auto", options=options))
    return {
        "limit_seconds": seconds,
        "seconds": time.perf_counter() - since,
        "predicted_us": result.predicted_step_us,
        "lower_bound_us": result.lower_bound_us,
        "load_of_others": load_of_others(begin),
    }


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One per graph, ratio and limit; `of_longest` is the predicted step by that of the longest search."""
    for path in args.graphs:
        graph = OpGraph.load(path)
        for ccr in args.ccr:
            cluster = cluster_for(graph, ccr, args.devices, args.memory)
            searched(graph, cluster, min(args.seconds), args.seed)
            found = [searched(graph, cluster, seconds, args.seed) for seconds in args.seconds]
            longest = max(found, key=lambda row: row["limit_seconds"])["predicted_us"]
            for row in found:
                yield {"graph": graph.name, "ops": len(graph), "ccr": ccr, **row, "of_longest": row["predicted_us"] / longest}


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints a Markdown table."""
    table = Table("graph", "ops", "ccr", "limit", "took", "predicted step", "of the longest", "over bound", "others", box=box.MARKDOWN)
    for row in found:
        load = row["load_of_others"]
        table.add_row(
            *(row["graph"], str(row["ops"]), f"{row['ccr']:g}", f"{row['limit_seconds']:g} s", f"{row['seconds']:.1f} s"),
            *(as_time(row["predicted_us"]), f"{row['of_longest']:.4f}", f"{row['predicted_us'] / row['lower_bound_us']:.3f}"),
            "-" if load is None else f"{load:.0%}",
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", metavar="GRAPH", nargs="+")
    parser.add_argument("--seconds", type=numbers, default=[10.0, 60.0, 600.0])
    parser.add_argument("--ccr", type=numbers, default=[0.1, 1.0, 10.0])
    parser.add_argument("--devices", default="4")
    parser.add_argument("--memory", choices=("loose", "tight"), default="loose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.out is not None:
        require_writable(args.out)
    found = list(rows(args))
    show(found, Console(width=160, highlight=False))
    if args.out is not None:
        write_json(args.out, {"command": "python -m benchmarks.anytime " + " ".join(sys.argv[1:]), **machine(), "rows": found})


if __name__ == "__main__":
    main()
