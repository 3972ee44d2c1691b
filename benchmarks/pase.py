"""Search times of `baechi pase` beside the original's, its memory, how both grow, and what other strategies cost.

    python -m benchmarks.pase --out=benchmarks/results/pase.json

Every sample is the first search of a fresh process: the network built, all cost tables, the search. Rounds go over all cells, so that what
else the machine does meets all of them. `published` are the times of the original and of FlexFlow in Table I of the PaSE paper (Elango,
IPDPS 2021; on a Xeon E5 of the Sandy Bridge generation). Memory is the process's peak, and what of it the imports alone take.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.ir.files import write_json
from baechi_ext.shard.baselines import experts, random_walk
from baechi_ext.shard.graph import ShardGraph
from baechi_ext.shard.layers import Layers
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import COST_MODELS, network, transformer
from baechi_ext.shard.rules import Rules
from baechi_ext.shard.rules_original import OriginalRules
from baechi_ext.shard.search import SearchOptions, search
from benchmarks.machine import machine
from runtime.process_memory import high_water_bytes

BATCH = {"alexnet": 128, "resnet101": 128, "inception3": 128, "rnnlm": 64, "transformer": 64}
PUBLISHED = {
    "alexnet": {4: (0.226, 2.54), 8: (0.253, 2.77), 16: (0.295, 6.98), 32: (0.361, 7.92), 64: (0.475, 257.30)},
    "inception3": {4: (14.398, 69.21), 8: (20.018, 146.51), 16: (39.791, 365.82), 32: (86.039, 937.96), 64: (196.253, 2237.04)},
    "rnnlm": {4: (0.057, 107.47), 8: (0.086, 164.29), 16: (0.069, 432.19), 32: (0.131, 668.22), 64: (0.215, 1041.98)},
    "transformer": {4: (9.752, None), 8: (28.798, None), 16: (130.882, None), 32: (553.022, None), 64: (1883.187, None)},
}
"""Seconds of PaSE and of FlexFlow's search, by network and number of devices; the paper has no ResNet."""
GOALS = {("alexnet", 64): 0.03, ("rnnlm", 64): 0.03, ("resnet101", 64): 0.5, ("inception3", 64): 0.5, ("transformer", 64): 5.0}
DEVICES = (4, 8, 16, 32, 64)
DEPTHS = (3, 6, 12, 24, 48)


def cell_name(graph: str, devices: int, cost_model: str, depth: int = 0) -> str:
    return f"{graph},{devices},{cost_model},{depth}"


def _graph(name: str, cost_model: str, depth: int) -> ShardGraph:
    if not depth:
        return network(name, BATCH[name], cost_model=cost_model)
    layers = Layers(name, OriginalRules(smallest=1) if cost_model == "original" else Rules())
    transformer.build(layers, BATCH[name], 512, depth)
    return layers.graph()


def sample(cell: str) -> dict[str, Any]:
    """One search of a cell in this process: seconds by the clock and of the processor, peak memory, and what was found."""
    name, devices, cost_model, depth = cell.split(",")
    original = cost_model == "original"
    before = high_water_bytes()
    began, used = time.perf_counter(), time.process_time()
    graph = _graph(name, cost_model, int(depth))
    machine_of = Machine(devices=int(devices), word_bytes=8 if original else 4)
    found = search(graph, machine_of, SearchOptions(original=original))
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - used,
        "search_seconds": found.seconds["search"],
        "peak_bytes": high_water_bytes(),
        "imports_bytes": before,
        "cost_flop": found.cost,
        "status": found.status,
        "layers": len(graph.nodes),
        "configurations": sum(found.tables.sizes),
        "operations": found.elimination.operations,
        "largest_table_bytes": 8 * found.elimination.largest,
    }


def measured(cells: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """All cells, each sampled once a round in a process of its own."""
    samples: dict[str, list[dict[str, Any]]] = {cell: [] for cell in cells}
    for i in range(rounds):
        for cell in cells:
            command = [sys.executable, "-m", "benchmarks.pase", f"--cell={cell}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            samples[cell].append(json.loads(done.stdout))
        print(f"round {i + 1} of {rounds}", file=sys.stderr)
    return [_row(cell, found) for cell, found in samples.items()]


def _row(cell: str, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    name, devices, cost_model, depth = cell.split(",")
    last = samples[-1]
    facts = ("cost_flop", "status", "layers", "configurations", "operations", "largest_table_bytes", "imports_bytes")
    return {
        "graph": name,
        "devices": int(devices),
        "cost_model": cost_model,
        "depth": int(depth),
        **{key: last[key] for key in facts},
        **{key: [s[key] for s in samples] for key in ("seconds", "cpu_seconds", "search_seconds", "peak_bytes")},
    }


def compared(devices: int, cost_model: str) -> list[dict[str, Any]]:
    """What other strategies cost on each network, in times of the minimum; a walk gets as long as the search, another ten times that."""
    rows = []
    original = cost_model == "original"
    for name in BATCH:
        began = time.perf_counter()
        on = Machine(devices=devices, word_bytes=8 if original else 4)
        found = search(_graph(name, cost_model, 0), on, SearchOptions(original=original))
        seconds = time.perf_counter() - began
        known = experts(found.tables)
        best = min(known, key=lambda b: b.cost)
        walks = [random_walk(found.tables, best, seconds=factor * seconds) for factor in (1, 10)]
        names = [*(b.name for b in known), "walk, equal time", "walk, ten times"]
        costs = {n: b.cost / found.cost for n, b in zip(names, [*known, *walks], strict=True)}
        rows.append({"graph": name, "devices": devices, "cost_model": cost_model, "seconds": seconds, "others": costs})
    return rows


def show(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    """Prints the tables."""
    console = Console(width=150, highlight=False)
    plain = [row for row in rows if not row["depth"]]
    console.print(_times(plain))
    console.print(_depths([row for row in rows if row["depth"]]))
    if others:
        console.print(_others(others))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _times(rows: Sequence[dict[str, Any]]) -> Table:
    times = ("PaSE s", "FlexFlow s", "ours s", "min", "max", "x PaSE", "goal s")
    table = _table("graph", "p", "costs", *times, "peak MB", "operations", "minimum cost")
    for row in rows:
        pase, flexflow = PUBLISHED.get(row["graph"], {}).get(row["devices"], (None, None))
        seconds = statistics.median(row["seconds"])
        goal = GOALS.get((row["graph"], row["devices"]))
        table.add_row(
            row["graph"],
            str(row["devices"]),
            row["cost_model"],
            _number(pase),
            _number(flexflow),
            f"{seconds:.4f}",
            f"{min(row['seconds']):.4f}",
            f"{max(row['seconds']):.4f}",
            _number(pase and pase / seconds),
            _number(goal),
            f"{max(row['peak_bytes']) / 1e6:.0f}",
            f"{row['operations']:.2g}",
            f"{row['cost_flop']:,.0f}",
        )
    return table


def _depths(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table("transformer", "layers", "p", "costs", "ours s", "min", "max", "peak MB", "operations")
    for row in rows:
        seconds = statistics.median(row["seconds"])
        table.add_row(
            f"{row['depth']} + {row['depth']}",
            str(row["layers"]),
            str(row["devices"]),
            row["cost_model"],
            f"{seconds:.4f}",
            f"{min(row['seconds']):.4f}",
            f"{max(row['seconds']):.4f}",
            f"{max(row['peak_bytes']) / 1e6:.0f}",
            f"{row['operations']:.2g}",
        )
    return table


def _others(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table("x the minimum", "p", "costs", *rows[0]["others"])
    for row in rows:
        table.add_row(row["graph"], str(row["devices"]), row["cost_model"], *(f"{cost:.3f}" for cost in row["others"].values()))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=lambda text: text.split(","), default=list(BATCH))
    parser.add_argument("--devices", type=lambda text: [int(p) for p in text.split(",")], default=list(DEVICES))
    parser.add_argument("--depths", type=lambda text: [int(d) for d in text.split(",") if d], default=list(DEPTHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cell", help="one sample, as JSON: GRAPH,P,COST_MODEL,DEPTH")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if args.cell is not None:
        print(json.dumps(sample(args.cell)))
        return
    cells = [cell_name(graph, p, model) for model in reversed(COST_MODELS) for graph in args.graphs for p in args.devices]
    cells += [cell_name("transformer", 16, model, depth) for model in reversed(COST_MODELS) for depth in args.depths]
    rows = measured(cells, args.rounds)
    others = [row for model in reversed(COST_MODELS) for p in (8, 64) for row in compared(p, model)]
    show(rows, others)
    if args.out is not None:
        command = "python -m benchmarks.pase " + " ".join(sys.argv[1:] if argv is None else argv)
        write_json(args.out, {"command": command, **machine(), "rows": rows, "others": others})


if __name__ == "__main__":
    main()
