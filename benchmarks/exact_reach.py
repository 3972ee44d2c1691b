"""Measures how far `exact` proves optimality: random graphs by number of ops, devices, and communication to computation ratio (CCR).

    python -m benchmarks.exact_reach [--ops=8,12,16,20,30] [--time_limit=60] [--out=FILE]

The CCR is the mean transfer time over the mean compute time. A quarter of the graphs each are layered, fork-joins, random, and training
steps whose backward ops are tied to their forward ops. One row per cell: the share proven, the median and longest time, and
the largest gap that was left.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from baechi_ext.ir import Cluster, Link, Op, OpGraph
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import place
from benchmarks.runner import Benchmark, Row, progress, timed

Pairs = list[tuple[int, int]]
_MEAN_BYTES = 50.5
DEVICES, CCRS, INSTANCES = (2, 3), (0.1, 1.0, 10.0), 4
FLAGS = {"--ops": (8, 12, 16, 20, 30), "--time_limit": 60.0}
COLUMNS = {
    "ops": "{ops:g}",
    "devices": "{devices:g}",
    "CCR": "{ccr:g}",
    "proven": lambda row: f"{row['proven'] / len(row['seconds']):.0%}",
    "median s": lambda row: f"{statistics.median(row['seconds']):.3f}",
    "longest s": lambda row: f"{max(row['seconds']):.3f}",
    "largest gap": lambda row: f"{max(row['gap']):.2%}",
}


def layered(n: int, rng: random.Random) -> Pairs:
    """Layers of three; each op reads from one or two of the layer before."""
    edges = []
    for v in range(3, n):
        before = range(3 * (v // 3) - 3, 3 * (v // 3))
        edges += [(u, v) for u in rng.sample(before, rng.randint(1, 2))]
    return edges


def fork_join(n: int, rng: random.Random) -> Pairs:
    """One op, chains side by side, one op."""
    width = max(2, round(n**0.5))
    inner = range(1, n - 1)
    chains = [inner[i::width] for i in range(width)]
    edges = [pair for chain in chains for pair in zip(chain, chain[1:], strict=False)]
    return edges + [(0, chain[0]) for chain in chains if chain] + [(chain[-1], n - 1) for chain in chains if chain]


def sparse(n: int, rng: random.Random) -> Pairs:
    """Each op reads from one or two earlier ones."""
    return [(u, v) for v in range(1, n) for u in rng.sample(range(v), min(v, rng.randint(1, 2)))]


def training(n: int, rng: random.Random) -> Pairs:
    """A sparse forward graph and its mirror image; each op feeds its backward op."""
    half = n // 2
    forward = sparse(half, rng)
    return forward + [(n - 1 - v, n - 1 - u) for u, v in forward] + [(v, n - 1 - v) for v in range(half)]


SHAPES: tuple[Callable[[int, random.Random], Pairs], ...] = (layered, fork_join, sparse, training)


def instance(num_ops: int, num_devices: int, ccr: float, seed: int) -> tuple[OpGraph, Cluster]:
    """Ops of 10 to 100 us; tensors of 1 to 100 bytes over links that take `ccr` times the mean op for the mean tensor."""
    rng = random.Random(f"{num_ops} {num_devices} {ccr} {seed}")
    shape = SHAPES[seed % len(SHAPES)]
    tie = shape is training
    ops = [
        Op(f"o{v}", compute_us=rng.uniform(10, 100), colocation=f"g{min(v, num_ops - 1 - v)}" if tie else None) for v in range(num_ops)
    ]
    size = [rng.randint(1, 100) for _ in range(num_ops)]
    edges = [(f"o{u}", f"o{v}", size[u], "") for u, v in dict.fromkeys(shape(num_ops, rng))]
    return OpGraph.from_edges(ops, edges), Cluster.uniform(num_devices, link=Link(ccr * 55 / _MEAN_BYTES, 0))


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """One row per cell, with all times and gaps."""
    place("exact", *instance(4, 2, 1.0, 0))  # compiles what is not compiled yet
    for ops, devices, ccr in product(args.ops, DEVICES, CCRS):
        row: Row = {"ops": ops, "devices": devices, "ccr": ccr, "proven": 0, "seconds": [], "gap": []}
        for seed in range(INSTANCES):
            options = PlaceOptions(time_limit_seconds=args.time_limit)
            result, took = timed(partial(place, "exact", *instance(ops, devices, ccr, seed), options))
            row["seconds"].append(took["seconds"])
            row["gap"].append(result.predicted_step_us / result.lower_bound_us - 1)
            row["proven"] += result.status == "optimal"
        progress(f"{ops} ops, {devices} devices, CCR {ccr}: {row['proven']}/{INSTANCES} proven")
        yield {"rows": [row]}


main = Benchmark("exact_reach", __doc__, FLAGS, measure, COLUMNS).main

if __name__ == "__main__":
    main()
