"""Output of every command on stdout and stderr: its result, for programs or for people, with who made it; or an error line."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from baechi_ext.errors import legible
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_runtime.cli.flags.common import command_of


def report_on(args: argparse.Namespace, as_json: Callable[[], dict[str, Any]], as_text: Callable[[], object]) -> None:
    """Prints what a command found on stdout, for programs or for people, and who made it."""
    if args.json:
        print_json(args, as_json())
    else:
        as_text()
        print(f"made by        {made_by(args)}")


def print_json(args: argparse.Namespace, value: dict[str, Any]) -> None:
    """Prints the JSON object, signed."""
    print(json.dumps(signed(value, made_by(args)), indent=1, allow_nan=False))


def made_by(args: argparse.Namespace) -> MadeBy:
    """Who made what this command writes."""
    return MadeBy(command_of(args))


def fail(message: str, code: int) -> int:
    """Prints the error line, and returns the exit code."""
    print("error:", " ".join(legible(message).split()), file=sys.stderr)
    return code
