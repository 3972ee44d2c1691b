"""Measures how good the plans of every method are, beside the proven lower bound and plain annealing, and what they take to find.

    python -m benchmarks.quality --set=tuning [--cases=training-,random-500] [--methods=m_etf,m_sct] [--time_limit=60]
        [--anneal_seconds=60] [--part=1/2] [--out=FILE.json]

Sets: tuning and held_out (benchmarks/families.py), captured (benchmarks/captured.py). Each method runs as `baechi place` in a process
of its own, which is killed after --hard_limit seconds; its plan is simulated again here. With --out every result is written as soon as
it is there, and a run that is started again goes on where it stopped. Several parts may run side by side, each on a core of its own
(`taskset -c 0 ...`) and with an --out of its own; `python -m benchmarks.quality_table FILE.json ...` prints the tables of them all.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.files import read_json
from baechi_ext.ir.plan import memory_violations, placement_violations
from baechi_ext.place.registry import METHODS
from baechi_ext.python_process import command_of, surroundings
from baechi_ext.simulate import lower_bound_us, simulate
from benchmarks.anneal import annealed
from benchmarks.captured import CapturedCase, captured_cases
from benchmarks.families import SETS, Case
from benchmarks.quality_table import ANNEALING
from benchmarks.quality_table import report as tables
from benchmarks.runner import ROOT, Benchmark, Ended, Row, child, commit, cpu_seconds_of_children, in_fresh_process, progress, some_of

Cell = Row
"""status and cpu_seconds; where there is a plan makespan_us and placement_seconds; else error."""
AnyCase = Case | CapturedCase


def part_of(text: str) -> tuple[int, int]:
    """The value of --part: which of how many."""
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError(text)
    return int(part), int(parts)


FLAGS = {
    "--set": some_of((*SETS, "captured"), ["tuning"]),
    "--methods": some_of(METHODS),
    "--anneal_seconds": 60.0,
    "--cases": {"type": lambda text: text.split(","), "default": [], "help": "only cases whose name contains one of these"},
    "--part": {"type": part_of, "default": (1, 1), "metavar": "I/N", "help": "only every N-th case, from the I-th on"},
    "--time_limit": {"type": float, "default": 60.0, "help": "for solvers and searches, seconds (default %(default)s)"},
    "--hard_limit": {"type": float, "default": 600.0, "help": "seconds after which a process is killed (default %(default)s)"},
}


def chosen_cases(args: argparse.Namespace) -> Iterator[AnyCase]:
    sets: dict[str, Sequence[AnyCase]] = {**SETS, "captured": captured_cases(ROOT / "runs" / "graphs")}
    cases = (case for name in args.set for case in sets[name])
    chosen = (case for case in cases if not args.cases or any(part in case.name for part in args.cases))
    part, parts = args.part
    return itertools.islice(chosen, part - 1, None, parts)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Measures what the file lacks, method by method."""
    options = {key: getattr(args, key) for key in ("time_limit", "anneal_seconds", "hard_limit")}
    found = {"options": options, "cases": kept(args.out, options)}
    for case in chosen_cases(args):
        hinted = any(op.expert is not None for op in case.graph.ops)
        columns = {ANNEALING: partial(beside, args)}
        columns |= {method: partial(placed, args, method, case) for method in args.methods if method != "expert" or hinted}
        for _ in fill(found["cases"], case, columns):
            yield found
    yield found


def kept(out: Path | None, options: Row) -> Row:
    """The cases of the file to go on with. Exits where it was made with other options."""
    if out is None or not out.exists():
        return {}
    found = read_json(out, "result")
    if found.get("options") != options:
        raise SystemExit(f"error: {out} was made with {found.get('options')}, not {options}; give the same options or another --out")
    cases: Row = found["cases"]
    return cases


def fill(cases: Row, case: AnyCase, columns: dict[str, Callable[[Sequence[Path]], Cell]]) -> Iterator[Cell]:
    """Adds to the case's row what it lacks of these columns.

    A column makes its cell of the files of the graph, of the cluster and for the plan.
    """
    row = cases.setdefault(case.name, {"cells": {}})
    missing = [name for name in columns if name not in row["cells"]]
    if not missing:
        return
    row |= {"ops": len(case.graph), "edges": sum(map(len, case.graph.inputs)), "devices": len(case.cluster)}
    row["lower_bound_us"] = max(row.get("lower_bound_us", 0.0), lower_bound_us(case.graph, case.cluster))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.json" for name in ("graph", "cluster", "plan")]
        case.graph.save(files[0])
        case.cluster.save(files[1])
        for name in missing:
            begun_seconds = cpu_seconds_of_children()
            cell = columns[name](files)
            cell["cpu_seconds"] = cpu_seconds_of_children() - begun_seconds
            row["lower_bound_us"] = max(row["lower_bound_us"], cell.pop("lower_bound_us", 0.0))
            row["cells"][name] = {**cell, "commit": commit(ROOT)}
            progress(f"{case.name}  {name}  {cell['status']}  {cell.get('makespan_us', cell.get('error'))}")
            yield cell


def beside(args: argparse.Namespace, files: Sequence[Path]) -> Cell:
    """The worth of plain annealing."""
    return in_fresh_process(annealed, str(files[0]), str(files[1]), args.anneal_seconds)


def placed(args: argparse.Namespace, method: str, case: AnyCase, files: Sequence[Path]) -> Cell:
    """The plan of one method, as the simulator sees it here."""
    graph, cluster, plan = files
    plan.unlink(missing_ok=True)
    words = [str(graph), f"--cluster={cluster}", f"--placement_method={method}", f"--time_limit={args.time_limit}", f"--out={plan}"]
    ended = child(command_of("baechi_ext", "place", *words, "--json"), args.hard_limit, surroundings())
    if ended.code != 0:
        return {**failed(ended), "wall_seconds": ended.seconds}
    found = Plan.load(plan, case.graph, case.cluster)
    facts = {"lower_bound_us": found.lower_bound_us, "placement_seconds": found.placement_seconds, "wall_seconds": ended.seconds}
    return {**judged(found, case.graph, case.cluster), **facts}


def judged(plan: Plan, graph: OpGraph, cluster: Cluster) -> Cell:
    """The worth of a plan; one that breaks a rule, or does not simulate to the step it predicts, is invalid."""
    us, wrong = simulated(graph, cluster, plan.placement, plan.priority)
    if abs(us - plan.predicted_step_us) > 1e-6 * us:
        wrong.append(f"it predicts {plan.predicted_step_us} us and simulates to {us} us")
    return {"status": "invalid", "error": "; ".join(wrong)} if wrong else {"status": plan.status, "makespan_us": us}


def simulated(graph: OpGraph, cluster: Cluster, placement: Sequence[int], priority: Sequence[float] | None) -> tuple[float, list[str]]:
    """The step of a plan, and what rules it breaks."""
    timeline = simulate(graph, cluster, placement, priority)
    wrong = placement_violations(graph, cluster, placement) + memory_violations(cluster, timeline.peak_memory_bytes)
    return timeline.makespan_us, wrong


def failed(ended: Ended) -> Cell:
    """Why a process gave no plan: what it printed as JSON, or its last line, or that it was killed."""
    if ended.code is None:
        return {"status": "timeout", "error": "killed at the hard limit"}
    try:
        value = json.loads(ended.out)
        return {"status": value["status"], "error": value["error"]}
    except (ValueError, KeyError, TypeError):
        return {"status": "error", "error": (ended.err.strip().splitlines() or [f"exit code {ended.code}"])[-1]}


main = Benchmark("quality", __doc__, FLAGS, measure, lambda found: tables(found["cases"])).main

if __name__ == "__main__":
    main()
