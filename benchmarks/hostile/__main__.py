"""Runs hostile training loops plainly and wrapped, and says where the two differ.

    python -m benchmarks.hostile [--backend=aot_eager,baechi] [--only=hooks.,own_generator] [--out=benchmarks/results/hostile_loops.json]
    python -m benchmarks.hostile --backend=baechi --microbatches=2 --out=benchmarks/results/hostile_loops_in_parts.json

Each run has a process of its own. Two runs are `equal` where all that can be observed has the same bits: losses, parameters, buffers,
gradients, what hooks collected, what was printed, states of generators. They are `rounding` within 1e-5 of a tensor's largest number; where
a batch goes in parts, within what its verified calls may differ by.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.hostile.backends import BACKENDS
from benchmarks.hostile.processes import Limits, Outcome, run_all
from benchmarks.hostile.suite import Case, all_cases
from benchmarks.hostile.verdicts import VERDICTS, verdict
from benchmarks.runner import Benchmark, Row, markdown, progress

PLAIN = "plain"


def compare(cases: Sequence[Case], backends: Sequence[str], limits: Limits) -> list[Row]:
    """Run the cases plainly and with each backend; a row for each case and backend, in that order."""
    plain = {name: outcome for (name, _), outcome in run_all([(case, PLAIN) for case in cases], limits)}
    rows = {}
    for (name, backend), outcome in run_all([(case, backend) for case in cases for backend in backends], limits):
        rows[name, backend] = row = _row(name, backend, plain[name], outcome)
        progress(f"{row['verdict']:<15} {backend} {name}  {row['detail'][:300]}")
    return [rows[case.name, backend] for case in cases for backend in backends]


def _row(name: str, backend: str, plain: Outcome, wrapped: Outcome) -> Row:
    said, detail = verdict(plain, wrapped)
    seconds = {"plain_seconds": round(plain.seconds, 3), "seconds": round(wrapped.seconds, 3)}
    return {"case": name, "backend": backend, "verdict": said, "detail": detail, **seconds, "stats": wrapped.stats}


def report(found: Row) -> str:
    """Count the verdicts by subject and backend, and say what each case that is not right differs in."""
    counts: dict[tuple[str, str], Counter] = {}
    for row in found["rows"]:
        counts.setdefault((row["case"].partition(".")[0], row["backend"]), Counter())[row["verdict"]] += 1
    counts |= {("all", backend): Counter(count) for backend, count in found["counts"].items()}
    lines = [[*kind, str(count.total()), *(str(count[name] or "") for name in VERDICTS)] for kind, count in counts.items()]
    wrong = [row for row in found["rows"] if row["verdict"] not in VERDICTS[:3]]
    details = [f"{row['verdict']}  {row['backend']}  {row['case']}: {row['detail'][:300]}" for row in wrong]
    return "\n".join((markdown(["subject", "backend", "cases", *VERDICTS], lines), *details))


def measure(args: argparse.Namespace) -> Iterator[Row]:
    cases = [case for name, case in all_cases().items() if not args.only or any(part in name for part in args.only)]
    backends = [f"{name}@{args.microbatches}" if name == "baechi" and args.microbatches > 1 else name for name in args.backend]
    rows = compare(cases, backends, Limits(args.jobs, args.time_limit))
    counts = {b: dict(Counter(row["verdict"] for row in rows if row["backend"] == b)) for b in backends}
    yield {"options": {"time_limit": args.time_limit, "microbatches": args.microbatches}, "counts": counts, "rows": rows}


def backend_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BACKENDS and ":" not in name]:
        raise argparse.ArgumentTypeError(f"unknown backend {unknown[0]!r}; choose from {', '.join(BACKENDS)}, or give MODULE:FUNCTION")
    return names


FLAGS = {
    "--backend": {"type": backend_names, "default": ["aot_eager"], "help": f"{', '.join(BACKENDS)}, or MODULE:FUNCTION"},
    "--microbatches": {"type": int, "default": 1, "help": "the parts that batches go in, where they can be split; for baechi alone"},
    "--only": (),
    "--jobs": {"type": int, "default": 2, "help": "processes at a time (default %(default)s)"},
    "--time_limit": {"type": float, "default": 120.0, "help": "seconds of one run (default %(default)s)"},
}
main = Benchmark("hostile", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
