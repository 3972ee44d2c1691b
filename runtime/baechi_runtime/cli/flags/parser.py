"""Spelling, parsing and explaining command lines."""

import argparse
import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from baechi_ext.errors import OptionError

_PATHS = ("FILE", "DIR")
"""The metavars of flags that take a path."""


class Parser(argparse.ArgumentParser):
    """argparse with usage errors of one line."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's, but an unknown argument is an error of the sub-command that it was given to."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(parsed, "parser", self)
            script = getattr(parsed, "script", None)
            own = f"; what {script} is to be given stands behind a --" if script is not None else ""
            flags = [flag for action in command._actions for flag in action.option_strings]  # noqa: SLF001 - not to be asked otherwise
            command.error(f"unrecognized arguments: {' '.join(unknown)}{meant(unknown[0].partition('=')[0], flags)}{own}")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as e:
            raise argparse.ArgumentError(action, f"{e.message}{meant(value, action.choices or ())}") from e

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")


class Lines(argparse.HelpFormatter):
    """argparse's help, where a new line in a flag's help begins a new line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.split("\n") for line in super(Lines, self)._split_lines(part, width)]


def meant(word: object, known: Iterable[object]) -> str:
    """The end of an error message that names the known word nearest to a mistyped one; empty where none is near."""
    near = difflib.get_close_matches(str(word), list(map(str, known)), n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def with_underscores(argv: Sequence[str]) -> list[str]:
    """`argv` with the flags' own spelling: --num-devices=2 becomes --num_devices=2; what follows a lone -- stays."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return [_with_underscores(a) if i < end and a.startswith("--") else a for i, a in enumerate(argv)]


def _with_underscores(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def parted(command_line: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The command line up to a lone --, and what follows it, of `train`, `compare` and `pase`: the script's own arguments.
    None where there is no --."""
    line = list(command_line)
    if line[:1] not in (["train"], ["compare"], ["pase"]) or "--" not in line:
        return line, None
    end = line.index("--")
    return line[:end], line[end + 1 :]


def anchor(args: argparse.Namespace) -> None:
    """Makes the paths that flags of a script's run name absolute: they are read and written once the script runs, which may have gone to
    another folder. The script's own path stays: it is read before, and the script may look at it."""
    for action in args.parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        path = getattr(args, action.dest, None)
        if action.metavar in _PATHS and isinstance(path, str):
            setattr(args, action.dest, os.path.abspath(path))
