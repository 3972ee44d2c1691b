"""Training on: many placed steps, their losses, checkpoints on the way, and going on from the last one."""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from baechi_ext.errors import BaechiError, CheckpointError, ExecutionError, OptionError
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.common import PlanResult
from runtime.checkpoint_folder import Checkpoint, CheckpointFolder, Shard
from runtime.parity_result import Parity
from runtime.tables import as_time

_LOSSES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class RunOptions:
    steps: int
    """Where to stop, counted from the training's first step."""
    checkpoint: str | None = None
    """A folder; None: no checkpoints."""
    checkpoint_every: int = 100
    resume: bool = False
    command: tuple[str, ...] = ()
    """What was called, word by word, for the checkpoints."""


class Trained(Protocol):
    """A placed step of any framework's, as a training takes it."""

    random_state: str
    """What is to be drawn next, as text. Raises CheckpointError where it is set to what is no such state."""

    def begin(self) -> None:
        """Before the first step of all: random numbers begin anew."""

    def run(self) -> tuple[float, float]:
        """One step: its loss, and its wall time in microseconds."""

    def save(self, folder: Path) -> list[Shard]:
        """Writes what lives on every device into the folder, a shard each."""

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """Takes up a checkpoint, which may be of another plan. Raises CheckpointError."""


@dataclass(frozen=True)
class Progressed:
    """What a run did."""

    losses: tuple[float, ...]
    """Of all steps, those before the checkpoint it went on from included."""
    resumed_from: int | None
    """The step of that checkpoint; None where the run began at the beginning."""
    step_us: tuple[float, ...]
    """Wall time of each step of this run."""
    checkpoint_step: int | None
    """Of the last checkpoint."""


@dataclass(frozen=True)
class RunReport:
    """A training: what was run where, and its losses."""

    model: str
    executor: str
    result: PlanResult
    parity: Parity
    progressed: Progressed
    checkpoint: str | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything, all losses included; times in microseconds."""
        timeline, run = self.result.timeline, self.progressed
        return {
            "model": self.model,
            "method": self.result.plan.method,
            "executor": self.executor,
            "num_devices": len(self.result.plan.cluster),
            "cluster": timeline.cluster.to_json(),
            "parity": self.parity.to_json(),
            "steps": len(run.losses),
            "losses": list(run.losses),
            "resumed_from": run.resumed_from,
            "checkpoint": None if self.checkpoint is None else {"folder": self.checkpoint, "step": run.checkpoint_step},
            "predicted_step_us": timeline.makespan_us,
            "measured_step_us": {"median": statistics.median(run.step_us), "samples": list(run.step_us)} if run.step_us else None,
            "notes": list(self.notes),
        }

    def print(self) -> None:
        """Writes the losses, evenly spread where there are many, and the facts on stdout."""
        run, timeline = self.progressed, self.result.timeline
        last = len(run.losses)
        shown = sorted({round(1 + i * (last - 1) / (_LOSSES_SHOWN - 1)) for i in range(_LOSSES_SHOWN)})
        width = len(str(last))
        lines = [f"step {step:>{width}}   loss {run.losses[step - 1]:.9g}" for step in shown]
        begun = "the beginning" if run.resumed_from is None else f"the checkpoint of step {run.resumed_from}"
        median, predicted = statistics.median(run.step_us or [0.0]), as_time(timeline.makespan_us)
        took = f", {as_time(median)} each (median), predicted {predicted}" if run.step_us else ""
        devices = len(self.result.plan.cluster)
        lines += [
            "",
            f"trained        {self.model}, {len(run.step_us)} steps from {begun}{took}",
            f"placed         {self.result.plan.method}, {devices} device{'s' * (devices > 1)}, {self.executor}",
            f"parity         {self.parity.compared} tensors, largest difference {self.parity.max_abs_diff:.3g}",
        ]
        if self.checkpoint is not None:
            lines.append(f"checkpoint     step {run.checkpoint_step} in {self.checkpoint}")
        sys.stdout.write("\n".join([*lines, *(f"note           {note}" for note in self.notes)]) + "\n")


def train_on(placed: Trained, options: RunOptions, training: Mapping[str, Any], show: Callable[[str], None]) -> Progressed:
    """Trains until step `options.steps`: from the beginning, or with `resume` from the last checkpoint, if there is one.

    `training` says what is trained; a checkpoint of anything else is refused. `show` takes news. Raises CheckpointError, FileError,
    OptionError where the checkpoint is of a later step, ExecutionError where a step fails or a loss is no number.
    """
    saver = _Saver(placed, options, training)
    found = saver.begin()
    losses = list(found.losses) if found else []
    step_us = []
    if found is None:
        placed.begin()
        saver.save(losses)
    try:
        for step in range(len(losses) + 1, options.steps + 1):
            loss, wall_us = placed.run()
            if not math.isfinite(loss):
                raise ExecutionError(f"the loss of step {step} is {loss}; choose a smaller --learning_rate")
            losses.append(loss)
            step_us.append(wall_us)
            show(f"step {step} of {options.steps}, loss {loss:.6g}")
            if step % options.checkpoint_every == 0 or step == options.steps:
                saver.save(losses)
    except BaechiError as e:
        raise type(e)(f"{e}; {saver.advice(len(losses) + 1)}") from e
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"interrupted; {saver.advice(len(losses) + 1)}") from e
    return Progressed(tuple(losses), found.step if found else None, tuple(step_us), saver.saved)


class _Saver:
    """Writes and finds the checkpoints of one run; without a folder it does nothing."""

    def __init__(self, placed: Trained, options: RunOptions, training: Mapping[str, Any]) -> None:
        self.placed = placed
        self.options = options
        self.training = dict(training)
        self.folder = None if options.checkpoint is None else CheckpointFolder(options.checkpoint)
        self.saved: int | None = None

    def begin(self) -> Checkpoint | None:
        """The checkpoint to go on from, taken up; None where the run begins at the beginning."""
        if self.folder is None:
            return None
        self.folder.make()
        found = self.folder.last()
        if found is None:
            return None
        if not self.options.resume:
            raise OptionError(
                f"--checkpoint={self.folder.folder} holds checkpoints, the last of step {found.step}; add --resume to go on from it, "
                "or choose another folder"
            )
        self._require_same(found)
        self.placed.restore(found.folder, found.shards)
        self.placed.random_state = found.random_state
        self.saved = found.step
        return found

    def _require_same(self, found: Checkpoint) -> None:
        for what in dict.fromkeys([*self.training, *found.training]):
            given, own = found.training.get(what), self.training.get(what)
            if given != own:
                raise CheckpointError(
                    f"{found.folder} is of another training: its {what} is {given!r}, here it is {own!r}; give the flags that it was "
                    "begun with, or another --checkpoint"
                )
        if found.step > self.options.steps:
            raise OptionError(f"{found.folder} is of step {found.step}, beyond --train_steps={self.options.steps}; ask for more steps")

    def save(self, losses: list[float]) -> None:
        if self.folder is None or self.saved == len(losses):
            return
        unfinished = self.folder.begin(len(losses))
        try:
            shards = self.placed.save(unfinished)
            state = self.placed.random_state
            about = {"step": len(losses), "training": self.training, "random_state": state, "losses": losses}
            about |= MadeBy(self.options.command).to_json()
            self.folder.complete(unfinished, about, shards)
        except BaseException:
            self.folder.drop(unfinished)
            raise
        self.saved = len(losses)

    def advice(self, step: int) -> str:
        """How to go on after an end in `step`."""
        if self.saved is None:
            return f"this was step {step}, and there is no checkpoint (--checkpoint=DIR keeps some)"
        return f"this was step {step}: --resume goes on from the checkpoint of step {self.saved}"
