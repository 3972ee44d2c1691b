r"""Plans that `auto` has after some seconds, beside those it has after many: how much of a long search a short one gives.

    python -m benchmarks.anytime GRAPH.json ... [--seconds=10,60,600] [--ccr=0.1,1,10] [--devices=4] [--out=FILE.json]

The steps of built-in models over two parts of their batch, each on one core:

    for model in inception_v3 wide_towers gnmt_v2 nasnet transformer gpt2 resnet101 alexnet rnnlm; do
        python -m benchmarks.captured $model --parts=2 --out=runs/graphs/${model}_parts.json
        taskset -c 0 python -m benchmarks.anytime runs/graphs/${model}_parts.json --seconds=10,600 --ccr=1 --devices=2 \
            --out=benchmarks/results/anytime_parts_$model.json
    done

Clusters are those of benchmarks/families.py. Each time limit is a search of its own, after one that is not counted, which compiles
what is compiled. A search uses two threads: what others take of the cores meanwhile it has not, so that share stands beside it.
"""

import argparse
import os
import time
from collections.abc import Iterator

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.place.common import PlaceOptions
from baechi_runtime.drivers import pipeline
from baechi_runtime.measure.samples import LoadOfOthers
from baechi_runtime.report.tables import as_time
from benchmarks.families import cluster_for
from benchmarks.runner import Benchmark, Row, timed

FLAGS = {
    "graphs": {"metavar": "GRAPH", "nargs": "+"},
    "--seconds": (10.0, 60.0, 600.0),
    "--ccr": (0.1, 1.0, 10.0),
    "--devices": "4",
}
COLUMNS = {
    "graph": "{graph}",
    "ops": "{ops}",
    "ccr": "{ccr:g}",
    "limit": "{limit_seconds:g} s",
    "took": "{seconds:.1f} s",
    "predicted step": lambda row: as_time(row["predicted_us"]),
    "of the longest": "{of_longest:.4f}",
    "over bound": lambda row: f"{row['predicted_us'] / row['lower_bound_us']:.3f}",
    "others": lambda row: "-" if row["load_of_others"] is None else f"{row['load_of_others']:.0%}",
}


def searched(graph: OpGraph, cluster: Cluster, seconds: float) -> Row:
    """One search: its limit, its plan's worth, what it took and what others took meanwhile."""
    load = LoadOfOthers(time.process_time, os.sched_getaffinity(0))
    request = pipeline.PlanRequest("auto", options=PlaceOptions(time_limit_seconds=seconds))
    result, took = timed(lambda: pipeline.plan(graph, cluster, request))
    worth = {"predicted_us": result.predicted_step_us, "lower_bound_us": result.lower_bound_us}
    return {"limit_seconds": seconds, "seconds": took["seconds"], **worth, "load_of_others": load.share()}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row per graph, ratio and limit; `of_longest` is the predicted step by that of the longest search."""
    for path in args.graphs:
        graph = OpGraph.load(path)
        for ccr in args.ccr:
            cluster = cluster_for(graph, ccr, args.devices, "loose")
            searched(graph, cluster, min(args.seconds))
            found = [searched(graph, cluster, seconds) for seconds in args.seconds]
            longest = max(found, key=lambda row: row["limit_seconds"])["predicted_us"]
            about = {"graph": graph.name, "ops": len(graph), "ccr": ccr}
            yield {"rows": [{**about, **row, "of_longest": row["predicted_us"] / longest} for row in found]}


main = Benchmark("anytime", __doc__, FLAGS, measure, COLUMNS).main

if __name__ == "__main__":
    main()
