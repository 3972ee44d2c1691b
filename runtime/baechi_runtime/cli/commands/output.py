"""Output of every command on stdout and stderr: its result, for programs or for people, with who made it; or an error line."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import InfeasibleError, legible
from baechi_ext.ir.files import make_folder, write_text
from baechi_ext.ir.made_by import CONFIG, MadeBy, signed
from baechi_runtime.cli.flags import config
from baechi_runtime.host.error_line import error_line

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
    logs: str | None = None
    """A folder that TensorBoard reads, for the numbers of steps."""

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
        if self.logs is not None:
            from baechi_runtime.library.loggers import log_report

            log_report(of(), self.logs)

    def print_json(self, report: "Report") -> None:
        """Prints the report's JSON object, signed."""
        print(json.dumps(signed(report.to_json(), self.made_by), indent=1, allow_nan=False))

    @contextlib.contextmanager
    def infeasible_printed(self) -> Iterator[None]:
        """Where nothing fits, --json says so on stdout before the error goes on."""
        from baechi_runtime.report.printed import NotPlaced

        try:
            yield
        except InfeasibleError as e:
            if self.json:
                self.print_json(NotPlaced(**e.to_json()))
            raise

    def keep_settings(self, folder: str | None, command: str) -> None:
        """Makes the folder of a run, where it has one, and writes the file that reproduces it there: every flag that was given. Raises
        FileError."""
        if folder is not None:
            text = config.text_of(folder, command, self.settings, self.made_by)
            make_folder(Path(folder))
            write_text(Path(folder) / CONFIG, text)


def fail(message: str, code: int) -> int:
    """Prints the error line, and returns the exit code."""
    sys.stderr.write(error_line(" ".join(legible(message).split())))
    return code
