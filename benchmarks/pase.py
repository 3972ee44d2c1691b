"""Search times of `baechi pase` beside the original's, its memory, how both grow, and what other strategies cost.

    python -m benchmarks.pase --out=benchmarks/results/pase.json

Every sample is the first search of a fresh process: the network built, all cost tables, the search. Rounds go over all cells, so that what
else the machine does meets all of them. `published` are the times of the original and of FlexFlow in Table I of the PaSE paper (Elango,
IPDPS 2021; on a Xeon E5 of the Sandy Bridge generation). Memory is the process's peak, and what of it the imports alone take.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from baechi_ext.shard.baselines import experts, random_walk
from baechi_ext.shard.graph import ShardGraph
from baechi_ext.shard.layers import Layers
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import COST_MODELS, network, transformer
from baechi_ext.shard.rules import Rules
from baechi_ext.shard.rules_original import OriginalRules
from baechi_ext.shard.search import Found, SearchOptions, search
from baechi_runtime.host.process_memory import high_water_bytes
from benchmarks.runner import Benchmark, Row, in_fresh_process, in_turn, table, timed

BATCH = {"alexnet": 128, "resnet101": 128, "inception3": 128, "rnnlm": 64, "transformer": 64}
PUBLISHED: dict[str, dict[int, tuple[float, float | None]]] = {
    "alexnet": {4: (0.226, 2.54), 8: (0.253, 2.77), 16: (0.295, 6.98), 32: (0.361, 7.92), 64: (0.475, 257.30)},
    "inception3": {4: (14.398, 69.21), 8: (20.018, 146.51), 16: (39.791, 365.82), 32: (86.039, 937.96), 64: (196.253, 2237.04)},
    "rnnlm": {4: (0.057, 107.47), 8: (0.086, 164.29), 16: (0.069, 432.19), 32: (0.131, 668.22), 64: (0.215, 1041.98)},
    "transformer": {4: (9.752, None), 8: (28.798, None), 16: (130.882, None), 32: (553.022, None), 64: (1883.187, None)},
}
"""Seconds of PaSE and of FlexFlow's search, by network and number of devices; the paper has no ResNet."""
DEVICES, LAYERS, ROUNDS = (4, 8, 16, 32, 64), (3, 6, 12, 24, 48), 5


class Cell(NamedTuple):
    """A network to search for; with a depth, a transformer of this many layers on each side."""

    graph: str
    devices: int
    cost_model: str
    depth: int = 0

    def made(self) -> ShardGraph:
        if not self.depth:
            return network(self.graph, BATCH[self.graph], cost_model=self.cost_model)
        layers = Layers(self.graph, OriginalRules(smallest=1) if self.cost_model == "original" else Rules())
        transformer.build(layers, BATCH[self.graph], 512, self.depth)
        return layers.graph()

    def searched(self) -> Found:
        original = self.cost_model == "original"
        return search(self.made(), Machine(devices=self.devices, word_bytes=8 if original else 4), SearchOptions(original=original))


def sample(cell: Cell) -> Row:
    """One search of a cell in this process: seconds by the clock and of the processor, peak memory, and what was found."""
    before = high_water_bytes()
    found, seconds = timed(cell.searched)
    return {
        "cost_flop": found.cost,
        "status": found.status,
        "layers": len(found.tables.sizes),
        "configurations": sum(found.tables.sizes),
        "operations": found.elimination.operations,
        "largest_table_bytes": 8 * found.elimination.largest,
        "imports_bytes": before,
        **seconds,
        "search_seconds": found.seconds["search"],
        "peak_bytes": high_water_bytes(),
    }


def measured(cells: Sequence[Cell], rounds: int) -> list[Row]:
    """All cells, each sampled once a round in a process of its own."""
    samples = in_turn({cell: partial(in_fresh_process, sample, cell) for cell in cells}, rounds)
    kept = ("seconds", "cpu_seconds", "search_seconds", "peak_bytes")
    return [{**cell._asdict(), **found[-1], **{key: [s[key] for s in found] for key in kept}} for cell, found in samples.items()]


def compared(devices: int, cost_model: str) -> list[Row]:
    """Costs of other strategies on each network, in multiples of the minimum; a walk gets as long as the search, another ten times that."""
    rows = []
    for name in BATCH:
        found, took = timed(Cell(name, devices, cost_model).searched)
        known = experts(found.tables)
        best = min(known, key=lambda b: b.cost)
        others = {b.name: b for b in known}
        for factor, title in ((1, "walk, equal time"), (10, "walk, ten times")):
            others[title] = random_walk(found.tables, best, seconds=factor * took["seconds"])
        costs = {title: other.cost / found.cost for title, other in others.items()}
        rows.append({"graph": name, "devices": devices, "cost_model": cost_model, "seconds": took["seconds"], "others": costs})
    return rows


def measure(args: argparse.Namespace) -> Iterator[Row]:
    models = list(reversed(COST_MODELS))
    cells = [Cell(graph, p, model) for model in models for graph in BATCH for p in DEVICES]
    cells += [Cell("transformer", 16, model, depth) for model in models for depth in LAYERS]
    rows = measured(cells, ROUNDS)
    yield {"rows": rows, "others": [row for model in models for p in (8, 64) for row in compared(p, model)]}


def _published(which: int, row: Row) -> str:
    seconds = PUBLISHED.get(row["graph"], {}).get(row["devices"], (None, None))[which]
    return "-" if seconds is None else f"{seconds:.3g}"


def _ratio(row: Row) -> str:
    return "-" if _published(0, row) == "-" else f"{PUBLISHED[row['graph']][row['devices']][0] / statistics.median(row['seconds']):.3g}"


TIMES = {
    "ours s": lambda row: f"{statistics.median(row['seconds']):.4f}",
    "min": lambda row: f"{min(row['seconds']):.4f}",
    "max": lambda row: f"{max(row['seconds']):.4f}",
    "peak MB": lambda row: f"{max(row['peak_bytes']) / 1e6:.0f}",
    "operations": "{operations:.2g}",
}
PLAIN = {"graph": "{graph}", "p": "{devices}", "costs": "{cost_model}"}
BESIDE = {"PaSE s": partial(_published, 0), "FlexFlow s": partial(_published, 1), "x PaSE": _ratio, "minimum cost": "{cost_flop:,.0f}"}
DEPTHS = {"transformer": "{depth} + {depth}", "layers": "{layers}", "p": "{devices}", "costs": "{cost_model}"}


def report(found: Row) -> str:
    plain = table({**PLAIN, **TIMES, **BESIDE}, [row for row in found["rows"] if not row["depth"]])
    depths = table({**DEPTHS, **TIMES}, [row for row in found["rows"] if row["depth"]])
    names = {name: f"{{others[{name}]:.3f}}" for name in found["others"][0]["others"]}
    others = table({"x the minimum": "{graph}", "p": "{devices}", "costs": "{cost_model}", **names}, found["others"])
    return "\n\n".join((plain, depths, others))


main = Benchmark("pase", __doc__, {}, measure, report).main

if __name__ == "__main__":
    main()
