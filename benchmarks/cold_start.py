"""Measures how long the first plan waits for compiled kernels: `baechi place`, where nothing is compiled and after set-up compiled all.

    python -m benchmarks.cold_start [--rounds=3] [--graph=benchmarks/graphs/inception_v3.json.gz] --out=benchmarks/results/cold_start.json

Each round has caches of its own. A search's time limit is its own: what it takes beyond is loading, compiling and reporting.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baechi_ext.ir.files import require_writable, write_json
from benchmarks.machine import machine

ROOT = Path(__file__).parent.parent
GRAPH = ROOT / "benchmarks" / "graphs" / "inception_v3.json.gz"
SEARCH_SECONDS = 5
METHODS = {"m_sct": (), "auto": (f"--time_limit={SEARCH_SECONDS}",)}
COMPILING = ("-m", "baechi_ext.place.kernels")


def run(name: str, command: Sequence[str], folder: str) -> dict[str, Any]:
    """One process with a cache in `folder`: its seconds on the clock, and of processors."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "runtime")))
    environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "PYTHONPATH": paths}
    used, begin = _processor_seconds(), time.perf_counter()
    subprocess.run([sys.executable, *command], env=environment, cwd=folder, check=True, capture_output=True)
    seconds = time.perf_counter() - begin
    row = {"task": name, "seconds": seconds, "processor_seconds": _processor_seconds() - used, "load_average": os.getloadavg()[0]}
    sys.stderr.write(f"{name}: {seconds:.2f} s\n")
    return row


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def a_round(graph: Path) -> list[dict[str, Any]]:
    """Each method where nothing is compiled; then set-up, and each method twice."""
    places = {
        method: ("-m", "baechi_runtime", "place", str(graph), f"--placement_method={method}", "--num_devices=2", *flags)
        for method, flags in METHODS.items()
    }
    rows = []
    for method, command in places.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(f"{method}, nothing compiled", command, folder))
    with tempfile.TemporaryDirectory() as folder:
        rows.append(run("compile all", COMPILING, folder))
        rows[-1]["bytes"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        for which in ("first", "second"):
            rows += [run(f"{method}, {which} after set-up", command, folder) for method, command in places.items()]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graph", type=Path, default=GRAPH)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    require_writable(args.out)
    about, rows = machine(), []
    for number in range(args.rounds):
        rows += [{"round": number, **row} for row in a_round(args.graph.resolve())]
    command = "python -m benchmarks.cold_start " + " ".join(sys.argv[1:] if argv is None else argv)
    summary = {name: statistics.median(row["seconds"] for row in rows if row["task"] == name) for name in [row["task"] for row in rows]}
    write_json(args.out, {"command": command, **about, "search_seconds": SEARCH_SECONDS, "median_seconds": summary, "rows": rows})


if __name__ == "__main__":
    main()
