"""Predicted and measured peak memory of worker processes, for every model: how far the simulator's number is from what the system says.

    python -m benchmarks.memory [--model_names=A,B] [--methods=contiguous,m_etf] --out=benchmarks/results/memory

Writes NAME.json and NAME.md. Measured is what a worker process holds in memory at most during one real step, beyond what it holds when no
step runs and the step is not its own, freed memory given back (baechi_runtime.torch.processes.rank_part); one row for each device that
runs anything.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from baechi_ext.cost import attach_costs
from baechi_ext.ir import Link
from baechi_ext.ir.files import read_json
from baechi_ext.place.common import PlaceOptions
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.report.tables import as_size
from baechi_runtime.torch.backend import TorchBackend, capture, on_devices
from baechi_runtime.torch.cluster import find_cluster
from baechi_runtime.torch.measure import how_measured, measured_peak_bytes
from baechi_runtime.torch.processes.environment import is_worker
from baechi_runtime.torch.processes.launch import run_workers
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from benchmarks.runner import Benchmark, Row, table
from benchmarks.sizes import SIZES

DEVICES, TIMEOUT_SECONDS = 2, 900.0
QUICK = ProfileOptions(warmup=1, repeats=2)
"""Times only decide in which order ops run; memory is the same in every pass."""
LINK = Link(us_per_byte=0.0005, latency_us=50)
FLAGS = {"--model_names": tuple(SIZES), "--methods": ("contiguous", "m_etf")}


def run(methods: Sequence[str], backend: TorchBackend) -> Row:
    """Everything found out about one model, as JSON."""
    request, executor = backend.request, backend.executor
    step, graph, binding = capture(request)
    graph = attach_costs(graph, profile_step(executor, graph, binding, step, QUICK))
    cluster, _ = find_cluster(request, executor)
    rows = []
    for method in methods:
        timeline = pipeline.plan(graph, cluster, pipeline.PlanRequest(method, options=PlaceOptions(seed=0))).timeline
        measured = measured_peak_bytes(executor, timeline, binding, step)
        for device, (predicted, found) in enumerate(zip(timeline.peak_memory_bytes, measured, strict=True)):
            if device in timeline.placement:
                rows.append({"method": method, "device": device, "predicted_bytes": predicted, "measured_bytes": found})
    return {"model": request.model, "measured_by": how_measured(executor), "rows": rows}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """In workers, the one model of theirs, told by the first of them."""
    if is_worker():
        (name,) = args.model_names
        devices = {"num_devices": DEVICES, "workers": "process", "link": LINK, "timeout_seconds": TIMEOUT_SECONDS}
        request = TrainRequest(name, pipeline.PlanRequest(), SIZES[name], "momentum", **devices)
        found = on_devices(request, partial(run, args.methods))
        if found is not None:
            yield {"models": [found]}
        return
    for name in args.model_names:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "model.json"
            run_workers([f"--model_names={name}", f"--methods={','.join(args.methods)}", f"--out={out}"], DEVICES, "benchmarks.memory")
            yield {"models": read_json(out, "result of one model")["models"]}


def report(found: Row) -> str:
    """The result as Markdown."""
    rows = [{"model": model["model"], **row} for model in found["models"] for row in model["rows"]]
    columns = {
        **{key: f"{{{key}}}" for key in ("model", "method", "device")},
        "predicted": lambda row: as_size(row["predicted_bytes"]),
        "measured": lambda row: as_size(row["measured_bytes"]),
        "predicted off by": lambda row: f"{error(row):+.1%}",
    }
    return f"{table(columns, rows)}\n\nThe worst is {max(abs(error(row)) for row in rows):.1%} off. `{found['command']}`"


def error(row: Row) -> float:
    return row["predicted_bytes"] / row["measured_bytes"] - 1


main = Benchmark("memory", __doc__, FLAGS, measure, report, markdown=True).main

if __name__ == "__main__":
    main()
