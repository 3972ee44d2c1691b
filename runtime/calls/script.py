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
from pathlib import Path
from typing import Any

import torch
from torch import nn

from baechi_ext.errors import BaechiError
from baechi_ext.ir.files import make_folder, write_json
from baechi_ext.ir.made_by import versions
from runtime.as_main import require_script, run_as_main
from runtime.calls.call_report import CallReport
from runtime.calls.module_calls import LARGE_ENOUGH, Call, outermost_calls, trained_size
from runtime.calls.parallelize import executor_of
from runtime.calls.placed_calls import PlacedCalls, Settings
from runtime.calls.workers import Workers, join_workers
from runtime.run_folder import begin_run
from runtime.train_request import ScriptRequest, TrainRequest
from runtime.training import devices_of

MOST_MODULES = 4
"""So many modules of a script are placed, as a generator and a discriminator."""


@dataclass
class ScriptRun:
    """What became of a script: its exit code, and its placed modules."""

    code: Any = 0
    """As sys.exit takes it."""
    placed: list[PlacedCalls] = field(default_factory=list)
    reports: bool = True
    """Whether this process says what was placed: of several workers one does."""
    too_small: int = 0
    """The most parameters of a module that trained and was too small."""
    command: tuple[str, ...] = ()
    """What was called, word by word."""

    def lines(self) -> list[str]:
        """What was placed and what it gained, one line a module; or why nothing was."""
        if self.placed:
            return [CallReport.of(calls).line() for calls in self.placed]
        if self.too_small:
            return [f"nothing was placed: the largest module that trained has {self.too_small} parameters, fewer than {LARGE_ENOUGH}"]
        return ["nothing was placed: no module was called in training mode (model.train()) while gradients were recorded"]

    def say(self) -> None:
        """Writes the lines to stderr, behind all that the script has printed."""
        sys.stdout.flush()
        sys.stderr.write("".join(f"baechi: {line}\n" for line in self.lines()))

    def to_json(self) -> dict[str, Any]:
        modules = [CallReport.of(calls).to_json() for calls in self.placed]
        return {"modules": modules, "summary": self.lines(), "versions": versions(), "command": list(self.command)}


def run_script(asked: ScriptRequest) -> ScriptRun:
    """Runs the script to its end; an exception of its own is shown as Python shows it, and its exit code is 1.

    Raises FileError where there is no such script, what placing its model raises, and KeyboardInterrupt.
    """
    path = require_script(asked.path)
    if asked.request.out is not None:
        make_folder(Path(asked.request.out))
    workers = workers_of(asked.request)
    run = ScriptRun(reports=workers is None or workers.group.rank == 0, command=asked.request.command)
    try:
        with as_one_of(workers), outermost_calls(_Placing(asked, run).runner):
            run.code = run_as_main(path, asked.arguments)
    except BaechiError:
        if workers is not None:
            workers.failed = True
        raise
    except KeyboardInterrupt:
        run.say()
        raise
    if run.reports:
        run.say()
        if asked.request.out is not None:
            _keep(Path(asked.request.out), run)
    return run


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
        return Settings(request, executor, asked.verify_steps, asked.fallback)


def _keep(folder: Path, run: ScriptRun) -> None:
    """Writes graph.json, profile.json and plan.json of every placed module, the first without a number, and report.json."""
    begin_run(folder)
    for number, calls in enumerate(c for c in run.placed if c.calls):
        placement, end = calls.calls[0].placement, f"_{number + 1}" if number else ""
        placement.graph.save(folder / f"graph{end}.json")
        placement.profile.save(folder / f"profile{end}.json")
        placement.result.plan.save(folder / f"plan{end}.json")
    write_json(folder / "report.json", run.to_json())
