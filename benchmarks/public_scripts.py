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
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from baechi_ext.errors import BaechiError
from baechi_ext.ir.files import read_json, write_json
from baechi_runtime.measure.samples import busy_seconds
from benchmarks.machine import machine
from benchmarks.public_case import STUBS, Case, load_cases, missing, prepare
from benchmarks.public_digits import compare

ROOT = Path(__file__).parent.parent
PLAIN = "{python} {script} {arguments}"
PLACED = "{baechi} train --num_devices={devices} {script} -- {arguments}"
MOST_LINES = 30
"""Lines that are kept of what the command says."""
MOST_LETTERS = 120
"""Letters of the last kept line that are in the table."""


@dataclass(frozen=True)
class Ran:
    """One run: its exit code, None where it took too long; seconds; what it printed; what the command said on stderr; its errors' end."""

    code: int | None
    seconds: float
    cpu_seconds: float
    load_of_others: float | None
    printed: str
    said: tuple[str, ...]
    errors: str

    def to_json(self) -> dict[str, Any]:
        """Everything but what was printed."""
        seconds = {"seconds": round(self.seconds, 3), "cpu_seconds": round(self.cpu_seconds, 3), "load_of_others": self.load_of_others}
        return {"exit_code": self.code, **seconds, "said": list(self.said)}


class Runner:
    """Runs a case's commands in `work`."""

    def __init__(self, args: argparse.Namespace, case: Case, work: Path, cache: Path) -> None:
        self.args, self.case, self.work, self.cache = args, case, work, cache
        packages = [] if args.packages is None else [args.packages.resolve()]
        search = [work / path for path in case.paths] + [STUBS, ROOT, ROOT / "runtime", *packages]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, search)),
            "PYTHONHASHSEED": "0",
            "MPLBACKEND": "Agg",
            "HF_HUB_OFFLINE": "1",
            **case.environment,
        }
        if args.threads is not None:
            self.environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(args.threads))

    def run(self, command: str, variables: Mapping[str, str]) -> Ran:
        """One run of the filled-in `command`, in the case's folder made anew."""
        prepare(self.case, self.args.sources, self.work, self.environment)
        cache = self.cache / ("placed" if command == self.args.command else "plain")
        caches = {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "torchinductor")}
        environment = {**self.environment, **caches, **variables}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            begin = _clocks()
            process = subprocess.Popen(
                self.fill(command), cwd=self.case.where(self.work), env=environment, stdout=out, stderr=err, start_new_session=True
            )
            code = _wait(process, self.args.timeout)
            wall, cpu, load = _since(begin)
            out.seek(0), err.seek(0)
            printed, errors = (stream.read().decode(errors="replace") for stream in (out, err))
        if self.args.keep is not None:
            self._keep(printed, errors)
        said = tuple(line for line in errors.splitlines() if line.startswith(("baechi:", "error:")))
        said, errors = tuple(map(self._without_paths, said[:MOST_LINES])), self._without_paths(errors[-2000:])
        printed += self._outputs() + ("".join(_progress(errors)) if self.case.stderr else "")
        return Ran(code, wall, cpu, load, printed, said, errors)

    def fill(self, command: str) -> list[str]:
        """The words of a command."""
        python = Path(sys.executable)
        names = {"python": str(python), "baechi": str(python.with_name("baechi")), "devices": str(self.args.devices)}
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

    def _outputs(self) -> str:
        found = sorted(path for pattern in self.case.outputs for path in self.case.where(self.work).glob(pattern))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found)

    def _keep(self, printed: str, errors: str) -> None:
        self.args.keep.mkdir(parents=True, exist_ok=True)
        number = len(list(self.args.keep.glob(f"{self.case.name}.*.out")))
        for name, text in (("out", printed), ("err", errors)):
            (self.args.keep / f"{self.case.name}.{number}.{name}").write_text(text, encoding="utf-8")


def _progress(errors: str) -> Iterator[str]:
    """Lines of progress bars: what else stands on stderr is not the script's alone."""
    yield from (f"{line}\n" for line in re.split(r"[\r\n]+", errors) if "it/s" in line or "s/it" in line)


def _clocks() -> tuple[float, float, float]:
    used = os.times()
    return busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), os.sched_getaffinity(0)), sum(used[:4]), time.perf_counter()


def _since(begin: tuple[float, float, float]) -> tuple[float, float, float]:
    """Seconds on the clock, of the cores that the process used, and the share of the cores that others took."""
    busy, own, wall = (b - a for a, b in zip(begin, _clocks(), strict=True))
    return wall, own, round(max(0.0, busy - own) / (wall * len(os.sched_getaffinity(0))), 3)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None where it was not there in time, and the process and all that it started are ended."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def row_of(case: Case, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything found out about one case."""
    row: dict[str, Any] = {"name": case.name, "kind": case.kind, "repository": case.repository, "commit": case.commit}
    row |= {"script": case.script or case.entry, "arguments": list(case.arguments), "environment": dict(case.environment)}
    row |= {"numbers": [dict(change) for change in case.numbers], "data": [dict(data) for data in case.data]}
    if (reason := missing(case, args.sources, args.packages)) is not None:
        return {**row, "not_run": reason}
    cache = work / "cache" / case.name
    rmtree(cache, ignore_errors=True)
    runner = Runner(args, case, work / case.name, cache)
    runs: dict[str, list[Ran]] = {"plain": [], "placed": []}
    try:
        for _ in range(args.runs):
            runs["plain"].append(runner.run(args.plain, {}))
            if args.command:
                runs["placed"].append(runner.run(args.command, args.env))
    except BaechiError as e:
        return {**row, "not_run": str(e)}
    return {**row, **judge(runs["plain"], runs["placed"])}


def judge(plain: Sequence[Ran], placed: Sequence[Ran]) -> dict[str, Any]:
    """Judges the runs: exit codes, numbers, and ratios of each placed run to the plain run before it."""
    texts = [run.printed for run in plain]
    twice = compare(texts[:1], texts[-1])
    found: dict[str, Any] = {"plain": [run.to_json() for run in plain], "plain_numbers": twice.compared, "plain_unequal": twice.different}
    if twice.different:
        found["plain_first"] = twice.first
    if plain[0].code != 0:
        found["plain_errors"] = plain[0].errors
    rows = []
    for one, other in zip(plain, placed, strict=False):
        beside = compare(texts, other.printed)
        row = {**other.to_json(), "ratio": round(other.seconds / one.seconds, 4)}
        row |= {"cpu_ratio": round(other.cpu_seconds / max(one.cpu_seconds, 0.01), 4)}
        row |= {"compared": beside.compared, "different": beside.different}
        if beside.different:
            row |= {"largest_difference": min(beside.largest, sys.float_info.max), "first_difference": beside.first}
        rows.append(row | ({"errors": other.errors} if other.code != one.code else {}))
    found["placed"] = rows
    found["same"] = all(row["different"] == 0 and row["exit_code"] == plain[0].code for row in rows)
    return found


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Prints a Markdown table."""
    table = Table("script", "kind", "plain", "first", "later", "numbers", "exit", "others", "said last", box=box.MARKDOWN)
    for row in rows:
        if "not_run" in row:
            table.add_row(row["name"], row["kind"], *["-"] * 6, row["not_run"])
            continue
        plain, placed = row["plain"], row["placed"]
        ratios = [f"{run['ratio']:.3f}" for run in placed]
        loads = [run["load_of_others"] for run in [*plain, *placed]]
        said = next((run["said"][-1] for run in placed if run["said"]), "")[:MOST_LETTERS]
        table.add_row(
            *(row["name"], row["kind"], f"{sum(run['seconds'] for run in plain) / len(plain):.1f} s"),
            *(ratios[0] if ratios else "-", ratios[-1] if len(ratios) > 1 else "-", _numbers(row)),
            *(" ".join(sorted({str(run["exit_code"]) for run in [*plain, *placed]})), f"{max(loads):.0%}", said),
        )
    console.print(table)


def _numbers(row: Mapping[str, Any]) -> str:
    if not row["placed"]:
        return f"{row['plain_unequal'] or 'none'} of {row['plain_numbers']} differ plainly"
    worst = max(row["placed"], key=lambda run: run["different"])
    if not worst["different"]:
        return f"{worst['compared']} equal"
    return f"{worst['different']} of {worst['compared']} differ, by {worst['largest_difference']:.0e}"


def measure(args: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row per case; `keep` gets all so far after each."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) if args.work is None else args.work.resolve()
        for case in load_cases(args.only):
            rows.append(row_of(case, args, work))
            show(rows[-1:], Console(width=240, highlight=False))
            keep(rows)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="folder of checkouts, OWNER+NAME each")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="names of scripts")
    parser.add_argument("--runs", type=int, default=2, help="plain and placed runs, each")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--command", default=PLACED, help='the placed command; "" for plain runs only (default: %(default)s)')
    parser.add_argument("--plain", default=PLAIN, help="the plain command (default: %(default)s)")
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="a variable for placed runs")
    parser.add_argument("--packages", type=Path, help="a folder of further packages: pip install --target")
    parser.add_argument("--work", type=Path, help="the folder that scripts run in, and caches are kept in (a temporary one)")
    parser.add_argument("--keep", type=Path, help="a folder for what each run printed")
    parser.add_argument("--threads", type=int, help="torch's threads in every run; by default torch decides")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a run has")
    parser.add_argument("--out", type=Path, help="a JSON file; rows of scripts that do not run now are kept in it")
    args = parser.parse_args(argv)
    args.env = dict(pair.split("=", 1) for pair in args.env)
    args.sources = args.sources.resolve()
    before = [] if args.out is None or not args.out.exists() else read_json(args.out, "result")["rows"]
    words = [re.sub(r"^(--(?:sources|packages|work|keep|out))=.*/", r"\1=", word) for word in (sys.argv[1:] if argv is None else argv)]
    command = "python -m benchmarks.public_scripts " + shlex.join(words)

    def keep(rows: list[dict[str, Any]]) -> None:
        if args.out is not None:
            now = {row["name"] for row in rows}
            write_json(args.out, {"command": command, **machine(), "rows": [row for row in before if row["name"] not in now] + rows})

    show(measure(args, keep), Console(width=240, highlight=False))


if __name__ == "__main__":
    main()
