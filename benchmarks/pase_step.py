"""Measured steps of models split by PaSE's strategy, data parallelism, experts' strategies, DDP and FSDP2, beside the predicted ones.

    python -m benchmarks.pase_step --out=benchmarks/results/pase_step.json

For each model and number of processes `baechi train --sharding` runs once: it measures the processes and their links, searches, compares
each strategy's step with the one that is not split, in double precision, and then times steps that take turns. Kendall's tau says how far
the predicted order of the strategies is the measured one.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

from baechi_runtime.report.tables import as_size, as_time
from benchmarks.runner import Benchmark, Row, progress, some_of, table

STRATEGIES = ("pase", "data_parallel", "expert", "ddp", "fsdp2")
MODELS = {
    "alexnet": ("--batch_size=16", "--image_size=127"),
    "rnnlm": ("--batch_size=16", "--rnn_units=256", "--vocab_size=4000", "--max_seq_length=20"),
    "transformer": ("--batch_size=8", "--num_layers=2", "--d_model=256", "--d_ff=1024", "--vocab_size=4000"),
    "inception_v3": ("--batch_size=8", "--image_size=139"),
}
"""The flags that make each small enough for some CPU cores."""
FLAGS = {"--models": some_of(MODELS), "--processes": (2, 4), "--steps": {"type": int, "default": 10, "help": "measured of each strategy"}}
_TIMEOUT_SECONDS = 900


def measured(model: str, processes: int, steps: int) -> Row:
    """The report of one run of the command. Raises RuntimeError with what it said where it fails."""
    arguments = [f"--model_name={model}", *MODELS[model], f"--num_devices={processes}", f"--num_steps={steps}", "--json"]
    command = [sys.executable, "-m", "baechi_ext", "train", *arguments, f"--sharding={','.join(STRATEGIES)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    reports: list[Row] = []
    for processes, model in product(args.processes, args.models):
        reports.append(measured(model, processes, args.steps))
        progress(f"{model} in {processes} processes")
        yield {"reports": reports}


def report(found: Row) -> str:
    """A row for each strategy of each run."""
    rows = []
    for run in found["reports"]:
        tau = "" if run["kendall_tau"] is None else f"{run['kendall_tau']:+.2f}"
        first = {"model": run["model"], "processes": run["num_devices"], "tau": tau}
        rows += [{**strategy, **(dict.fromkeys(first, "") if i else first)} for i, strategy in enumerate(run["strategies"])]
    columns = {
        "model": "{model}",
        "processes": "{processes}",
        "strategy": "{name}",
        "predicted": lambda row: as_time(row["predicted_step_us"]),
        "measured": lambda row: as_time(row["measured_step_us"]["median"]),
        "min to max": lambda row: " to ".join(as_time(side(row["measured_step_us"]["samples"])) for side in (min, max)),
        "sent": lambda row: as_size(row["sent_bytes"]),
        "messages": lambda row: str(sum(row["collectives"].values())),
        "tau": "{tau}",
    }
    return table(columns, rows)


main = Benchmark("pase_step", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
