"""Spelling, parsing and explaining command lines."""

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from baechi_ext.errors import MissingBackendError, OptionError

PATHS = ("FILE", "DIR", "FOLDER")
"""The metavars of flags that take a path."""


SHELLS = ("bash", "zsh", "tcsh")
EVERYWHERE = {
    ("-q", "--quiet"): "say nothing on stderr of what is being done",
    ("-v", "--verbose"): "say it line by line, with the seconds that each took, and show the traceback of an error",
}
"""Flags of all commands, with their help."""


class Parser(argparse.ArgumentParser):
    """argparse with usage errors of one line, EVERYWHERE's flags in all commands, and a help of the most important flags of many."""

    _first: Sequence[str] = ()
    """The flags that --help shows; all where none is named."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Not set by default: a sub-command's default would take back what stands before its name.
        for flags, text in EVERYWHERE.items():
            self.add_argument(*flags, action="store_true", default=argparse.SUPPRESS, help=text)

    def show_first(self, flags: Sequence[str]) -> None:
        """Has --help show these flags alone, and --help_all the others, too."""
        self._first = flags
        self.add_argument("--help_all", action=_HelpAll, dest="help", nargs=0, help="show all flags, and end")

    def format_help(self) -> str:
        """The text of --help."""
        if not self._first:
            return super().format_help()
        formatter, known = self._get_formatter(), self._option_string_actions
        places = [action for action in self._actions if not action.option_strings]
        named = [f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar) for action in places]
        formatter.add_usage(" ".join(["%(prog)s [FLAG ...]", *named]), (), ())
        formatter.add_text(self.description)
        shown = (*self._first, "--help_all", *map(min, EVERYWHERE))
        for title, actions in (("positional arguments", places), ("flags", [known[flag] for flag in shown])):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        flags = sum(bool(action.option_strings) for action in self._actions)
        formatter.add_text(f"{self.prog} --help_all shows all {flags} flags.")
        return formatter.format_help()

    def format_whole_help(self) -> str:
        """The text of --help_all."""
        return super().format_help()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's, but an unknown argument is an error of the sub-command that it was given to."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(parsed, "parser", self)
            script = getattr(parsed, "script", None)
            own = f"; what {script} is to be given stands behind a --" if script is not None else ""
            flags = [*getattr(command, "_first", ()), *command._option_string_actions]  # noqa: SLF001 - not to be asked otherwise
            command.error(f"unrecognized arguments: {' '.join(unknown)}{meant(unknown[0].partition('=')[0], flags)}{own}")
        if not hasattr(parsed, "parser"):  # said only now: a mistyped flag before it says more
            self.error("the following arguments are required: COMMAND")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as e:
            near = meant(value, action.choices or ())
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near}" if near else e.message) from e

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} {'--help_all' if self._first else '--help'}")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        if isinstance(parser, Parser):
            sys.stdout.write(parser.format_whole_help())
        parser.exit()


class PrintCompletion(argparse.Action):
    """Prints a script by which a shell completes commands, flags, their values and paths, and ends. Raises MissingBackendError."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, *_: object) -> None:
        try:
            import shtab
        except ImportError as e:
            raise MissingBackendError("completion in a shell needs shtab; pip install 'baechi-ext[completion]'") from e
        for action in _all_actions(parser):
            action.choices = getattr(action.type, "names", action.choices)
            if action.metavar in PATHS:
                action.complete = shtab.FILE if action.metavar == "FILE" else shtab.DIRECTORY  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(parser, values))
        parser.exit()


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for command in action.choices.values():
                yield from _all_actions(command)


class Lines(argparse.HelpFormatter):
    """argparse's help, where a new line in a flag's help begins a new line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.split("\n") for line in super(Lines, self)._split_lines(part, width)]


def meant(word: object, known: Iterable[object]) -> str:
    """The end of an error message that names the known word that was meant: the first one with all of it between underscores, as
    --placement_method has --method, else the one nearest to a mistyped one. Empty where there is none."""
    word, names = str(word), list(map(str, known))
    holding = [name for name in names if word.strip("-") in name.strip("-").split("_")]
    near = holding or difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def with_underscores(argv: Sequence[str]) -> list[str]:
    """`argv` with the flags' own spelling: --num-devices=2 becomes --num_devices=2; what follows a lone -- stays."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return [_with_underscores(a) if i < end and a.startswith("--") else a for i, a in enumerate(argv)]


def _with_underscores(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def after_command(line: Sequence[str]) -> int:
    """The place after the command's name, before which flags of EVERYWHERE may stand."""
    return next((i for i, word in enumerate(line, start=1) if not word.startswith("-")), len(line))


def parted(command_line: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The command line up to a lone --, and what follows it, of `train`, `compare` and `pase`: the script's own arguments.
    None where there is no --."""
    line = list(command_line)
    if not {"train", "compare", "pase"}.intersection(line[: after_command(line)]) or "--" not in line:
        return line, None
    end = line.index("--")
    return line[:end], line[end + 1 :]


def anchor(args: argparse.Namespace) -> None:
    """Makes the paths that flags of a script's run name absolute: they are read and written once the script runs, which may have gone to
    another folder. The script's own path stays: it is read before, and the script may look at it."""
    for action in args.parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        path = getattr(args, action.dest, None)
        if action.metavar in PATHS and isinstance(path, str):
            setattr(args, action.dest, os.path.abspath(path))
