"""A sharded run's folder, read once and checked: its report, and its shard plans."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baechi_ext.ir.files import read_json
from baechi_ext.shard.plan import ShardPlan
from baechi_runtime.files.run_folder import REPORT, SHARD_PLAN
from baechi_runtime.report.findings import load_text
from baechi_runtime.report.reading import read
from baechi_runtime.report.report import Sharded, Strategy
from baechi_runtime.report.tables import as_time

OWN = "plan"
"""The name for the plan of a folder that has no report."""


@dataclass(frozen=True)
class ShardedRun:
    """A sharded run. `plans` are by the strategies' names, the run's own one first."""

    path: Path
    report: Sharded | None
    """None where nothing was run."""
    plans: Mapping[str, ShardPlan]

    @classmethod
    def load(cls, path: str | Path) -> "ShardedRun":
        """Reads a run's folder. Raises FileError for a damaged report, and what reading a shard plan raises."""
        folder = Path(path)
        own = ShardPlan.load(folder / SHARD_PLAN) if (folder / SHARD_PLAN).is_file() else None
        if not (folder / REPORT).is_file():
            return cls(folder, None, {} if own is None else {OWN: own})
        report = read(read_json(folder / REPORT, "report"), Sharded, folder / REPORT, "baechi train --sharding")
        plans = _plans(folder, report)
        if own is not None:
            name = next((name for name, plan in plans.items() if plan == own), OWN)
            plans = {name: own, **plans}
        return cls(folder, report, plans)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """They begin with the step that is not split."""
        return () if self.report is None else tuple(filter(None, (self.report.whole, *self.report.strategies)))

    @property
    def split(self) -> tuple[Strategy, ...]:
        """The strategies alone."""
        return () if self.report is None else tuple(self.report.strategies)

    @property
    def plan(self) -> ShardPlan | None:
        """The run's own plan."""
        return next(iter(self.plans.values()), None)

    @property
    def title(self) -> str:
        model = self.report is not None and self.report.model
        return model or (self.plan.graph if self.plan is not None else "") or self.path.resolve().name

    @property
    def devices(self) -> int:
        counts = [len(s.held_bytes) for s in self.strategies] + [plan.devices for plan in self.plans.values()]
        return max(counts, default=0)


def facts_of(report: Sharded) -> Iterator[tuple[str, str]]:
    """The facts behind a verdict on split steps, by name."""
    machine, processes = report.machine, f"{report.num_devices}, mesh {' x '.join(map(str, report.mesh))}"
    if machine is not None:
        link = f"{machine.gigabytes_per_second:.3g} GB/s and {as_time(machine.latency_us)} a message"
        processes += f", each {machine.tera_flops:.3g} TFLOP/s, {link} (measured)"
    yield "processes", processes
    if report.single_step_us is not None:
        yield "one process", f"{as_time(report.single_step_us.median)} a step that is not split"
    if report.executable:
        yield "executable", report.executable
    if report.kendall_tau is not None:
        yield "ranking", f"Kendall's tau of predicted and measured: {report.kendall_tau:+.2f}"
    if isinstance(report.load_of_others, float):
        yield "CPU load", load_text(report.load_of_others)


def _plans(folder: Path, report: Sharded) -> dict[str, ShardPlan]:
    """The strategies' plans, whose files are in the folder itself."""
    found = {}
    for strategy in report.strategies:
        file = strategy.plan
        if file and Path(file).name == file and os.path.isfile(folder / file):  # False where no file can have that name
            found[strategy.name] = ShardPlan.load(folder / file)
    return found
