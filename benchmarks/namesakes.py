"""m_etf and m_sct beside their namesakes in the released code of Baechi (SoCC 2020) and of BaechiPyTorch.

    git clone https://github.com/beomyeol/baechi FOLDER
    git clone https://github.com/chiragcshetty/BaechiPyTorch FOLDER2
    python -m benchmarks.namesakes --baechi=FOLDER [--baechi_torch=FOLDER2] [--set=tuning,held_out] [--cases=training-]
        [--most_ops=3000] [--part=1/2] [--out=FILE.json]

Cases are those of benchmarks.quality. A release runs in a process of its own, which is ended after --cpu_limit seconds of CPU time;
release_baechi.py and release_baechi_torch.py say what is fed to it, and what stands in for the libraries it needs. Baechi's runs as
its default placer and as its README's fusing one. The placement is simulated here twice, with the order in which ops were committed
as priorities and without priorities; the better one that keeps the memory limits counts. A plan that breaks them is `over memory`.
The releases know one speed, one link for all, and Baechi's only transfers that queue: cases with others are left out. BaechiPyTorch
knows no colocation groups: it runs in the cases without. m_etf and m_sct run by `baechi place`, with its defaults and as fused.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.check import memory_violations, placement_violations
from baechi_ext.ir.files import read_json, require_writable, write_json
from baechi_ext.simulate import simulate
from benchmarks.captured import CapturedCase
from benchmarks.families import SETS, Case
from benchmarks.machine import machine
from benchmarks.quality import ROOT, Cell, call, chosen_cases, failed, fill, part_of, placed
from benchmarks.quality_table import SAME, Row, geometric_mean, show
from benchmarks.release import RELEASES, require_checkout

FUSED = ("--placer_type=fusion", "--grouper=coplace")
OURS = {"m_etf": ("m_etf",), "m_etf fused": ("m_etf", *FUSED), "m_sct": ("m_sct",), "m_sct fused": ("m_sct", *FUSED)}
"""The method, and further options of `baechi place`."""
THEIRS = {
    "baechi m_etf": ("baechi", "--method=m_etf"),
    "baechi m_etf fused": ("baechi", "--method=m_etf", "--fused"),
    "baechi m_sct": ("baechi", "--method=m_sct"),
    "baechi m_sct fused": ("baechi", "--method=m_sct", "--fused"),
    "torch m_etf": ("baechi_torch", "--method=m_etf"),
    "torch m_sct": ("baechi_torch", "--method=m_sct"),
}
"""The release, and the options of benchmarks.release."""
PAIRS = tuple(
    (ours, theirs)
    for plain, fused in (("m_etf", "m_etf fused"), ("m_sct", "m_sct fused"))
    for ours, theirs in (
        ((plain,), (f"baechi {plain}",)),
        ((fused,), (f"baechi {fused}",)),
        ((plain,), (f"baechi {plain}", f"baechi {fused}")),
        ((plain, fused), (f"baechi {plain}", f"baechi {fused}")),
        ((plain,), (f"torch {plain}",)),
    )
)
"""What is compared with what; the better one where there are two."""


def inexpressible(cluster: Cluster) -> str | None:
    """What the release has no words for, if anything."""
    if len({d.speed for d in cluster.devices}) > 1:
        return "unequal speeds"
    k = len(cluster)
    links = {cluster.link(i, j) for i in range(k) for j in range(k) if i != j}
    if len(links) > 1:
        return "unequal links"
    if any(link.sending_us(1) or link.receiving_us(1) for link in links):
        return "costs of sending and receiving"
    return "parallel transfers" if cluster.parallel_transfers else None


def compared_cases(args: argparse.Namespace, left_out: dict[str, str]) -> Iterator[Case | CapturedCase]:
    """The chosen cases that the releases can express, up to --most_ops; `left_out` gets the others, and why."""
    for case in chosen_cases(args):
        large = len(case.graph) > args.most_ops
        reason = f"{len(case.graph)} ops" if large else inexpressible(case.cluster)
        if reason is None:
            yield case
        else:
            left_out[case.name] = reason


def columns(args: argparse.Namespace, graph: OpGraph) -> list[str]:
    """What runs on this graph: all but releases that are not at hand, or that do not know groups."""
    there = {"baechi": args.baechi is not None, "baechi_torch": args.baechi_torch is not None and not graph.groups}
    return [*OURS, *(name for name, (release, *_) in THEIRS.items() if there[release])]


def run(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fills `result` with what it lacks, and writes it after each method."""
    for case in compared_cases(args, result["left_out"]):
        fill(args, result, case, columns(args, case.graph), partial(cell_of, args, case))
    if args.out is not None:
        write_json(args.out, result)


def cell_of(args: argparse.Namespace, case: Case | CapturedCase, name: str, files: Sequence[Path]) -> Cell:
    return ours(args, name, files, case) if name in OURS else theirs(args, name, files, case)


def ours(args: argparse.Namespace, name: str, files: Sequence[Path], case: Case | CapturedCase) -> Cell:
    """What the plan of `baechi place` is worth."""
    method, *options = OURS[name]
    return placed(args, method, files, case, options)


def theirs(args: argparse.Namespace, name: str, files: Sequence[Path], case: Case | CapturedCase) -> Cell:
    """What the release's plan is worth in the simulator."""
    release, *options = THEIRS[name]
    command = ["benchmarks.release", release, str(getattr(args, release)), str(files[0]), f"--cluster={files[1]}", *options]
    code, out, err, seconds = call([*command, f"--cpu_limit={args.cpu_limit}"], args.hard_limit)
    if code == -signal.SIGXCPU:
        return {"status": "timeout", "error": f"took more than {args.cpu_limit} s of CPU time", "wall_seconds": seconds}
    if code != 0:
        return {**failed(code, out, err), "wall_seconds": seconds}
    value = json.loads(out)
    facts = {"placement_seconds": value["seconds"], "wall_seconds": seconds}
    return {**worth(case.graph, case.cluster, value["placement"], value["priority"]), **facts}


def worth(graph: OpGraph, cluster: Cluster, placement: Sequence[int], priority: Sequence[int]) -> Cell:
    """The better of the placement with and without priorities; one that keeps the limits before one that does not."""
    found = []
    for priorities in (priority, None):
        timeline = simulate(graph, cluster, placement, priorities)
        wrong = placement_violations(graph, cluster, placement) + memory_violations(cluster, timeline.peak_memory_bytes)
        found.append((wrong, timeline.makespan_us, priorities is not None))
    wrong, us, ordered = min(found, key=lambda plan: (bool(plan[0]), plan[1]))
    if wrong:
        return {"status": "over memory", "error": "; ".join(wrong), "without_limits_us": us}
    return {"status": "feasible", "makespan_us": us, "priorities": ordered}


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """An empty result, or the one that is there to go on with."""
    given = {name: getattr(args, name) for name in RELEASES if getattr(args, name) is not None}
    releases = {name: getattr(args, f"{name}_version") or checked_out(folder) for name, folder in given.items()}
    options = {key: getattr(args, key) for key in ("time_limit", "cpu_limit", "hard_limit", "seed")}
    head = {"command": "python -m benchmarks.namesakes " + " ".join(sys.argv[1:]), **machine(), "options": options}
    if args.out is None or not args.out.exists():
        return {**head, "releases": releases, "left_out": {}, "cases": {}}
    kept = read_json(args.out, "result")
    was = {"options": kept.get("options"), **kept.get("releases", {})}
    now = {"options": options, **releases}
    if any(was[key] != now[key] for key in was.keys() & now.keys()):
        raise SystemExit(f"error: {args.out} was made with {was}, not {now}; give the same options or another --out")
    return {**head, "releases": {**kept["releases"], **releases}, "left_out": {}, "cases": kept["cases"]}


def checked_out(folder: Path) -> str:
    """The commit of the checkout, or that it is unknown."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def pair_table(cases: Mapping[str, Row]) -> Table:
    """How often, and by how much, m_etf and m_sct are better than their namesakes."""
    columns = ("ours", "theirs", "cases", "ours solved", "theirs solved", "both", "ours / theirs", "better", "equal", "worse", "worst")
    table = Table(*columns, "or over memory", "median CPU s, ours", "theirs", box=box.MARKDOWN)
    for sides in PAIRS:
        rows = {case: row for case, row in cases.items() if {name for side in sides for name in side} <= set(row["cells"])}
        if not rows:
            continue
        ratios = ratios_of(rows, *sides)
        anyhow = ratios_of(rows, *sides, over_memory=True)
        worst = max(ratios, key=lambda case: ratios[case], default=None)
        solved = (sum(best(row, side) is not None for row in rows.values()) for side in sides)
        better, worse = sum(r < 1 / SAME for r in ratios.values()), sum(r > SAME for r in ratios.values())
        table.add_row(
            *(" or ".join(side) for side in sides),
            *map(str, (len(rows), *solved, len(ratios))),
            f"{geometric_mean(ratios.values()):.3f}",
            *map(str, (better, len(ratios) - better - worse, worse)),
            "-" if worst is None else f"{ratios[worst]:.3f} ({worst})",
            f"{geometric_mean(anyhow.values()):.3f} ({len(anyhow)})",
            *(f"{median_cpu_seconds(rows, side):.3g}" for side in sides),
        )
    return table


def ratios_of(rows: Mapping[str, Row], ours: Sequence[str], theirs: Sequence[str], over_memory: bool = False) -> dict[str, float]:
    """Our best step over their best one, by case that both solved; with `over_memory`, where theirs breaks the limits, too."""
    steps = {case: (best(row, ours), best(row, theirs, over_memory)) for case, row in rows.items()}
    return {case: a / b for case, (a, b) in steps.items() if a is not None and b is not None}


def best(row: Row, names: Sequence[str], over_memory: bool = False) -> float | None:
    """The shortest step of these methods; with `over_memory`, of plans that break the limits, too."""
    keys = ("makespan_us", "without_limits_us") if over_memory else ("makespan_us",)
    return min((row["cells"][name][key] for name in names for key in keys if key in row["cells"][name]), default=None)


def median_cpu_seconds(rows: Mapping[str, Row], names: Sequence[str]) -> float:
    """CPU time of all these methods' runs that gave a placement, from the start of Python on; NaN of none."""
    cells = (row["cells"][name] for row in rows.values() for name in names)
    return statistics.median([cell["cpu_seconds"] for cell in cells if "placement_seconds" in cell] or [float("nan")])


def main(argv: Sequence[str] | None = None) -> None:
    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, release in RELEASES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"a checkout of {release.REPOSITORY}")
        parser.add_argument(f"--{name}_version", metavar="TEXT", help="what the result says of it (default: its commit)")
    parser.add_argument("--set", type=names, default=["tuning", "held_out"], help="tuning, held_out, captured (default: the first two)")
    parser.add_argument("--cases", type=names, default=[], help="only cases whose name contains one of these")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help="only every N-th case, from the I-th on")
    parser.add_argument("--most_ops", type=int, default=3000, help="no larger graphs (default %(default)s)")
    parser.add_argument("--redo", type=names, default=[], help="columns to run again though their results are there")
    parser.add_argument("--time_limit", type=float, default=60.0, help="for m_sct's linear programs, seconds (default %(default)s)")
    parser.add_argument("--cpu_limit", type=int, default=120, help="CPU seconds of a process of the release (default %(default)s)")
    parser.add_argument("--hard_limit", type=float, default=600.0, help="seconds after which any process is killed (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", type=Path, default=ROOT / "runs" / "graphs", help="where captured graphs are kept")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    unknown = [name for name in args.set if name not in (*SETS, "captured")] + [n for n in args.redo if n not in (*OURS, *THEIRS)]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; sets are {', '.join(SETS)}, captured; columns are {', '.join((*OURS, *THEIRS))}")
    if args.baechi is None and args.baechi_torch is None:
        parser.error("name a checkout: --baechi=FOLDER, --baechi_torch=FOLDER, or both")
    for name in RELEASES:
        if getattr(args, name) is not None:
            require_checkout(name, getattr(args, name))
    if args.out is not None:
        require_writable(args.out)
    result = begin(args)
    run(args, result)
    console = Console(width=260, highlight=False)
    for case, reason in result["left_out"].items():
        console.print(f"left out: {case}, {reason}")
    show(result["cases"], console)
    console.print("\nOurs over theirs: geometric means over the cases that both solved\n")
    console.print(pair_table(result["cases"]))


if __name__ == "__main__":
    main()
