"""Output of every command on stdout and stderr: its result, for programs or for people, with who made it; or an error line."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import legible
from baechi_ext.ir.made_by import MadeBy, signed

if TYPE_CHECKING:
    from baechi_runtime.report.report import Report


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's findings go."""

    json: bool = False
    command: tuple[str, ...] = ("baechi",)
    """The command line, word by word."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The flags that were given, for the file that reproduces a run."""

    @property
    def made_by(self) -> MadeBy:
        """Who made what this command writes; the versions are of what is loaded by now."""
        return MadeBy(self.command)

    def report(self, of: "Callable[[], Report]", as_text: Callable[[], object]) -> None:
        """Prints what a command found on stdout, for programs or for people, and who made it."""
        if self.json:
            self.print_json(of())
        else:
            as_text()
            print(f"made by        {self.made_by}")

    def print_json(self, report: "Report") -> None:
        """Prints the report's JSON object, signed."""
        print(json.dumps(signed(report.to_json(), self.made_by), indent=1, allow_nan=False))


def fail(message: str, code: int) -> int:
    """Prints the error line, and returns the exit code."""
    print("error:", " ".join(legible(message).split()), file=sys.stderr)
    return code
