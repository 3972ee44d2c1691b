"""Measures how long the first plan waits for compiled kernels: `baechi place`, where nothing is compiled and after set-up compiled all.

    python -m benchmarks.cold_start [--rounds=3] --out=benchmarks/results/cold_start.json

Each round has caches of its own. A search's time limit is its own: what it takes beyond is loading, compiling and reporting.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from baechi_ext.python_process import command_of, surroundings
from benchmarks.runner import ROOT, Benchmark, Row, child, progress

SEARCH_SECONDS = 5
METHODS = {"m_sct": (), "auto": (f"--time_limit={SEARCH_SECONDS}",)}
GRAPH = ROOT / "benchmarks" / "graphs" / "inception_v3.json.gz"


def run(name: str, command: Sequence[str], folder: str) -> Row:
    """One process with a cache in `folder`: its seconds on the clock, and of processors."""
    ended = child(command_of(*command), None, {**surroundings(), "NUMBA_CACHE_DIR": folder}, Path(folder))
    if ended.code:
        raise SystemExit(f"error: {name}: {ended.err}")
    progress(f"{name}: {ended.seconds:.2f} s")
    return {"task": name, "seconds": ended.seconds, "processor_seconds": ended.cpu_seconds, "load_average": os.getloadavg()[0]}


def a_round() -> Iterator[Row]:
    """Each method where nothing is compiled; then set-up, and each method twice."""
    places = {
        method: ("baechi_runtime", "place", str(GRAPH), f"--placement_method={method}", "--num_devices=2", *flags)
        for method, flags in METHODS.items()
    }
    for method, command in places.items():
        with tempfile.TemporaryDirectory() as folder:
            yield run(f"{method}, nothing compiled", command, folder)
    with tempfile.TemporaryDirectory() as folder:
        row = run("compile all", ("baechi_ext.place.kernels",), folder)
        yield {**row, "bytes": sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())}
        for which in ("first", "second"):
            for method, command in places.items():
                yield run(f"{method}, {which} after set-up", command, folder)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    rows: list[Row] = []
    for number in range(args.rounds):
        rows += (more := [{"round": number, **row} for row in a_round()])
        tasks = dict.fromkeys(row["task"] for row in rows)
        medians = {task: statistics.median(row["seconds"] for row in rows if row["task"] == task) for task in tasks}
        yield {"search_seconds": SEARCH_SECONDS, "median_seconds": medians, "rows": more}


def report(found: Row) -> str:
    return "\n".join(f"{task}: {seconds:.2f} s" for task, seconds in found["median_seconds"].items())


main = Benchmark("cold_start", __doc__, {"--rounds": 3}, measure, report).main

if __name__ == "__main__":
    main()
