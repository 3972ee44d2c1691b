"""Searches at their limits: tables that would be too large, searched on with a beam, and memory that the cheapest strategy does not fit.

    python -m benchmarks.pase_limits --out=benchmarks/results/pase_limits.json

DenseNet-121 (128 images, 8 devices): how large a table would have to be, and what a beam of one state finds with tables of 16 MiB. The
Transformer (64 sentences, 8 devices): within how much of the bound the search ends for some limits of memory.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from baechi_ext.errors import ShardError
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import network
from baechi_ext.shard.search import SearchOptions, search
from benchmarks.runner import Benchmark, Row, several, table, timed

MIB = 1 << 20
TABLE_MIB, BEAM = 16, 1
FLAGS = {
    "--devices": 8,
    "--batches": {"type": several(int), "default": [128, 64], "help": "of DenseNet-121 and of the Transformer"},
    "--limits": {"type": several(int), "default": [2500, 2550, 2600, 2700, 2800, 2900], "help": "MiB a device"},
}


def dense(batch: int, devices: int) -> Row:
    """DenseNet-121 with a beam, and what the search says of the tables that it would need without."""
    graph, on = network("densenet121", batch), Machine(devices=devices)
    options, refusal = SearchOptions(beam=BEAM, table_bytes=TABLE_MIB * MIB), ""
    try:
        search(graph, on, replace(options, beam=None))
    except ShardError as e:
        refusal = str(e)
    found, seconds = timed(partial(search, graph, on, options))
    about = {"graph": "densenet121", "batch": batch, "devices": devices, "beam": BEAM, "table_bytes": TABLE_MIB * MIB}
    costs = {"status": found.status, "cost_flop": found.cost, "lower_bound_flop": found.lower_bound}
    return {**about, "without_beam": refusal, **seconds, **costs}


def limited(batch: int, devices: int, limits_mib: Sequence[int]) -> list[Row]:
    """The Transformer without a limit of memory, and with each of these."""
    graph, rows = network("transformer", batch), []
    for limit in (None, *(limit * MIB for limit in limits_mib)):
        found, seconds = timed(partial(search, graph, Machine(devices=devices, memory_bytes=limit)))
        about = {"graph": "transformer", "batch": batch, "devices": devices, "limit_bytes": limit, **seconds}
        costs = {"status": found.status, "cost_flop": found.cost, "lower_bound_flop": found.lower_bound}
        rows.append({**about, "held_bytes": found.held_bytes, **costs})
    return rows


def measure(args: argparse.Namespace) -> Iterator[Row]:
    beam = dense(args.batches[0], args.devices)
    yield {"beam": beam, "memory": limited(args.batches[1], args.devices, args.limits)}


ABOVE = {"above the bound": lambda row: f"{row['cost_flop'] / row['lower_bound_flop'] - 1:.2%}"}
TIMES = {"graph": "{graph}", "p": "{devices}", "s": "{seconds:.2f}", "processor s": "{cpu_seconds:.2f}", "status": "{status}", **ABOVE}


def report(found: Row) -> str:
    beam, rows = found["beam"], found["memory"]
    beamed = {**TIMES, "tables, MiB": lambda row: f"{row['table_bytes'] / MIB:.0f}", "beam": "{beam}"}
    limits = {
        **TIMES,
        "limit, MiB": lambda row: "-" if row["limit_bytes"] is None else f"{row['limit_bytes'] / MIB:.0f}",
        "held, MiB": lambda row: f"{row['held_bytes'] / MIB:.0f}",
        "above no limit": lambda row: f"{row['cost_flop'] / rows[0]['cost_flop'] - 1:.2%}",
    }
    refusal = f"densenet121 without a beam: {beam['without_beam']}"
    return "\n\n".join((table(beamed, [beam]), table(limits, rows), refusal))


main = Benchmark("pase_limits", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
