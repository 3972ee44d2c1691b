"""Running a user's own training script, unmodified, with its model placed.

The script runs as `python SCRIPT ARGUMENTS` would run it. While it does, a call of a module from outside any other module's call is
looked at: where the module trains and is large enough, its calls are placed (runtime.calls.placed_calls).
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baechi_ext.errors import BaechiError
from baechi_ext.ir.files import SCHEMA_VERSION, make_folder
from baechi_ext.ir.made_by import MadeBy
from runtime.as_main import require_script, run_as_main
from runtime.calls.call_report import CallReport
from runtime.calls.module_calls import LARGE_ENOUGH, Call, outermost_calls, trained_size
from runtime.calls.parallelize import executor_of
from runtime.calls.placed_calls import PlacedCalls, Settings
from runtime.calls.script_steps import kept_step
from runtime.calls.workers import Workers, join_workers
from runtime.measure import load_of_others, oversubscribed
from runtime.run_folder import folder_of
from runtime.samples import LoadOfOthers, Noise
from runtime.script_folder import KeptStep, keep, said_of_interrupt
from runtime.train_request import ScriptRequest, TrainRequest
from runtime.training import devices_of

MOST_MODULES = 4
"""So many modules of a script are placed, as a generator and a discriminator."""


@dataclass
class ScriptRun:
    """What became of a script: its exit code, and its placed modules."""

    name: str = ""
    """Of its file."""
    code: Any = 0
    """As sys.exit takes it."""
    placed: list[PlacedCalls] = field(default_factory=list)
    reports: bool = True
    """Whether this process says what was placed: of several workers one does."""
    too_small: int = 0
    """The most parameters of a module that trained and was too small."""
    command: tuple[str, ...] = ()
    """What was called, word by word."""
    load: LoadOfOthers | None = None
    """From the first placed call on."""

    @cached_property
    def kept(self) -> list[KeptStep | None]:
        """What is kept of each module; asked for when the script has ended."""
        return [kept_step(calls, self.name, self._noise(calls)) for calls in self.placed]

    @property
    def kept_steps(self) -> list[KeptStep]:
        """Of the modules of which something is kept."""
        return [step for step in self.kept if step is not None]

    def _noise(self, calls: PlacedCalls) -> Noise:
        executor = calls.settings.executor
        return Noise(None if self.load is None else self.load.share(), oversubscribed(executor.devices))

    def lines(self) -> list[str]:
        """What was placed and what it gained, one line a module; or why nothing was."""
        if self.placed:
            return [self._line(calls, step) for calls, step in zip(self.placed, self.kept, strict=True)]
        if self.too_small:
            return [f"nothing was placed: the largest module that trained has {self.too_small} parameters, fewer than {LARGE_ENOUGH}"]
        return ["nothing was placed: no module was called in training mode (model.train()) while gradients were recorded"]

    def _line(self, calls: PlacedCalls, step: KeptStep | None) -> str:
        line = CallReport.of(calls).line()
        return line if step is None or calls.refusal else step.with_doubts(line)

    def say(self) -> None:
        """Writes the lines to stderr, behind all that the script has printed."""
        sys.stdout.flush()
        sys.stderr.write("".join(f"baechi: {line}\n" for line in self.lines()))

    def to_json(self) -> dict[str, Any]:
        """What stands in report.json: of the first placed module as of a built-in model, and of all modules in short."""
        steps = self.kept_steps
        modules = []
        for calls, step in zip(self.placed, self.kept, strict=True):
            where = None if step is None else folder_of(steps.index(step))
            modules.append({**CallReport.of(calls).to_json(), "folder": where})
        said = {"modules": modules, "summary": self.lines(), **MadeBy(self.command).to_json()}
        return {"schema_version": SCHEMA_VERSION, **(steps[0].report if steps else {"model": self.name}), **said}

    def keep(self, folder: Path) -> None:
        """Writes the files of a run."""
        keep(folder, self.kept_steps, self.to_json())


def run_script(asked: ScriptRequest) -> ScriptRun:
    """Runs the script to its end; an exception of its own is shown as Python shows it, and its exit code is 1.

    Raises FileError where there is no such script, what placing its model raises, and KeyboardInterrupt.
    """
    path = require_script(asked.path)
    folder = None if asked.request.out is None else Path(asked.request.out)
    if folder is not None:
        make_folder(folder)
    workers = workers_of(asked.request)
    run = ScriptRun(name=path.name, reports=workers is None or workers.group.rank == 0, command=asked.request.command)
    try:
        with as_one_of(workers), outermost_calls(_Placing(asked, run).runner):
            run.code = run_as_main(path, asked.arguments)
    except BaechiError:
        if workers is not None:
            workers.failed = True
        raise
    except KeyboardInterrupt as e:
        _say_and_keep(run, folder)
        if folder is None or not run.reports:
            raise
        raise KeyboardInterrupt(said_of_interrupt(folder, run.kept_steps) or str(e)) from e
    _say_and_keep(run, folder)
    return run


def _say_and_keep(run: ScriptRun, folder: Path | None) -> None:
    if run.reports:
        run.say()
        if folder is not None:
            run.keep(folder)


def workers_of(request: TrainRequest) -> Workers | None:
    """The workers that run the script together; None where this process runs it alone."""
    return join_workers(request.num_devices, request.timeout_seconds) if request.workers == "process" else None


@contextmanager
def as_one_of(workers: Workers | None) -> Iterator[None]:
    """Every worker runs the script with the same random numbers, worker 0's; what the others print is lost."""
    if workers is None:
        yield
        return
    seed = workers.share([torch.tensor(torch.initial_seed() % 2**32)], [torch.tensor(0)], 0)[0].item()
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if workers.group.rank == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


class _Placing:
    """Calls of modules while the script runs."""

    def __init__(self, asked: ScriptRequest, run: ScriptRun) -> None:
        self._asked = asked
        self._run = run
        self._known: dict[int, PlacedCalls] = {}

    def runner(self, module: nn.Module, ordinary: Call) -> Call:
        """What the module is called by."""
        known = self._known.get(id(module))
        if known is not None:
            return known
        size = trained_size(module) if len(self._known) < MOST_MODULES else 0
        if size < LARGE_ENOUGH:
            self._run.too_small = max(size, self._run.too_small)
            return ordinary
        self._known[id(module)] = PlacedCalls(module, ordinary, self._settings())
        self._run.placed.append(self._known[id(module)])
        return self._known[id(module)]

    def _settings(self) -> Settings:
        asked, request = self._asked, self._asked.request
        executor = workers_of(request) or executor_of(devices_of(request), request.timeout_seconds)
        if self._run.load is None and not isinstance(executor, Workers):  # of several processes none sees what the others use
            self._run.load = load_of_others(executor)
        return Settings(request, executor, asked.verify_steps, asked.fallback, record=request.out is not None)

