"""m_etf and m_sct beside those of the released code of Baechi (SoCC 2020) and of BaechiPyTorch.

    git clone https://github.com/beomyeol/baechi FOLDER
    git clone https://github.com/chiragcshetty/BaechiPyTorch FOLDER2
    python -m benchmarks.reference_comparison --baechi=FOLDER [--baechi_torch=FOLDER2] [--set=tuning,held_out] [--cases=training-]
        [--part=1/2] [--out=FILE.json]

Cases are those of benchmarks.quality. A release runs in a process of its own, which is ended after two minutes of CPU time;
benchmarks/release.py says what is fed to it, and what stands in for the libraries it needs. Baechi's runs as
its default placer and as its README's fusing one. The placement is simulated here twice, with the order in which ops were committed
as priorities and without priorities; the better one that keeps the memory limits counts. A plan that breaks them is `over memory`.
The releases know one speed, one link for all, and Baechi's only transfers that queue: cases with others are left out. BaechiPyTorch
knows no colocation groups: it runs in the cases without. m_etf and m_sct run by `baechi place`, with its defaults and as fused.
"""

import argparse
import json
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.python_process import command_of, surroundings
from benchmarks.quality import ALL_SETS, CHOICE, AnyCase, Cell, chosen_cases, failed, fill, kept, placed, simulated
from benchmarks.quality_table import SAME, geometric_mean
from benchmarks.quality_table import report as tables
from benchmarks.release import CPU_SECONDS, RELEASES, require_checkout
from benchmarks.runner import Benchmark, Row, child, commit, markdown, some_of

MOST_OPS = 3000
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
"""Pairs to compare, ours with theirs; where a side has two, the better one counts."""
FLAGS = {
    **{f"--{name}": {"type": Path, "metavar": "FOLDER", "help": f"a checkout of {r.repository}"} for name, r in RELEASES.items()},
    **{f"--{name}_version": {"metavar": "TEXT", "help": "what the result says of it (default: its commit)"} for name in RELEASES},
    "--set": some_of(ALL_SETS, ["tuning", "held_out"]),
    **CHOICE,
}


def inexpressible(cluster: Cluster) -> str | None:
    """The first property of the cluster that the release has no words for; None where there is none."""
    if len({d.speed for d in cluster.devices}) > 1:
        return "unequal speeds"
    k = len(cluster)
    links = {cluster.link(i, j) for i in range(k) for j in range(k) if i != j}
    if len(links) > 1:
        return "unequal links"
    if any(link.sending_us(1) or link.receiving_us(1) for link in links):
        return "costs of sending and receiving"
    return "parallel transfers" if cluster.parallel_transfers else None


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Measures what the file lacks of the cases that the releases can express, up to MOST_OPS; `left_out` says why not others."""
    given = {name: folder for name in RELEASES if (folder := getattr(args, name)) is not None}
    if not given:
        raise SystemExit("error: name a checkout: --baechi=FOLDER, --baechi_torch=FOLDER, or both")
    for name, folder in given.items():
        require_checkout(name, folder)
    options = {"time_limit": args.time_limit, "cpu_limit": CPU_SECONDS, "hard_limit": args.hard_limit}
    releases = {name: getattr(args, f"{name}_version") or commit(folder) or "unknown" for name, folder in given.items()}
    there = kept(args.out, options, releases)
    found = {"options": options, "releases": there["releases"] | releases, "left_out": {}, "cases": there["cases"]}
    for case in chosen_cases(args):
        reason = f"{len(case.graph)} ops" if len(case.graph) > MOST_OPS else inexpressible(case.cluster)
        if reason is not None:
            found["left_out"][case.name] = reason
            continue
        columns = {name: partial(placed, args, method, case, options=options) for name, (method, *options) in OURS.items()}
        able = [release for release in given if release != "baechi_torch" or not case.graph.groups]
        columns |= {name: partial(theirs, args, name, case) for name, (release, *_) in THEIRS.items() if release in able}
        for _ in fill(found["cases"], case, columns):
            yield found
    yield found


def theirs(args: argparse.Namespace, name: str, case: AnyCase, files: Sequence[Path]) -> Cell:
    """The worth of the release's plan in the simulator."""
    release, *options = THEIRS[name]
    words = [release, str(getattr(args, release)), str(files[0]), f"--cluster={files[1]}", *options]
    ended = child(command_of("benchmarks.release", *words), args.hard_limit, surroundings())
    if ended.code == -signal.SIGXCPU:
        return {"status": "timeout", "error": f"took more than {CPU_SECONDS} s of CPU time", "wall_seconds": ended.seconds}
    if ended.code != 0:
        return {**failed(ended), "wall_seconds": ended.seconds}
    value = json.loads(ended.out)
    facts = {"placement_seconds": value["seconds"], "wall_seconds": ended.seconds}
    return {**worth(case.graph, case.cluster, value["placement"], value["priority"]), **facts}


def worth(graph: OpGraph, cluster: Cluster, placement: Sequence[int], priority: Sequence[int]) -> Cell:
    """The better of the placement with and without priorities; one that keeps the limits before one that does not."""
    found = [(*simulated(graph, cluster, placement, priorities), priorities is not None) for priorities in (priority, None)]
    us, wrong, ordered = min(found, key=lambda plan: (bool(plan[1]), plan[0]))
    if wrong:
        return {"status": "over memory", "error": "; ".join(wrong), "without_limits_us": us}
    return {"status": "feasible", "makespan_us": us, "priorities": ordered}


def pairs(cases: Mapping[str, Row]) -> Iterator[dict[str, str]]:
    """The comparisons of m_etf and m_sct with the reference: how often, and by how much they are better."""
    for ours, theirs in PAIRS:
        rows = {case: row for case, row in cases.items() if {*ours, *theirs} <= set(row["cells"])}
        if not rows:
            continue
        ratios, anyhow = ratios_of(rows, ours, theirs), ratios_of(rows, ours, theirs, over_memory=True)
        worst = max(ratios, key=lambda case: ratios[case], default=None)
        better, worse = sum(r < 1 / SAME for r in ratios.values()), sum(r > SAME for r in ratios.values())
        yield {
            "ours": " or ".join(ours),
            "theirs": " or ".join(theirs),
            "cases": f"{len(rows)}",
            "ours solved": f"{sum(best(row, ours) is not None for row in rows.values())}",
            "theirs solved": f"{sum(best(row, theirs) is not None for row in rows.values())}",
            "both": f"{len(ratios)}",
            "ours / theirs": f"{geometric_mean(ratios.values()):.3f}",
            "better": f"{better}",
            "equal": f"{len(ratios) - better - worse}",
            "worse": f"{worse}",
            "worst": "-" if worst is None else f"{ratios[worst]:.3f} ({worst})",
            "or over memory": f"{geometric_mean(anyhow.values()):.3f} ({len(anyhow)})",
            "median CPU s, ours": f"{median_cpu_seconds(rows, ours):.3g}",
            "there": f"{median_cpu_seconds(rows, theirs):.3g}",
        }


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


def report(found: Row) -> str:
    lines = [f"left out: {case}, {reason}" for case, reason in found["left_out"].items()]
    title = "Ours over theirs: geometric means over the cases that both solved"
    rows = list(pairs(found["cases"]))
    compared = [markdown(list(rows[0]), [list(row.values()) for row in rows], title)] if rows else []
    return "\n".join((*lines, tables(found["cases"]), *compared))


main = Benchmark("reference_comparison", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
