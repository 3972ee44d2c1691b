"""Search times of `baechi pase --model_name`: all models of the registry, and what data parallelism costs in times of the least cost.

    python -m benchmarks.pase_captured --out=benchmarks/results/pase_captured.json

A model is captured in a process of its own and searched there, cost tables included, for each number of devices in turn, several times.
Times are the processor's. Calls of one layer are split alike; a search of UNTIED models without that shows what it saves, and whether it
costs anything.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from baechi_ext.shard.baselines import data_parallel
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.search import Found, search
from baechi_runtime.models.registry import MODELS, ModelOptions, make_step
from baechi_runtime.report.tables import as_size, as_time
from benchmarks.runner import Benchmark, Row, in_fresh_process, in_turn, markdown, progress, table, timed

UNTIED = ("rnnlm",)
BATCH = 64
DEVICES, ROUNDS = (2, 4, 8, 64), 3


def sample(model: str, devices: Sequence[int], rounds: int, options: ModelOptions) -> Row:
    """One model's row, measured in this process. The registry's own sizes, but for what the options say."""
    from baechi_runtime.models.training_step import optimizer_spec
    from baechi_runtime.sharding.captured import captured_module

    step = make_step(model, options, optimizer_spec("sgd", 0.01))
    made, took = timed(lambda: captured_module(step.module, step.inputs, name=model, batch_dim=step.batch_dim))
    graph = made.graph
    free = replace(graph, ties=())
    searches = in_turn({p: partial(timed, partial(search, graph, Machine(devices=p))) for p in devices}, rounds)
    untied = [(p, *timed(partial(search, free, Machine(devices=p)))) for p in devices if model in UNTIED]
    return {
        "model": model,
        "calls": len(graph.nodes),
        "unknown": made.unknown,
        "capture_cpu_seconds": took["cpu_seconds"],
        "rows": [_row(p, found) for p, found in searches.items()],
        "untied": [{"devices": p, **seconds, "status": found.status, "cost_flop": found.cost} for p, found, seconds in untied],
    }


def _row(devices: int, searches: Sequence[tuple[Found, dict[str, float]]]) -> Row:
    found = searches[-1][0]
    return {
        "devices": devices,
        "cpu_seconds": [seconds["cpu_seconds"] for _, seconds in searches],
        "status": found.status,
        "cost_flop": found.cost,
        "data_parallel": data_parallel(found.tables).cost / found.cost,
        "largest_table_bytes": 8 * found.elimination.largest,
    }


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for model in MODELS:
        progress(f"capturing and searching {model}")
        yield {"batch": BATCH, "models": [in_fresh_process(sample, model, DEVICES, ROUNDS, ModelOptions(batch_size=BATCH))]}


def _median(row: Row) -> str:
    return as_time(1e6 * statistics.median(row["cpu_seconds"]))


def report(found: Row) -> str:
    """Times and data parallelism's cost by model; and what splitting calls of a layer alike saves."""
    lines, untied = [], []
    for model in found["models"]:
        rows = model["rows"]
        first = [model["model"], str(model["calls"]), as_time(1e6 * model["capture_cpu_seconds"])]
        worst = [as_size(max(row["largest_table_bytes"] for row in rows)), " ".join(sorted({row["status"] for row in rows}))]
        lines.append([*first, *map(_median, rows), *(f"{row['data_parallel']:.2f}" for row in rows), *worst])
        untied += [{"model": model["model"], "free": free, "row": row} for free, row in zip(model["untied"], rows, strict=False)]
    devices = [row["devices"] for row in found["models"][0]["rows"]]
    titles = [*(f"{p} devices" for p in devices), *(f"data parallel, {p}" for p in devices)]
    columns = {
        "calls split freely": "{model}",
        "devices": "{free[devices]}",
        "time": lambda row: as_time(1e6 * row["free"]["cpu_seconds"]),
        "time, alike": lambda row: _median(row["row"]),
        "cost, alike / free": lambda row: f"{row['row']['cost_flop'] / row['free']['cost_flop']:.6f}",
    }
    return markdown(["model", "calls", "captured", *titles, "largest", "status"], lines) + "\n\n" + table(columns, untied)


main = Benchmark("pase_captured", __doc__, {}, measure, report).main

if __name__ == "__main__":
    main()
