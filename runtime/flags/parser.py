"""How command lines are spelled, parsed and explained."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from baechi_ext.errors import OptionError


class Parser(argparse.ArgumentParser):
    """argparse with usage errors of one line."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, where what is no argument is an error of the command that it was given to."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(parsed, "parser", self)
            script = getattr(parsed, "script", None)
            own = f"; what {script} is to be given stands behind a --" if script is not None else ""
            command.error(f"unrecognized arguments: {' '.join(unknown)}{own}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")


class Lines(argparse.HelpFormatter):
    """argparse's help, where a new line in a flag's help begins a new line."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.split("\n") for line in super(Lines, self)._split_lines(part, width)]


def with_underscores(argv: Sequence[str]) -> list[str]:
    """`argv` with the flags' own spelling: --num-devices=2 becomes --num_devices=2; what follows a lone -- stays."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return [_with_underscores(a) if i < end and a.startswith("--") else a for i, a in enumerate(argv)]


def _with_underscores(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
