"""How long placing takes: every method on the captured graph of a model, on 2, 4 and 8 devices.

    python -m benchmarks.placing_time --model_name=inception_v3 [--repeats=5] [--out=benchmarks/results/NAME.json]

Capture and profiling are not part of it. Prints the least and the median of the repeats, the predicted step, and its ratio to the bound.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.ir.files import write_json
from baechi_ext.place.registry import METHODS
from benchmarks.machine import machine
from benchmarks.step_time import SIZES
from runtime import pipeline
from runtime.models.registry import MODELS
from runtime.tables import as_time
from runtime.thread_executor import ThreadExecutor
from runtime.torch_devices import cpu_devices
from runtime.training import TrainRequest, capture_and_profile

LINK = Link(us_per_byte=0.0, latency_us=25.0)
"""About what the thread executor's link is found to be."""


def costed_graph(model: str) -> OpGraph:
    """The model's training step, captured and profiled here."""
    request = TrainRequest(model, pipeline.PlanRequest(), SIZES[model], num_devices=1)
    with ThreadExecutor(cpu_devices(1)) as executor:
        return capture_and_profile(request, executor).graph


def run(graph: OpGraph, repeats: int) -> list[dict[str, Any]]:
    """One row per method and number of devices; repeats are interleaved over the methods."""
    rows = []
    for num_devices in (2, 4, 8):
        cluster = Cluster.uniform(num_devices, link=LINK, parallel_transfers=True)
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        results = {}
        for _ in range(repeats):
            for method in METHODS:
                begin = time.perf_counter()
                results[method] = pipeline.plan(graph, cluster, pipeline.PlanRequest(method))
                seconds[method].append(time.perf_counter() - begin)
        for method, taken in seconds.items():
            result = results[method]
            rows.append(
                {
                    "num_devices": num_devices,
                    "method": method,
                    "seconds": taken,
                    "predicted_us": result.predicted_step_us,
                    "lower_bound_us": result.lower_bound_us,
                }
            )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("devices", "method", "least s", "median s", "predicted step", "over bound"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["num_devices"]),
            row["method"],
            f"{min(row['seconds']):.3f}",
            f"{statistics.median(row['seconds']):.3f}",
            as_time(row["predicted_us"]),
            f"{row['predicted_us'] / row['lower_bound_us']:.3f}",
        )
    Console(width=120, highlight=False).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", choices=tuple(MODELS), default="inception_v3")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    graph = costed_graph(args.model_name)
    rows = run(graph, args.repeats)
    show(rows)
    if args.out is not None:
        command = "python -m benchmarks.placing_time " + " ".join(sys.argv[1:])
        write_json(args.out, {"command": command, **machine(), "ops": len(graph), "rows": rows})


if __name__ == "__main__":
    main()
