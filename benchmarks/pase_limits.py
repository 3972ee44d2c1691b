"""Searches at their limits: tables that would be too large, searched on with a beam, and memory that the cheapest strategy does not fit.

    python -m benchmarks.pase_limits --out=benchmarks/results/pase_limits.json

DenseNet-121 (128 images, 8 devices): how large a table would have to be, and what a beam of one state finds with tables of 16 MiB. The
Transformer (64 sentences, 8 devices): within how much of the bound the search ends for some limits of memory.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.errors import ShardError
from baechi_ext.ir.files import write_json
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import network
from baechi_ext.shard.search import SearchOptions, search
from benchmarks.machine import machine

DEVICES = 8
MIB = 1 << 20
TABLE_MIB, BEAM = 16, 1
LIMITS_MIB = (2500, 2550, 2600, 2700, 2800, 2900)


def dense(batch: int, devices: int) -> dict[str, Any]:
    """DenseNet-121 with a beam, and what the search says of the tables that it would need without."""
    graph, on = network("densenet121", batch), Machine(devices=devices)
    options, refusal = SearchOptions(beam=BEAM, table_bytes=TABLE_MIB * MIB), ""
    try:
        search(graph, on, replace(options, beam=None))
    except ShardError as e:
        refusal = str(e)
    began, used = time.perf_counter(), time.process_time()
    found = search(graph, on, options)
    return {
        "graph": "densenet121",
        "batch": batch,
        "devices": devices,
        "beam": BEAM,
        "table_bytes": TABLE_MIB * MIB,
        "without_beam": refusal,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - used,
        "status": found.status,
        "cost_flop": found.cost,
        "lower_bound_flop": found.lower_bound,
    }


def limited(batch: int, devices: int, limits_mib: Sequence[int]) -> list[dict[str, Any]]:
    """The Transformer without a limit of memory, and with each of these."""
    graph, rows = network("transformer", batch), []
    for limit in (None, *limits_mib):
        began, used = time.perf_counter(), time.process_time()
        found = search(graph, Machine(devices=devices, memory_bytes=None if limit is None else limit * MIB))
        rows.append(
            {
                "graph": "transformer",
                "batch": batch,
                "devices": devices,
                "limit_bytes": None if limit is None else limit * MIB,
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - used,
                "held_bytes": found.held_bytes,
                "status": found.status,
                "cost_flop": found.cost,
                "lower_bound_flop": found.lower_bound,
            }
        )
    return rows


def tables_of(beam: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Table]:
    """For a person."""
    first, second = Table(box=None, pad_edge=False), Table(box=None, pad_edge=False)
    for name in ("graph", "p", "tables, MiB", "beam", "s", "processor s", "status", "above the bound"):
        first.add_column(name, justify="right")
    times = f"{beam['seconds']:.2f}", f"{beam['cpu_seconds']:.2f}"
    sizes = beam["graph"], str(beam["devices"]), f"{beam['table_bytes'] / MIB:.0f}", str(beam["beam"])
    first.add_row(*sizes, *times, beam["status"], _above(beam))
    for name in ("graph", "p", "limit, MiB", "held, MiB", "s", "status", "above the bound", "above no limit"):
        second.add_column(name, justify="right")
    for row in rows:
        limit = "-" if row["limit_bytes"] is None else f"{row['limit_bytes'] / MIB:.0f}"
        more = f"{row['cost_flop'] / rows[0]['cost_flop'] - 1:.2%}"
        held = f"{row['held_bytes'] / MIB:.0f}"
        second.add_row(row["graph"], str(row["devices"]), limit, held, f"{row['seconds']:.2f}", row["status"], _above(row), more)
    return [first, second]


def _above(row: dict[str, Any]) -> str:
    return f"{row['cost_flop'] / row['lower_bound_flop'] - 1:.2%}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark, prints the tables, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=DEVICES)
    parser.add_argument("--batches", type=int, nargs=2, default=(128, 64), help="of DenseNet-121 and of the Transformer")
    parser.add_argument("--limits", type=int, nargs="+", default=list(LIMITS_MIB), help="MiB a device")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    beam = dense(args.batches[0], args.devices)
    rows = limited(args.batches[1], args.devices, args.limits)
    for table in tables_of(beam, rows):
        Console(width=150, highlight=False).print(table)
    print(f"densenet121 without a beam: {beam['without_beam']}")
    if args.out is not None:
        command = "python -m benchmarks.pase_limits " + " ".join(sys.argv[1:] if argv is None else argv)
        write_json(args.out, {"command": command, **machine(), "beam": beam, "memory": rows})


if __name__ == "__main__":
    main()
