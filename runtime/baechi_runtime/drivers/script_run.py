"""The outcome of a user's script, some of whose calls were placed: what is said of it, and the files that are kept."""

import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import convert
from msgspec.structs import replace

from baechi_ext.ir.files import make_folder
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.drivers.train_request import ScriptRequest
from baechi_runtime.files.run_folder import KeptStep, folder_of, keep_script, said_of_interrupt
from baechi_runtime.host.as_main import run_as_main
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.report import Script

P = TypeVar("P")


@dataclass
class ScriptRun(Findings, Generic[P]):
    """A script's exit code, and what of it was placed: modules, or with TensorFlow training steps."""

    kind: ClassVar[str]
    """Their name in report.json: "modules" or "steps"."""
    name: str = ""
    """The name of the script's file."""
    code: Any = 0
    """As sys.exit takes it."""
    placed: list[P] = field(default_factory=list)
    reports: bool = True
    """True if this process says what was placed: of several one does."""
    too_small: int = 0
    """The most parameters of what trained and was too small."""
    command: tuple[str, ...] = ()
    """The command line, word by word."""
    folder: Path | None = None
    """The folder that its placed steps are kept in, if any."""

    @abstractmethod
    def found(self, placed: P) -> tuple[CallReport, KeptStep | None]:
        """The report of one of them, and its step as it is kept, None where it has no plan."""

    @abstractmethod
    def why_nothing(self) -> str:
        """The reason why nothing was placed."""

    @cached_property
    def all_found(self) -> list[tuple[CallReport, KeptStep | None]]:
        """The findings on each; asked for when the script has ended."""
        return [self.found(placed) for placed in self.placed]

    @property
    def kept_steps(self) -> list[KeptStep]:
        """The steps of which something is kept."""
        return [step for _, step in self.all_found if step is not None]

    def lines(self) -> list[str]:
        """One line each: what was placed and what it gained; or why nothing was."""
        if not self.placed:
            return [f"nothing was placed: {self.why_nothing()}"]
        return [report.line() for report, _ in self.all_found]

    def main(self, asked: ScriptRequest, conclude: Callable[[], None]) -> None:
        """Runs the script to its end; then, behind `conclude`, says what was placed, and keeps that in the request's folder.

        Raises what placing raises, and KeyboardInterrupt.
        """
        path, interrupt = Path(asked.path), None
        self.name, self.command = path.name, asked.request.command
        self.folder = None if asked.request.out is None else Path(asked.request.out)
        if self.folder is not None:
            make_folder(self.folder)
        try:
            self.code = run_as_main(path, asked.arguments)
        except KeyboardInterrupt as e:
            interrupt = e
        conclude()
        kept = self.folder if self.reports else None
        try:
            if kept is not None:
                keep_script(kept, self.kept_steps, self.to_json())
        finally:
            if self.reports:
                self.say()
        if interrupt is not None:
            said = "" if kept is None else said_of_interrupt(kept, self.kept_steps)
            raise KeyboardInterrupt(said or str(interrupt)) from interrupt

    def say(self) -> None:
        """Writes the lines to stderr, after all that the script has printed."""
        sys.stdout.flush()
        sys.stderr.write("".join(f"baechi: {line}\n" for line in self.lines()))

    def report(self) -> Script:
        """The content of report.json: the first placed step, reported as a built-in model's is, and all of them in short."""
        kept, made_by = self.kept_steps, MadeBy(self.command)
        folders = {} if self.folder is None else {id(step): folder_of(number) for number, step in enumerate(kept)}
        each = [replace(found.report(), folder=folders.get(id(step))) for found, step in self.all_found]
        first = {name: found for name, found in (kept[0].report if kept else {"model": self.name}).items() if name != "kind"}
        return convert({**first, self.kind: each, "summary": self.lines(), **made_by.to_json()}, Script)
