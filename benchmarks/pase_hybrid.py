"""Predicted steps of `--placement_method=hybrid` by the size of groups: placement alone, sharding alone, and both.

    python -m benchmarks.pase_hybrid --out=benchmarks/results/pase_hybrid.json

Each model's step is captured and profiled on one CPU device of this machine, and then planned for a cluster of equal devices, as fast as
this one, with links that are given.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.ir import Cluster, Link
from baechi_ext.ir.files import write_json
from baechi_ext.place.common import PlaceOptions
from benchmarks.machine import machine
from runtime import pipeline
from runtime.models.registry import ModelOptions
from runtime.tables import as_time
from runtime.train_request import TrainRequest

MODELS = {
    "wide_towers": ModelOptions(batch_size=8, image_size=32),
    "transformer": ModelOptions(batch_size=8, num_layers=2, d_model=256, d_ff=1024, vocab_size=4000, max_seq_length=32),
}
LINK = Link(us_per_byte=1e-4, latency_us=20.0)
"""10 GB/s."""


def planned(model: str, devices: int, seconds: float) -> dict[str, Any]:
    """What a step is predicted to take in groups of each size, the best of them, and what one device takes."""
    from runtime.sharding.ops import sharding_of
    from runtime.thread_executor import ThreadExecutor
    from runtime.torch_devices import cpu_devices
    from runtime.training import capture_and_profile

    options = PlaceOptions(seed=0, time_limit_seconds=seconds)
    request = TrainRequest(model, pipeline.PlanRequest("hybrid", options=options), MODELS[model], num_devices=1)
    with ThreadExecutor(cpu_devices(1)) as executor:
        captured = capture_and_profile(request, executor)
    sharding = sharding_of(captured.step, captured.graph)
    result = pipeline.plan_hybrid(captured.graph, Cluster.uniform(devices, link=LINK), request.plan, sharding)
    alone = pipeline.plan(captured.graph, Cluster.uniform(1), pipeline.PlanRequest("single"))
    return {
        "model": model,
        "ops": len(captured.graph),
        "one_device_us": alone.predicted_step_us,
        "group_size": result.group_size,
        "steps_us": {str(size): step for size, step in result.steps_us},
        "lower_bound_us": result.lower_bound_us,
        "placement_seconds": result.plan.placement_seconds,
    }


def table(rows: Sequence[dict[str, Any]], devices: int) -> Table:
    """For a person."""
    made = Table(box=None, pad_edge=False)
    sizes = list(rows[0]["steps_us"])
    for name in (f"on {devices} devices, groups of", "ops", *sizes, "best", "one device"):
        made.add_column(name, justify="right")
    for row in rows:
        steps = [step if isinstance(step, str) else as_time(step) for step in row["steps_us"].values()]
        made.add_row(row["model"], str(row["ops"]), *steps, str(row["group_size"]), as_time(row["one_device_us"]))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints the table, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of placement alone, and of all else")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = [planned(model, args.devices, args.seconds) for model in args.models]
    Console(width=150, highlight=False).print(table(rows, args.devices))
    if args.out is not None:
        command = "python -m benchmarks.pase_hybrid " + " ".join(sys.argv[1:] if argv is None else argv)
        settings = {"devices": args.devices, "link": {"us_per_byte": LINK.us_per_byte, "latency_us": LINK.latency_us}}
        write_json(args.out, {"command": command, **machine(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
