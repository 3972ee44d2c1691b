"""Public training scripts, as they are but for data and length: `python SCRIPT` beside `baechi train SCRIPT`.

    python -m benchmarks.public_scripts --sources=FOLDER --out=benchmarks/results/public_scripts.json [--only=NAME,...] [--runs=2]

FOLDER has a checkout OWNER+NAME of each repository in `benchmarks/public_scripts.json`, with the commit that stands there; for one that
is not there, the command that gets it is printed. A script runs in a folder of its own, with the commit's files; what stands in for data,
and for packages that only give data, is in `benchmarks/public_data.py` and `benchmarks/public_stubs`.

Plain and placed runs take turns, all from equal folders: the first run of either kind finds empty caches, a later one the caches of those
before it. Compared are the exit codes and every number printed, but durations and what two plain runs print differently; wall time is that
of the whole process. Beside it stands what others took of the cores meanwhile.
"""

import argparse
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from baechi_ext.errors import BaechiError
from baechi_ext.ir.files import read_json
from baechi_runtime.measure.samples import LoadOfOthers
from benchmarks.public_case import STUBS, Case, load_cases, missing, prepare
from benchmarks.runner import ROOT, Benchmark, Row, child, cpu_seconds_of_children, progress, table

PLAIN = "{python} {script} {arguments}"
PLACED = "{baechi} train --num_devices={devices} {script} -- {arguments}"
DEVICES = 2
MOST_LINES = 30
"""Lines that are kept of what the command says."""
MOST_LETTERS = 120
"""Letters of the last kept line that are in the table."""

# Numbers that are printed

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_UNIT = r"(?:ms|us|sec(?:ond)?s?|mins?|hours?|s|it/s|s/it|ms/it|batch(?:es)?/s|img/s|samples?/s|tokens?/s|h)\b"
_DURATION = re.compile(
    rf"\d+:\d\d(?::\d\d)?(?:[.,]\d+)?"  # a clock's
    rf"|\d{{4}}-\d\d-\d\d(?:\D\d\d-\d\d-\d\d)?"  # a day
    rf"|[A-Z][a-z][a-z]\d\d_\d\d-\d\d-\d\d"  # a day in a folder's name
    rf"|{_NUMBER}\s*(?:{_UNIT}|\?it/s)"
    rf"|(?:time|elapsed|took|eta|ms/batch|s/batch|dt|speed|mfu)(?:\s*per\s*\w+)?\W{{0,3}}\s*{_NUMBER}",
    re.IGNORECASE,
)
_NUMBERS = re.compile(rf"(?<![\w.]){_NUMBER}|\b(?:nan|inf)\b", re.IGNORECASE)


def numbers(text: str) -> list[str]:
    """All numbers of a text in their order, without clocks' times, days, and what has a unit of time, or a word for time before it."""
    return _NUMBERS.findall(_DURATION.sub(" ", text))


@dataclass(frozen=True)
class Comparison:
    """`different` of `compared` numbers, the largest relative difference among them, and the first of them in words."""

    different: int
    compared: int
    largest: float = 0.0
    first: str | None = None


def compare(texts: Sequence[str], other: str) -> Comparison:
    """The numbers of `other` beside those of `texts`, what runs printed that should be equal.

    A number in which these differ from each other is not compared. Where there are not equally many, all are different.
    """
    rows = [numbers(text) for text in texts]
    found, first = numbers(other), rows[0]
    if len({len(row) for row in [found, *rows]}) > 1:
        return Comparison(len(first), len(first), math.inf, f"{len(found)} numbers, not {len(first)}")
    alike = [i for i, value in enumerate(first) if all(row[i] == value for row in rows[1:])]
    wrong = [i for i in alike if found[i] != first[i]]
    if not wrong:
        return Comparison(0, len(alike))
    words = f"number {wrong[0]}: {found[wrong[0]]}, not {first[wrong[0]]}"
    return Comparison(len(wrong), len(alike), max(_relative(float(found[i]), float(first[i])) for i in wrong), words)


def _relative(x: float, y: float) -> float:
    largest = max(abs(x), abs(y))
    return abs(x - y) / largest if math.isfinite(largest) and largest else (0.0 if x == y else math.inf)


# Runs


@dataclass(frozen=True)
class Ran:
    """One run: its row of the result, what it printed, and the end of its errors."""

    row: Row
    printed: str
    errors: str


@dataclass(frozen=True)
class Runner:
    """Runs a case's commands in `work`, with caches in `cache`."""

    args: argparse.Namespace
    case: Case
    work: Path
    cache: Path

    def environment(self, kind: str) -> dict[str, str]:
        """The variables of a plain or a placed run."""
        packages = [] if self.args.packages is None else [self.args.packages.resolve()]
        search = [self.work / path for path in self.case.paths] + [STUBS, ROOT, ROOT / "runtime", *packages]
        threads = () if self.args.threads is None else ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, search)),
            "PYTHONHASHSEED": "0",
            "MPLBACKEND": "Agg",
            "HF_HUB_OFFLINE": "1",
            **self.case.environment,
            **dict.fromkeys(threads, str(self.args.threads)),
            "XDG_CACHE_HOME": str(self.cache / kind),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / kind / "torchinductor"),
        }

    def run(self, kind: str, command: str) -> Ran:
        """One plain or placed run of the filled-in `command`, in the case's folder made anew."""
        environment = self.environment(kind)
        prepare(self.case, self.args.sources, self.work, environment)
        load = LoadOfOthers(lambda: time.process_time() + cpu_seconds_of_children(), os.sched_getaffinity(0))
        code, printed, errors, wall, cpu = child(self.fill(command), self.args.timeout, environment, self.case.where(self.work))
        others = load.share()
        if self.args.keep is not None:
            self._keep(printed, errors)
        errors = self._without_paths(errors)
        said = [line for line in errors.splitlines() if line.startswith(("baechi:", "error:"))][:MOST_LINES]
        printed += self._outputs()
        if self.case.stderr:  # lines of progress bars: what else stands there is not the script's alone
            printed += "".join(f"{line}\n" for line in re.split(r"[\r\n]+", errors[-2000:]) if "it/s" in line or "s/it" in line)
        row = {"exit_code": code, "seconds": round(wall, 3), "cpu_seconds": round(cpu, 3), "load_of_others": others, "said": said}
        return Ran(row, printed, errors[-2000:])

    def fill(self, command: str) -> list[str]:
        """The words of a command."""
        python = Path(sys.executable)
        names = {"python": str(python), "baechi": str(python.with_name("baechi")), "devices": str(DEVICES)}
        names |= {"script": str(self.case.program(self.work)), "cache": str(self.cache), "root": str(ROOT)}
        words = []
        for word in shlex.split(command):
            words += self.case.arguments if word == "{arguments}" else [word.format(**names)]
        return words

    def _without_paths(self, text: str) -> str:
        """The text with names in the place of this machine's folders."""
        names = {self.work: "WORK", self.cache: "CACHE", ROOT: "ROOT", self.args.packages: "PACKAGES", Path(sys.prefix): "VENV"}
        for path, name in {**names, Path(sys.base_prefix): "PYTHON"}.items():
            for written in (path, path and path.resolve()):
                text = text.replace(str(written), name) if written else text
        return text

    def _keep(self, printed: str, errors: str) -> None:
        self.args.keep.mkdir(parents=True, exist_ok=True)
        number = len(list(self.args.keep.glob(f"{self.case.name}.*.out")))
        for name, text in (("out", printed), ("err", errors)):
            (self.args.keep / f"{self.case.name}.{number}.{name}").write_text(text, encoding="utf-8")

    def _outputs(self) -> str:
        found = sorted(path for pattern in self.case.outputs for path in self.case.where(self.work).glob(pattern))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found)


def row_of(case: Case, args: argparse.Namespace, work: Path) -> Row:
    """Everything found out about one case."""
    row: Row = {"name": case.name, "kind": case.kind, "repository": case.repository, "commit": case.commit}
    row |= {"script": case.script or case.entry, "arguments": list(case.arguments), "environment": dict(case.environment)}
    row |= {"numbers": [dict(change) for change in case.numbers], "data": [dict(data) for data in case.data]}
    if (reason := missing(case, args.sources, args.packages)) is not None:
        return {**row, "not_run": reason}
    runner = Runner(args, case, work / case.name, work / "cache" / case.name)
    rmtree(runner.cache, ignore_errors=True)
    plain, placed = [], []
    try:
        for _ in range(args.runs):
            plain.append(runner.run("plain", PLAIN))
            if args.command:
                placed.append(runner.run("placed", args.command))
    except BaechiError as e:
        return {**row, "not_run": str(e)}
    return {**row, **judge(plain, placed)}


def judge(plain: Sequence[Ran], placed: Sequence[Ran]) -> Row:
    """Judges the runs: exit codes, numbers, and ratios of each placed run to the plain run before it."""
    texts = [run.printed for run in plain]
    twice, code = compare(texts[:1], texts[-1]), plain[0].row["exit_code"]
    found: Row = {"plain": [run.row for run in plain], "plain_numbers": twice.compared, "plain_unequal": twice.different}
    if twice.different:
        found["plain_first"] = twice.first
    if code != 0:
        found["plain_errors"] = plain[0].errors
    rows = []
    for one, other in zip(plain, placed, strict=False):
        beside = compare(texts, other.printed)
        row = {**other.row, "ratio": round(other.row["seconds"] / one.row["seconds"], 4)}
        row |= {"cpu_ratio": round(other.row["cpu_seconds"] / max(one.row["cpu_seconds"], 0.01), 4)}
        row |= {"compared": beside.compared, "different": beside.different}
        if beside.different:
            row |= {"largest_difference": min(beside.largest, sys.float_info.max), "first_difference": beside.first}
        rows.append(row | ({"errors": other.errors} if other.row["exit_code"] != code else {}))
    return {**found, "placed": rows, "same": all(row["different"] == 0 and row["exit_code"] == code for row in rows)}


def _numbers(row: Row) -> str:
    if not row["placed"]:
        return f"{row['plain_unequal'] or 'none'} of {row['plain_numbers']} differ plainly"
    worst = max(row["placed"], key=lambda run: run["different"])
    if not worst["different"]:
        return f"{worst['compared']} equal"
    return f"{worst['different']} of {worst['compared']} differ, by {worst['largest_difference']:.0e}"


COLUMNS = {
    "plain": lambda row: f"{statistics.mean(run['seconds'] for run in row['plain']):.1f} s",
    "first": lambda row: f"{row['placed'][0]['ratio']:.3f}" if row["placed"] else "-",
    "later": lambda row: f"{row['placed'][-1]['ratio']:.3f}" if len(row["placed"]) > 1 else "-",
    "numbers": _numbers,
    "exit": lambda row: " ".join(sorted({str(run["exit_code"]) for run in [*row["plain"], *row["placed"]]})),
    "others": lambda row: f"{max(run['load_of_others'] or 0.0 for run in [*row['plain'], *row['placed']]):.0%}",
    "said last": lambda row: next((run["said"][-1] for run in row["placed"] if run["said"]), "")[:MOST_LETTERS],
}


def report(found: Row) -> str:
    """A row per script that ran, and why others did not."""
    ran = [row for row in found["rows"] if "not_run" not in row]
    others = [f"{row['name']}: {row['not_run']}" for row in found["rows"] if "not_run" in row]
    return "\n".join((table({"script": "{name}", "kind": "{kind}", **COLUMNS}, ran), *others))


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per case, behind those of cases that do not run now."""
    before = [] if args.out is None or not args.out.exists() else read_json(args.out, "result")["rows"]
    cases = load_cases(args.only)
    now = {case.name for case in cases}
    yield {"rows": [row for row in before if row["name"] not in now]}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) if args.work is None else args.work.resolve()
        for case in cases:
            row = row_of(case, args, work)
            progress(report({"rows": [row]}).splitlines()[-1])
            yield {"rows": [row]}


FLAGS = {
    "--sources": {"type": lambda text: Path(text).resolve(), "required": True, "help": "folder of checkouts, OWNER+NAME each"},
    "--only": (),
    "--runs": {"type": int, "default": 2, "help": "plain and placed runs, each"},
    "--command": {"default": PLACED, "help": 'the placed command; "" for plain runs only (default: %(default)s)'},
    "--packages": {"type": Path, "help": "a folder of further packages: pip install --target"},
    "--work": {"type": Path, "help": "the folder that scripts run in, and caches are kept in (a temporary one)"},
    "--keep": {"type": Path, "help": "a folder for what each run printed"},
    "--threads": {"type": int, "help": "torch's threads in every run; by default torch decides"},
    "--timeout": {"type": float, "default": 600.0, "help": "seconds a run has"},
}
main = Benchmark("public_scripts", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
