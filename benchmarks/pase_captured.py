"""Search times of `baechi pase --model_name`: all models of the registry, and what data parallelism costs in times of the least cost.

    python -m benchmarks.pase_captured --out=benchmarks/results/pase_captured.json

A model is captured in a process of its own and searched there, cost tables included, for each number of devices in turn, several times.
Times are the processor's. Calls of one layer are split alike; a search of UNTIED models without that shows what it saves, and whether it
costs anything.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.ir.files import write_json
from baechi_ext.shard.baselines import data_parallel
from baechi_ext.shard.graph import ShardGraph
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.search import Found, search
from benchmarks.machine import machine
from runtime.models.registry import MODELS, ModelOptions, make_step
from runtime.tables import as_size, as_time

DEVICES = (2, 4, 8, 64)
UNTIED = ("rnnlm",)
BATCH = 64


def sample(model: str, devices: Sequence[int], rounds: int, options: ModelOptions) -> dict[str, Any]:
    """One model's row, measured in this process. The registry's own sizes, but for what the options say."""
    from runtime.sharding.models import module_of
    from runtime.step import optimizer_spec

    step = make_step(model, options, optimizer_spec("sgd", 0.01))
    began = time.process_time()
    captured = module_of(step.module, step.inputs, name=model, batch=options.batch_size).captured
    seconds = time.process_time() - began
    graph = captured.graph
    searches: dict[int, list[tuple[Found, float]]] = {p: [] for p in devices}
    for _ in range(rounds):
        for p in devices:
            searches[p].append(_searched(graph, p))
    untied = [_untied(graph, p) for p in devices] if model in UNTIED else []
    rows = [_row(p, found) for p, found in searches.items()]
    facts = {"model": model, "calls": len(graph.nodes), "unknown": captured.unknown, "capture_cpu_seconds": seconds}
    return facts | {"rows": rows, "untied": untied}


def _searched(graph: ShardGraph, devices: int) -> tuple[Found, float]:
    began = time.process_time()
    found = search(graph, Machine(devices=devices))
    return found, time.process_time() - began


def _row(devices: int, searches: Sequence[tuple[Found, float]]) -> dict[str, Any]:
    found = searches[-1][0]
    return {
        "devices": devices,
        "cpu_seconds": [seconds for _, seconds in searches],
        "status": found.status,
        "cost_flop": found.cost,
        "data_parallel": data_parallel(found.tables).cost / found.cost,
        "largest_table_bytes": 8 * found.elimination.largest,
    }


def _untied(graph: ShardGraph, devices: int) -> dict[str, Any]:
    found, seconds = _searched(replace(graph, ties=()), devices)
    return {"devices": devices, "cpu_seconds": seconds, "status": found.status, "cost_flop": found.cost}


def measured(model: str, devices: Sequence[int], rounds: int) -> dict[str, Any]:
    """The row of a fresh process."""
    numbers = ",".join(map(str, devices))
    command = [sys.executable, "-m", "benchmarks.pase_captured", f"--one={model}", f"--devices={numbers}", f"--rounds={rounds}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def tables(models: Sequence[dict[str, Any]], devices: Sequence[int]) -> list[Table]:
    """Times and data parallelism's cost by model; and what splitting calls of a layer alike saves."""
    others = (f"data parallel, {p}" for p in devices)
    times = _table("model", "calls", "captured", *(f"{p} devices" for p in devices), *others, "largest", "status")
    untied = _table("calls split freely", "devices", "time", "time, alike", "cost, alike / free")
    for found in models:
        rows = found["rows"]
        medians = [as_time(1e6 * statistics.median(row["cpu_seconds"])) for row in rows]
        ratios = [f"{row['data_parallel']:.2f}" for row in rows]
        largest, status = as_size(max(row["largest_table_bytes"] for row in rows)), {row["status"] for row in rows}
        times.add_row(found["model"], str(found["calls"]), as_time(1e6 * found["capture_cpu_seconds"]), *medians, *ratios, largest, *status)
        for free, row, alike in zip(found["untied"], rows, medians, strict=False):
            ratio = f"{row['cost_flop'] / free['cost_flop']:.6f}"
            untied.add_row(found["model"], str(free["devices"]), as_time(1e6 * free["cpu_seconds"]), alike, ratio)
    return [times, untied]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints the tables, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--devices", type=lambda text: [int(p) for p in text.split(",")], default=list(DEVICES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=MODELS, help="this model alone, in this process, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(sample(args.one, args.devices, args.rounds, ModelOptions(batch_size=BATCH))))
        return
    found = []
    for model in args.models:
        print(f"capturing and searching {model}", file=sys.stderr)
        found.append(measured(model, args.devices, args.rounds))
    for table in tables(found, args.devices):
        Console(width=180, highlight=False).print(table)
    if args.out is not None:
        command = "python -m benchmarks.pase_captured " + " ".join(sys.argv[1:] if argv is None else argv)
        write_json(args.out, {"command": command, **machine(), "batch": BATCH, "models": found})


if __name__ == "__main__":
    main()
