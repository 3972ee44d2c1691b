"""Runs a benchmark: flags, variants that take turns, a result file, tables.

A benchmark is a `Benchmark`: its flags, a generator of what it measures, and what a person sees of it in the end. The file has
command, commit, machine and versions at its head, and is written again whenever there is more.
"""

import argparse
import multiprocessing
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import baechi_ext
from baechi_ext.ir.files import require_writable, write_bytes, write_json
from baechi_runtime.host.processor import processor

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "numpy", "numba", "highspy", "ortools", "pymetis")
Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]
"""Titles, and what a cell says of a row: a format string over the row's keys, or a function."""


@dataclass(frozen=True)
class Benchmark:
    """The program `python -m benchmarks.NAME`."""

    name: str
    doc: str
    flags: Mapping[str, Any]
    """By flag a default, which says the type (a tuple: several, with commas), or add_argument's options, or a function that adds some."""
    measure: Callable[[argparse.Namespace], Iterator[Row]]
    """Gives what there is more, each time: lists are added to those of the same name, all else is put in the place of what was. Nothing
    where another process measures."""
    shown: Columns | Callable[[Row], str]
    """The columns of the table of `rows`, or a function that makes the report."""
    note: str = ""
    """Stands below the table: a format string over what was found."""
    markdown: bool = False
    """The report is written, too, beside the result: NAME.md and NAME.json of --out=NAME, which is required."""

    def main(self, argv: Sequence[str] | None = None) -> None:
        """Measures; writes what there is to --out as soon as it is there, and prints the report."""
        out: Row = {"type": Path, "help": "write the result to this file", "required": self.markdown}
        args = parsed(self.doc, {"--out": out, **self.flags}, argv)
        if args.out is not None:
            args.out = args.out.with_suffix(".json") if self.markdown else args.out
            require_writable(args.out)
        args.words = list(sys.argv[1:] if argv is None else argv)
        head = {"command": f"python -m benchmarks.{self.name} {shlex.join(args.words)}".strip(), **machine()}
        found: Row = {}
        for more in self.measure(args):
            grown = {key: found.get(key, []) + value if isinstance(value, list) else value for key, value in more.items()}
            found = {**head, **found, **grown}
            if args.out is not None:
                write_json(args.out, found)
            if args.out is not None and self.markdown:
                write_bytes(args.out.with_suffix(".md"), f"{self.report(found)}\n".encode())
        if found:
            print(self.report(found), flush=True)

    def report(self, found: Row) -> str:
        """The result as a person reads it, in Markdown."""
        if callable(self.shown):
            return self.shown(found)
        note = self.note.format_map(found)
        return table(self.shown, found["rows"]) + (note and f"\n\n{note}")


def machine() -> Row:
    """Date, commit, hardware and versions, for the head of a result file."""
    versions = {"baechi": baechi_ext.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(ROOT),
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "versions": versions,
    }


def commit(checkout: Path) -> str | None:
    """The commit of a checkout, "-dirty" where files differ from it, but for results: a benchmark writes its own; None outside of one."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short=12", "HEAD") + "-dirty" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def parsed(doc: str, flags: Mapping[str, Any], argv: Sequence[str] | None) -> argparse.Namespace:
    """The values of flags (see `Benchmark`)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, given in flags.items():
        if callable(given):
            given(parser)
        else:
            parser.add_argument(flag, **(given if isinstance(given, dict) else _typed(given)))
    return parser.parse_args(argv)


def _typed(default: Any) -> dict[str, Any]:
    help_ = "default %(default)s" if default != () else None
    if isinstance(default, tuple):
        return {"type": several(type(default[0]) if default else str), "default": list(default), "help": help_}
    return {"type": type(default), "default": default, "help": help_}


def several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """The type of a flag with several values, with commas between them."""
    return lambda text: [kind(part) for part in text.split(",") if part]


def some_of(allowed: Iterable[str], default: Iterable[str] | None = None) -> dict[str, Any]:
    """The options of a flag with some of these names; by default all."""
    names = list(allowed)

    def known(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"unknown: {name}; there are {', '.join(names)}")
        return name

    return {"type": several(known), "default": names if default is None else list(default), "help": f"some of {', '.join(names)}"}


def in_turn(variants: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """So many samples of each variant; in each round all take their turn, so that what else the machine does meets them alike."""
    samples: dict[K, list[T]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, sample in variants.items():
            samples[name].append(sample())
        progress(f"round {number + 1} of {rounds}")
    return samples


def timed(call: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """Calls: the value returned, and its seconds by the clock and of this process's CPU time."""
    begin, used = time.perf_counter(), time.process_time()
    value = call()
    return value, {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - used}


def cpu_seconds_of_children() -> float:
    """CPU seconds of all processes that were started here and have ended; beside the wall time they tell what others took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Ended(NamedTuple):
    """A process that has ended: its exit code (None: killed at its limit), what it printed, and its seconds."""

    code: int | None
    out: str
    err: str
    seconds: float
    cpu_seconds: float


def child(command: Sequence[str], limit_seconds: float | None, environment: Mapping[str, str], cwd: Path | None = None) -> Ended:
    """Runs a command; at the limit it and all that it started is killed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin, used = time.perf_counter(), cpu_seconds_of_children()
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=err, start_new_session=True)
        try:
            code: int | None = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds, cpu_seconds = time.perf_counter() - begin, cpu_seconds_of_children() - used
        out.seek(0), err.seek(0)
        printed, errors = (stream.read().decode(errors="replace") for stream in (out, err))
    return Ended(code, printed, errors, seconds, cpu_seconds)


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """The function's value in a process of its own, which has done nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(columns: Columns, rows: Iterable[Row], title: str = "") -> str:
    """A Markdown table with a line for each row."""
    cells = [[cell.format_map(row) if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows]
    return markdown(list(columns), cells, title)


def markdown(titles: Sequence[str], cells: Iterable[Sequence[str]], title: str = "") -> str:
    """A Markdown table of texts, its columns aligned."""
    lines = [list(titles), *map(list, cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    text = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines]
    text[1] = text[1].replace(" ", "-")
    return "\n".join([*(["", title, ""] if title else []), *text])


def load_text(share: float | None) -> str:
    """The share of the cores that others took."""
    return f"load of others while measuring: {'unknown' if share is None else f'{share:.1%}'} of the cores"
