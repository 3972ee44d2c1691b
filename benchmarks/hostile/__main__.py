"""Runs hostile training loops plainly and wrapped, and says where the two differ.

    python -m benchmarks.hostile [--backend=aot_eager,baechi] [--only=hooks.,own_generator] [--out=benchmarks/results/hostile_loops.json]

Each run has a process of its own. Two runs are `equal` where all that can be observed has the same bits: losses, parameters, buffers,
gradients, what hooks collected, what was printed, states of generators. They are `rounding` within 1e-5 of a tensor's largest number.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baechi_ext.ir.files import require_writable, write_json
from benchmarks.hostile.backends import BACKENDS
from benchmarks.hostile.processes import Limits, Outcome, run_all
from benchmarks.hostile.suite import Case, all_cases
from benchmarks.hostile.verdicts import VERDICTS, verdict
from benchmarks.machine import machine

PLAIN = "plain"


def compare(cases: Sequence[Case], backends: Sequence[str], limits: Limits) -> list[dict[str, Any]]:
    """Run the cases plainly and with each backend; a row for each case and backend, in that order."""
    first = run_all([(case, PLAIN) for case in cases], limits)
    plain = {name: outcome for (name, _), outcome in first}
    rows = {}
    for (name, backend), outcome in run_all([(case, backend) for case in cases for backend in backends], limits):
        rows[name, backend] = _row(name, backend, plain[name], outcome)
        sys.stderr.write(f"{rows[name, backend]['verdict']:<15} {backend} {name}  {rows[name, backend]['detail'][:300]}\n")
    return [rows[case.name, backend] for case in cases for backend in backends]


def _row(name: str, backend: str, plain: Outcome, wrapped: Outcome) -> dict[str, Any]:
    said, detail = verdict(plain, wrapped)
    seconds = {"plain_seconds": round(plain.seconds, 3), "seconds": round(wrapped.seconds, 3)}
    return {"case": name, "backend": backend, "verdict": said, "detail": detail, **seconds, "stats": wrapped.stats}


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print how many cases have which verdict, by subject and backend, and what each that is not right differs in."""
    kinds = dict.fromkeys((row["case"].partition(".")[0], row["backend"]) for row in rows)
    table = Table("subject", "backend", "cases", *VERDICTS)
    for subject, backend in kinds:
        count = Counter(row["verdict"] for row in rows if row["case"].startswith(f"{subject}.") and row["backend"] == backend)
        table.add_row(subject, backend, str(count.total()), *_cells(count))
    for backend in dict.fromkeys(row["backend"] for row in rows):
        count = Counter(row["verdict"] for row in rows if row["backend"] == backend)
        table.add_row("all", backend, str(count.total()), *_cells(count), style="bold")
    console.print(table)
    for row in rows:
        if row["verdict"] not in VERDICTS[:3]:
            console.print(f"{row['verdict']}  {row['backend']}  {row['case']}: {row['detail'][:300]}", markup=False)


def _cells(count: Counter) -> list[str]:
    return [str(count[name] or "") for name in VERDICTS]


def main(argv: Sequence[str] | None = None) -> None:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", type=names, default=["aot_eager"], help=f"{', '.join(BACKENDS)}, or MODULE:FUNCTION")
    parser.add_argument("--only", type=names, default=[], help="only cases whose subject.name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default %(default)s)")
    parser.add_argument("--time_limit", type=float, default=120.0, help="seconds of one run (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.backend if name not in BACKENDS and ":" not in name]:
        parser.error(f"unknown backend {unknown[0]!r}; choose from {', '.join(BACKENDS)}, or give MODULE:FUNCTION")
    cases = [case for name, case in all_cases().items() if not args.only or any(part in name for part in args.only)]
    if args.list:
        print("\n".join(case.name for case in cases))
        return
    if args.out is not None:
        require_writable(args.out)
    rows = compare(cases, args.backend, Limits(args.jobs, args.time_limit))
    counts = {b: dict(Counter(row["verdict"] for row in rows if row["backend"] == b)) for b in args.backend}
    command = " ".join(["python -m benchmarks.hostile", *(sys.argv[1:] if argv is None else argv)])
    result = {"command": command, **machine(), "options": {"time_limit": args.time_limit}, "counts": counts, "rows": rows}
    if args.out is not None:
        write_json(args.out, result)
    show(rows, Console(width=140, highlight=False))


if __name__ == "__main__":
    main()
