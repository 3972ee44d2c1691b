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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.ir.files import write_json
from benchmarks.machine import machine
from runtime.tables import as_size, as_time

STRATEGIES = ("pase", "data_parallel", "expert", "ddp", "fsdp2")
MODELS = {
    "alexnet": ("--batch_size=16", "--image_size=127"),
    "rnnlm": ("--batch_size=16", "--rnn_units=256", "--vocab_size=4000", "--max_seq_length=20"),
    "transformer": ("--batch_size=8", "--num_layers=2", "--d_model=256", "--d_ff=1024", "--vocab_size=4000"),
    "inception_v3": ("--batch_size=8", "--image_size=139"),
}
"""The flags that make each small enough for some CPU cores."""
PROCESSES = (2, 4)
_TIMEOUT_SECONDS = 900


def measured(model: str, processes: int, steps: int) -> dict[str, Any]:
    """The report of one run of the command. Raises RuntimeError with what it said where it fails."""
    arguments = [f"--model_name={model}", *MODELS[model], f"--num_devices={processes}", f"--num_steps={steps}", "--json"]
    command = [sys.executable, "-m", "runtime", "train", *arguments, f"--sharding={','.join(STRATEGIES)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def table(reports: Sequence[dict[str, Any]]) -> Table:
    """A row for each strategy of each run."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("model", "processes", "strategy", "predicted", "measured", "min to max", "sent", "messages", "tau"):
        made.add_column(name, justify="left" if name in ("model", "strategy") else "right")
    for report in reports:
        tau = report["kendall_tau"]
        for i, run in enumerate(report["strategies"]):
            first = [report["model"], str(report["num_devices"])] if not i else ["", ""]
            samples = run["measured_step_us"]["samples"]
            spread = f"{as_time(min(samples))} to {as_time(max(samples))}"
            times = as_time(run["predicted_step_us"]), as_time(run["measured_step_us"]["median"]), spread
            sent = as_size(run["sent_bytes"]), str(sum(run["collectives"].values()))
            made.add_row(*first, run["name"], *times, *sent, "" if i or tau is None else f"{tau:+.2f}")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints the table, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, default=list(PROCESSES))
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each strategy")
    parser.add_argument("--out", type=Path, help="write all reports to this file")
    args = parser.parse_args(argv)
    reports = []
    for processes in args.processes:
        for model in args.models:
            reports.append(measured(model, processes, args.steps))
            if args.out is not None:
                write_json(args.out, {"machine": machine(), "reports": reports})
    Console(file=sys.stdout, highlight=False, width=140).print(table(reports))


if __name__ == "__main__":
    main()
