"""The `baechi` command: its sub-commands, and what errors of theirs mean for whoever called it.

Exit codes: 0 done, 1 a library error, 2 a usage error, 129 ended by SIGHUP, 130 interrupted, 141 nobody reads the output, 143 ended by
SIGTERM. Every error is one `error:` line on stderr. Results go to stdout, progress to stderr.
"""

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baechi_ext.errors import BaechiError, OptionError
from baechi_ext.ir.made_by import FRAMEWORKS, MadeBy, versions
from baechi_runtime.cli.commands import looking, planning, steps
from baechi_runtime.cli.commands.output import Output, fail
from baechi_runtime.cli.doctor.packages import CORE_MODULES, PACKAGES
from baechi_runtime.cli.flags import baechi as baechi_flags
from baechi_runtime.cli.flags import compare as compare_flags
from baechi_runtime.cli.flags import config as config_flags
from baechi_runtime.cli.flags import looking as looking_flags
from baechi_runtime.cli.flags import pase as pase_flags
from baechi_runtime.cli.flags import placeto as placeto_flags
from baechi_runtime.cli.flags import planning as planning_flags
from baechi_runtime.cli.flags import probe as probe_flags
from baechi_runtime.cli.flags import train as train_flags
from baechi_runtime.cli.flags.kinds import add_output_flags
from baechi_runtime.cli.flags.parser import SHELLS, Lines, Parser, PrintCompletion, after_command, anchor, parted, with_underscores
from baechi_runtime.host.interrupts import exit_code, unmasked
from baechi_runtime.report.progress import restore_terminal, set_loudness

_OF_A_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP)
"""Errors of a path that asking whether something is there (`Path.is_file`) does not take for no."""

_WRITES_TO_STDOUT = ("baechi_runtime.cli.", "baechi_runtime.report.", "rich.", "argparse")


@dataclass(frozen=True)
class Command:
    """A sub-command: `run` takes the request that its flags become and returns the exit code; library errors may escape both."""

    name: str
    help: str
    run: Callable[[Any, Output], int]
    add_flags: Callable[[argparse.ArgumentParser], None]
    request: Callable[[argparse.Namespace], Any]
    first: tuple[str, ...] = ()
    """The flags that --help shows; all where none is named."""


_DOCTOR = "say what of this installation works, what is missing, and what that costs"
_WRITTEN = ("--out", "--json")
_PLAN = ("--num_devices", "--cluster", "--device_memory", "--comm_cost_coeffs", "--placement_method", "--pin", "--time_limit", *_WRITTEN)
_STEP = ("--model_name", "--batch_size", "--num_devices", "--num_gpus", "--workers", "--device_memory", "--microbatches", "--num_steps")
_TRAINED = (*_STEP, "--placement_method", "--train_steps", *_WRITTEN)
_COMPARED = (*_STEP, "--placement_methods", *_WRITTEN)
COMMANDS = (
    Command("place", "decide which device runs which op of a graph, and write the plan", planning.place, *planning_flags.PLACE, _PLAN),
    Command("train", "place a real training step, run it on several devices, and time it", steps.train, *train_flags.TRAIN, _TRAINED),
    Command(
        "compare", "measure steps placed by several methods, and say which is worth it", steps.compare, *compare_flags.COMPARE, _COMPARED
    ),
    Command("probe-links", "measure what sending costs between every pair of devices", steps.probe, *probe_flags.PROBE),
    Command("datasets", "make families of graphs for learned placers, or list them", looking.datasets, *looking_flags.DATASETS),
    Command("placeto", "train the learned placer, or compare it with the others", looking.placeto, *placeto_flags.PLACETO),
    Command("pase", "find the cheapest way to split every layer of a network over devices", steps.pase, *pase_flags.PASE),
    Command("trace", "write a run's timelines, predicted and measured, for Perfetto and HTA", looking.trace, *looking_flags.TRACE),
    Command("report", "write one HTML page of a run: timelines, memory, graph and why", looking.report, *looking_flags.REPORT),
    Command("plot", "write a run's timelines, memory and busy shares as PNG and PDF", looking.plot, *looking_flags.PLOT),
    Command("simulate", "say what a plan is worth: step, busy time, memory", planning.simulate, *planning_flags.SIMULATE),
    Command("explain", "say what bounds a plan's step, or why an op is where it is", planning.explain, *planning_flags.EXPLAIN),
    Command("diff", "say what two plans of one graph differ in", planning.diff, *planning_flags.DIFF),
    Command("export", "write a plan in the format of another program", planning.export, *planning_flags.EXPORT),
    Command("export-device-map", "the same as export --format=device_map", planning.export, *planning_flags.EXPORT_DEVICE_MAP),
    Command("doctor", _DOCTOR, looking.doctor, add_output_flags, lambda args: None),
)


class _Versions(argparse._VersionAction):  # noqa: SLF001 - the one behind action="version"
    """Looks for the frameworks' versions only when they are asked for."""

    def __call__(self, *arguments: Any, **options: Any) -> None:
        installed = {package.name: package.version() for package in PACKAGES if package.name in FRAMEWORKS}
        self.version = MadeBy(versions=versions() | {name: found for name, found in installed.items() if found is not None}).programs
        super().__call__(*arguments, **options)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(prog="baechi", description="Automatic device placement for training deep networks.", allow_abbrev=False)
    parser.add_argument("--version", action=_Versions, help="print the versions of baechi, Python and the frameworks, and end")
    text = "print what completes commands and flags in that shell, for its start-up file, and end"
    parser.add_argument("--completion", action=PrintCompletion, choices=SHELLS, help=text)
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False, formatter_class=Lines)
        command.add_flags(sub)
        if command.first:
            sub.show_first(command.first)
        sub.set_defaults(does=command, parser=sub, json=False, given={}, command=("baechi",))
    return parser


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """A command line, with what a file of --config adds to it. Raises OptionError, and FileError for that file."""
    line = with_underscores(argv)
    words, passed = parted(line)
    parser, own = make_parser(), baechi_flags.with_plain_switches(words)
    args = parser.parse_args(own)
    args.given = config_flags.given(args.parser, own)
    if getattr(args, "config", None) is not None:
        more, others = config_flags.words_of(args)
        own = baechi_flags.with_plain_switches([*words[: (begin := after_command(words))], *more, *words[begin:]])
        path, passed = args.config, others if passed is None else passed
        try:
            args = parser.parse_args(own)
        except OptionError as e:
            raise OptionError(f"{path}: {e}") from e
        args.given = config_flags.given(args.parser, own)
    args.script_args, args.command = passed, ("baechi", *baechi_flags.with_plain_switches(line))
    if getattr(args, "script", None) is not None:
        anchor(args)
    return args


def _run(args: argparse.Namespace) -> int:
    output = Output(args.json, args.command, config_flags.settings(args), getattr(args, "logs", None))
    code: int = args.does.run(args.does.request(args), output)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: this process's own) and returns its exit code."""
    verbose = False
    try:
        args = parsed(sys.argv[1:] if argv is None else argv)
        verbose = "verbose" in args
        set_loudness(quiet="quiet" in args, verbose=verbose)
        code = unmasked(_run, args)
        sys.stdout.flush()
        return code and exit_code(code)
    except OptionError as e:
        return fail(str(e), exit_code(2))
    except BaechiError as e:  # after SIGTERM it may be of a process that was told to end first
        if verbose:
            traceback.print_exc()
        return fail(str(e), exit_code(1))
    except ModuleNotFoundError as e:
        if e.name not in CORE_MODULES:
            raise
        return fail(f"{e.name} is not installed; pip install --force-reinstall baechi-ext, or see what baechi doctor says", 1)
    except BrokenPipeError:
        _drop_stdout()
        return 141
    except OSError as e:
        if e.errno in _OF_A_PATH and e.filename is not None:
            return fail(f"cannot read {os.fspath(e.filename)!r}: {e.strerror}; check the path", 1)
        if e.errno in (errno.EMFILE, errno.ENFILE):
            return fail(f"{e.strerror}: this process may open no more; raise the limit (ulimit -n), or use fewer devices", exit_code(1))
        if e.errno == errno.ENOENT and not _has_folder():
            return fail("the folder that this command was started in has been removed; start it in another one", exit_code(1))
        if e.errno == errno.ENOENT and e.filename is None and str(e.strerror).startswith("No usable temporary directory"):
            return fail(f"{e.strerror}; make room in one of them, or have TMPDIR name a folder that can be written", exit_code(1))
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or e.filename is not None:
            raise
        if not _is_of_stdout(e):
            return fail(f"cannot write: {e.strerror}; make room for results, and where temporary files are ($TMPDIR)", exit_code(1))
        _drop_stdout()
        return fail(f"cannot write the result to stdout: {e.strerror or e}; choose another place for it", 1)
    except KeyboardInterrupt as e:
        restore_terminal()
        return fail(str(e) or "interrupted", exit_code())
    finally:
        restore_terminal()


def _has_folder() -> bool:
    """True unless the folder that this process is in has been removed."""
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _is_of_stdout(error: OSError) -> bool:
    """True if what raised it writes there; the error says of no file which one it is of."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return str(last.f_globals.get("__name__")).startswith(_WRITES_TO_STDOUT)


def _drop_stdout() -> None:
    """Sends stdout to nowhere: what is left in the buffer would raise the same error again when Python ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
