"""How good the plans of every method are: beside the proven lower bound, beside plain annealing, and what they take to find.

    python -m benchmarks.quality --set=tuning [--cases=training-,random-500] [--methods=m_etf,m_sct] [--time_limit=60]
        [--anneal_seconds=60] [--part=1/2] [--out=FILE.json]

Sets: tuning and held_out (benchmarks/families.py), captured (benchmarks/captured.py; graphs are kept in --graphs). Each method runs
as `baechi place` in a process of its own, which is killed after --hard_limit seconds; its plan is simulated again here. With --out
every result is written as soon as it is there, and a run that is started again goes on where it stopped; --redo=NAMES runs some
methods anew (annealing among them). Several parts may run side by side, each on a core of its own (`taskset --cpu-list=0 ...`) and
with an --out of its own; `python -m benchmarks.quality_table FILE.json ...` prints the tables of them all.
"""

import argparse
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.check import memory_violations, placement_violations
from baechi_ext.ir.files import read_json, require_writable, write_json
from baechi_ext.place.registry import METHODS
from baechi_ext.simulate import lower_bound_us, simulate
from benchmarks.captured import CapturedCase, captured_cases
from benchmarks.families import SETS, Case
from benchmarks.machine import commit, machine
from benchmarks.quality_table import ANNEALING, show

ROOT = Path(__file__).parent.parent
Cell = dict[str, Any]
"""status and cpu_seconds; where there is a plan makespan_us and placement_seconds; else error."""


def chosen_cases(args: argparse.Namespace) -> Iterator[Case | CapturedCase]:
    sets = {**SETS, "captured": captured_cases(args.graphs)}
    cases = (case for name in args.set for case in sets[name])
    chosen = (case for case in cases if not args.cases or any(part in case.name for part in args.cases))
    part, parts = args.part
    return itertools.islice(chosen, part - 1, None, parts)


def run(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fills `result` with what it lacks, and writes it after each method."""
    for case in chosen_cases(args):
        hinted = any(op.expert is not None for op in case.graph.ops)
        methods = [method for method in (ANNEALING, *args.methods) if method != "expert" or hinted]
        fill(args, result, case, methods, partial(cell_of, args, case))


def cell_of(args: argparse.Namespace, case: Case | CapturedCase, method: str, files: Sequence[Path]) -> Cell:
    return annealed(args, files) if method == ANNEALING else placed(args, method, files, case)


def fill(
    args: argparse.Namespace,
    result: dict[str, Any],
    case: Case | CapturedCase,
    columns: Sequence[str],
    measured: Callable[[str, Sequence[Path]], Cell],
) -> None:
    """Adds to the case's row what it lacks of these columns, and those to redo; writes the result after each.

    `measured` gets a column, and the files of the graph, of the cluster and for the plan.
    """
    row = result["cases"].setdefault(case.name, {"cells": {}})
    missing = [name for name in columns if name in args.redo or name not in row["cells"]]
    if not missing:
        return
    row |= {"ops": len(case.graph), "edges": sum(map(len, case.graph.inputs)), "devices": len(case.cluster)}
    row["lower_bound_us"] = max(row.get("lower_bound_us", 0.0), lower_bound_us(case.graph, case.cluster))
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "graph.json", Path(folder) / "cluster.json", Path(folder) / "plan.json"
        case.graph.save(files[0])
        case.cluster.save(files[1])
        for name in missing:
            begun_seconds = cpu_seconds_of_children()
            cell = measured(name, files)
            cell["cpu_seconds"] = cpu_seconds_of_children() - begun_seconds
            row["lower_bound_us"] = max(row["lower_bound_us"], cell.pop("lower_bound_us", 0.0))
            row["cells"][name] = {**cell, "commit": commit()}
            sys.stderr.write(f"{case.name}  {name}  {cell['status']}  {cell.get('makespan_us', cell.get('error'))}\n")
            if args.out is not None:
                write_json(args.out, result)


def annealed(args: argparse.Namespace, files: Sequence[Path]) -> Cell:
    seconds = args.anneal_seconds
    command = ["benchmarks.anneal", str(files[0]), f"--cluster={files[1]}", f"--time_limit={seconds}", f"--seed={args.seed}", "--json"]
    code, out, err, _ = call(command, seconds + args.hard_limit)
    if code != 0:
        return failed(code, out, err)
    value = json.loads(out)
    facts = {"makespan_us": value["makespan_us"], "placement_seconds": value["seconds"], "evaluations": value["evaluations"]}
    return {"status": "feasible", **facts} if value["valid"] else {"status": "unknown", "error": "over the memory limits"}


def placed(args: argparse.Namespace, method: str, files: Sequence[Path], case: Case | CapturedCase, options: Sequence[str] = ()) -> Cell:
    """The plan of one method, with further options of `baechi place`, as the simulator sees it here."""
    graph, cluster, plan = files
    plan.unlink(missing_ok=True)
    command = ["runtime", "place", str(graph), f"--cluster={cluster}", f"--placement_method={method}", f"--seed={args.seed}"]
    command += [f"--time_limit={args.time_limit}", f"--out={plan}", "--json", *options]
    code, out, err, seconds = call(command, args.hard_limit)
    if code != 0:
        return {**failed(code, out, err), "wall_seconds": seconds}
    found = Plan.load(plan, case.graph, case.cluster)
    facts = {"lower_bound_us": found.lower_bound_us, "placement_seconds": found.placement_seconds, "wall_seconds": seconds}
    return {**judged(found, case.graph, case.cluster), **facts}


def judged(plan: Plan, graph: OpGraph, cluster: Cluster) -> Cell:
    """What a plan is worth; one that breaks a rule, or is not worth what it says, is worth nothing."""
    timeline = simulate(graph, cluster, plan.placement, plan.priority)
    wrong = placement_violations(graph, cluster, plan.placement) + memory_violations(cluster, timeline.peak_memory_bytes)
    if abs(timeline.makespan_us - plan.predicted_step_us) > 1e-6 * timeline.makespan_us:
        wrong.append(f"it predicts {plan.predicted_step_us} us and simulates to {timeline.makespan_us} us")
    if wrong:
        return {"status": "invalid", "error": "; ".join(wrong)}
    return {"status": plan.status, "makespan_us": timeline.makespan_us}


def cpu_seconds_of_children() -> float:
    """What all processes took that were started here and have ended; beside the wall time it tells what others took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def call(module: Sequence[str], limit_seconds: float) -> tuple[int | None, str, str, float]:
    """Exit code (None: killed at the limit), stdout, stderr and seconds of `python -m module ...` and all that it starts."""
    begin = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", *module], env=environment, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=limit_seconds)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            code = None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return code, out, err, time.perf_counter() - begin


def failed(code: int | None, out: str, err: str) -> Cell:
    """Why a process gave no plan: what it printed as JSON, or its last line, or that it was killed."""
    if code is None:
        return {"status": "timeout", "error": "killed at the hard limit"}
    try:
        value = json.loads(out)
        return {"status": value["status"], "error": value["error"]}
    except (ValueError, KeyError, TypeError):
        return {"status": "error", "error": (err.strip().splitlines() or [f"exit code {code}"])[-1]}


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """An empty result, or the one that is there to go on with."""
    options = {key: getattr(args, key) for key in ("time_limit", "anneal_seconds", "hard_limit", "seed")}
    head = {"command": "python -m benchmarks.quality " + " ".join(sys.argv[1:]), **machine(), "options": options}
    if args.out is None or not args.out.exists():
        return {**head, "cases": {}}
    kept = read_json(args.out, "result")
    if kept.get("options") != options:
        raise SystemExit(f"error: {args.out} was made with {kept.get('options')}, not {options}; give the same options or another --out")
    return {**head, "cases": kept["cases"]}


def part_of(text: str) -> tuple[int, int]:
    """The value of --part: which of how many."""
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError(text)
    return int(part), int(parts)


def main(argv: Sequence[str] | None = None) -> None:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", type=names, default=["tuning"], help="tuning, held_out, captured; several with commas")
    parser.add_argument("--cases", type=names, default=[], help="only cases whose name contains one of these")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help="only every N-th case, from the I-th on")
    parser.add_argument("--methods", type=names, default=list(METHODS), help="default: all")
    parser.add_argument("--redo", type=names, default=[], help="methods to run again though their results are there")
    parser.add_argument("--time_limit", type=float, default=60.0, help="for solvers and searches, seconds (default %(default)s)")
    parser.add_argument("--anneal_seconds", type=float, default=60.0, help="default %(default)s")
    parser.add_argument("--hard_limit", type=float, default=600.0, help="seconds after which a method is killed (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", type=Path, default=ROOT / "runs" / "graphs", help="where captured graphs are kept")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    unknown = [name for name in args.set if name not in (*SETS, "captured")] + [m for m in args.methods if m not in METHODS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; sets are {', '.join(SETS)}, captured; methods are {', '.join(METHODS)}")
    if args.out is not None:
        require_writable(args.out)
    result = begin(args)
    run(args, result)
    show(result["cases"], Console(width=200, highlight=False))


if __name__ == "__main__":
    main()
