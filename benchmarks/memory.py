"""Predicted and measured peak memory of worker processes, for every model: how far the simulator's number is from what the system says.

    python -m benchmarks.memory [--model_names=A,B] [--methods=contiguous,m_etf] --out=benchmarks/results/memory

Writes NAME.json and NAME.md. Measured is what a worker process holds in memory at most during one real step, beyond what it holds when no
step runs and the step is not its own, freed memory given back (runtime.processes.local_share); one row per device that runs anything.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from baechi_ext.cost import attach_costs
from baechi_ext.ir import Link
from baechi_ext.ir.files import read_json, write_json
from baechi_ext.place.common import PlaceOptions
from benchmarks.machine import machine
from benchmarks.step_time import SIZES
from runtime import pipeline
from runtime.accounting import how_measured, measured_peak_bytes
from runtime.executor import Executor
from runtime.processes.launch import run_workers
from runtime.processes.worker_group import is_worker
from runtime.profiler import ProfileOptions, profile_step
from runtime.tables import as_size
from runtime.train_request import TrainRequest
from runtime.training import capture, find_cluster, with_executor

METHODS = ("contiguous", "m_etf")
TIMEOUT_SECONDS = 900.0
QUICK = ProfileOptions(warmup=1, repeats=2)
"""Times only decide in which order ops run; memory is the same in every pass."""
LINK = Link(us_per_byte=0.0005, latency_us=50)


def run(methods: Sequence[str], request: TrainRequest, executor: Executor) -> dict[str, Any]:
    """Everything found out about one model, as JSON."""
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


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The result as Markdown."""
    yield "| model | method | device | predicted | measured | predicted off by |"
    yield "|---|---|---|---|---|---|"
    worst = 0.0
    for model in result["models"]:
        for row in model["rows"]:
            error = row["predicted_bytes"] / row["measured_bytes"] - 1
            worst = max(worst, abs(error))
            sizes = f"{as_size(row['predicted_bytes'])} | {as_size(row['measured_bytes'])}"
            yield f"| {model['model']} | {row['method']} | {row['device']} | {sizes} | {error:+.1%} |"
    yield ""
    yield f"The worst is {worst:.1%} off. `{result['command']}`"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_names", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--num_devices", type=int, default=2)
    parser.add_argument("--optimizer", default="momentum")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    if is_worker():
        (name,) = args.model_names
        request = TrainRequest(
            name, pipeline.PlanRequest(), SIZES[name], args.optimizer, num_devices=args.num_devices, workers="process",
            link=LINK, timeout_seconds=TIMEOUT_SECONDS,
        )  # fmt: skip
        found = with_executor(request, partial(run, args.methods, request))
        if found is not None:
            write_json(args.out, found)
        return
    models = []
    for name in args.model_names:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "model.json"
            flags = [f"--methods={','.join(args.methods)}", f"--num_devices={args.num_devices}", f"--optimizer={args.optimizer}"]
            run_workers([f"--model_names={name}", *flags, f"--out={out}"], args.num_devices, TIMEOUT_SECONDS, "benchmarks.memory")
            models.append(read_json(out, "result of one model"))
        command = "python -m benchmarks.memory " + " ".join(sys.argv[1:] if argv is None else argv)
        result = {"command": command, **machine(), "models": models}
        write_json(args.out.with_suffix(".json"), result)
        args.out.with_suffix(".md").write_text("\n".join(lines(result)) + "\n", encoding="utf-8")
        print("\n".join(lines(result)), flush=True)


if __name__ == "__main__":
    main()
