"""`baechi` with a fault in one of its worker processes, which happens at a set moment of a training.

    FAULT=RANK:WHEN:STEP:SIGNAL python -m tests.runtime.faulty_worker train ...

WHEN is a phase (forward, backward, update): in the STEP-th step the worker sends itself the signal in the middle one of its ops of that
phase. Or it is "save": then it does so in its STEP-th checkpoint, with half of its shard written.
"""

import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from baechi_runtime.cli.commands import steps
from baechi_runtime.cli.main import main
from baechi_runtime.torch.lowering import checkpoint
from baechi_runtime.torch.processes import rank_part
from baechi_runtime.torch.processes.rank_part import RankPart

MODULE = "tests.runtime.faulty_worker"


class Fault:
    """A signal to this very process, once."""

    def __init__(self, text: str) -> None:
        rank, self.when, step, name = text.split(":")
        self.rank, self.step, self.signal = int(rank), int(step), signal.Signals[name]

    def strike(self) -> None:
        os.kill(os.getpid(), self.signal)

    def install(self) -> None:
        if self.when == "save":
            rank_part.write_shard = self._half(checkpoint.write_shard)
        else:
            RankPart.run = self._counted(RankPart.run)

    def _counted(self, run: Any) -> Any:
        """A part that runs for the STEP-th time strikes; the training's part is the only one that runs more than once."""

        def counted(part: RankPart) -> Any:
            part.begun_runs = getattr(part, "begun_runs", 0) + 1
            if part.begun_runs == self.step:
                segments = list(part.program.segments)
                ops = part.timeline.graph.ops
                own = [i for i, s in enumerate(segments) if ops[s.op].phase == self.when]
                middle = own[len(own) // 2]
                segments[middle] = replace(segments[middle], compute=lambda _: self.strike())
                part.program = replace(part.program, segments=tuple(segments))
            return run(part)

        return counted

    def _half(self, write: Any) -> Any:
        count = 0

        def half(folder: Path, *rest: Any) -> Any:
            nonlocal count
            count += 1
            shard = write(folder, *rest)
            if count == self.step:
                os.truncate(folder / shard.file, shard.bytes // 2)
                self.strike()
            return shard

        return half


if __name__ == "__main__":
    steps.run_workers = partial(steps.run_workers, module=MODULE)
    given = Fault(os.environ["FAULT"])
    if os.environ.get("RANK") == str(given.rank):
        given.install()
    sys.exit(main())
