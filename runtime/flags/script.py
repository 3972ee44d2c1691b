"""The flags of `baechi train` for a training script of the user's own, and the ScriptRequest they become."""

import argparse
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from baechi_ext.errors import OptionError
from runtime.flags import common as flags
from runtime.flags import tensorflow as tensorflow_flags

if TYPE_CHECKING:
    from runtime.train_request import ScriptRequest

VERIFY_STEPS = 2
_PATHS = ("FILE", "DIR")
"""What stands in --help for the path of a flag."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The script itself, and how its training calls are placed."""
    add_script(parser, "a training script, run unmodified with its model placed, instead of a built-in model")
    group = parser.add_argument_group("script")
    group.add_argument(
        "--verify_steps",
        type=flags.whole,
        default=VERIFY_STEPS,
        metavar="N",
        help="training calls of each shape that are also run unplaced, and compared (default %(default)s)",
    )
    group.add_argument(
        "--fallback", action="store_true", help="where a script's model can't be placed, or differs, go on unplaced instead of stopping"
    )


def add_script(parser: argparse.ArgumentParser, what: str) -> None:
    """The script alone."""
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help=f"{what}; its arguments follow --")


def parted(command_line: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The command line up to a lone --, and what follows it, of `train`, `compare` and `pase`: the script's own arguments.
    None where there is no --."""
    line = list(command_line)
    if line[:1] not in (["train"], ["compare"], ["pase"]) or "--" not in line:
        return line, None
    end = line.index("--")
    return line[:end], line[end + 1 :]


def require_one_start(workers: str) -> None:
    """Raises OptionError where several processes were started, each of which would run all devices."""
    if workers == "thread" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError("several workers were started; give --workers=process, or start the script once, without torchrun")


def require_none_of(args: argparse.Namespace, names: Collection[str]) -> None:
    """Raises OptionError where one of these flags was given, which say what a built-in model is or how long it runs."""
    given = next((name for name in args.given if name in names), None)
    if given is not None:
        raise OptionError(f"--{given} is for built-in models; drop it, or give what {args.script} takes behind --")


def anchor(args: argparse.Namespace) -> None:
    """Makes the paths that flags of a script's run name absolute: they are read and written once the script runs, which may have gone to
    another folder. The script's own path stays: it is read before, and the script may look at it."""
    for action in args.parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        path = getattr(args, action.dest, None)
        if action.metavar in _PATHS and isinstance(path, str):
            setattr(args, action.dest, os.path.abspath(path))


def request_of(args: argparse.Namespace) -> "ScriptRequest":
    """The request the flags ask for. Raises OptionError where they contradict each other."""
    from runtime.flags import train as train_flags

    tensorflow_flags.settle(args)
    if args.costgen:
        raise OptionError("--costgen profiles a built-in model; drop it, and --out=DIR keeps the profile of a script's model")
    require_none_of(args, {*train_flags.OF_MODELS, *train_flags.OF_RUNS})
    require_one_start(args.workers)
    request = train_flags.request_of(args)
    if args.workers == "process" and request.cuda:
        raise OptionError("a script's model runs on all CUDA devices of a machine from one process; drop --workers=process")
    if request.cuda_graphs:
        raise OptionError("--cuda_graphs is for built-in models; drop it")
    from runtime.train_request import ScriptRequest

    return ScriptRequest(args.script, tuple(args.script_args or ()), request, args.verify_steps, args.fallback)
