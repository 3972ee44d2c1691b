"""A sharded run's folder, read once and checked: its strategies as they were predicted and measured, and their shard plans."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError
from baechi_ext.ir.files import read_json
from baechi_ext.shard.explain import FORECAST_KINDS
from baechi_ext.shard.plan import ShardPlan
from baechi_runtime.files.run_folder import REPORT, SHARD_PLAN
from baechi_runtime.report.fields import list_of, number_of, object_of, objects_of, text_of
from baechi_runtime.report.run_summary import RunSummary, Variant, common_fields, variant_fields

HELD = ("weights", "gradients", "optimizer", "kept")
OWN = "plan"
"""The name for the plan of a folder that has no report."""


@dataclass(frozen=True, slots=True)
class Messages:
    """A kind of collective: messages and bytes that a process sends in a step, predicted (None where that is not known) and counted."""

    kind: str
    predicted: tuple[float, float] | None
    counted: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Strategy(Variant):
    """A strategy of the run, or the step that every process runs whole."""

    is_whole: bool
    parts_us: Mapping[str, float]
    """Predicted microseconds by kind of cost."""
    messages: tuple[Messages, ...]
    held: tuple[Mapping[str, float], ...]
    """Bytes by what is held, a process each."""
    planned_bytes: float | None
    parity: str


@dataclass(frozen=True)
class ShardedRun:
    """A sharded run. `strategies` begin with the step that is not split; `plans` are by the strategies' names, the run's own one first."""

    path: Path
    strategies: tuple[Strategy, ...]
    plans: Mapping[str, ShardPlan]
    summary: RunSummary
    facts: tuple[tuple[str, str], ...]

    @classmethod
    def load(cls, path: str | Path) -> "ShardedRun":
        """Reads a run's folder. Raises FileError for a damaged report, and what reading a shard plan raises."""
        folder = Path(path)
        own = ShardPlan.load(folder / SHARD_PLAN) if (folder / SHARD_PLAN).is_file() else None
        if not (folder / REPORT).is_file():
            return cls(folder, (), {} if own is None else {OWN: own}, RunSummary(), ())
        value = read_json(folder / REPORT, "report")
        try:
            rows = [object_of(value, "whole"), *objects_of(value, "strategies", "strategy")]
            plans = _plans(folder, rows)
            strategies = tuple(_strategy(row, plans, is_whole=not i) for i, row in enumerate(rows) if row)
            summary, facts = RunSummary(**common_fields(value)), tuple(_facts(value))
        except FileError as e:
            raise FileError(f"{folder / REPORT}: {e}; write it again with baechi train --sharding --out") from e
        if own is not None:
            name = next((name for name, plan in plans.items() if plan == own), OWN)
            plans = {name: own, **plans}
        return cls(folder, strategies, plans, summary, facts)

    @property
    def split(self) -> tuple[Strategy, ...]:
        """The strategies alone."""
        return tuple(s for s in self.strategies if not s.is_whole)

    @property
    def plan(self) -> ShardPlan | None:
        """The run's own plan."""
        return next(iter(self.plans.values()), None)

    @property
    def title(self) -> str:
        return self.summary.model or (self.plan.graph if self.plan is not None else "") or self.path.resolve().name

    @property
    def devices(self) -> int:
        counts = [len(s.held) for s in self.strategies] + [plan.devices for plan in self.plans.values()]
        return max(counts, default=0)


def _plans(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, ShardPlan]:
    """The strategies' plans, whose files are in the folder itself."""
    found = {}
    for row in rows:
        file = row.get("plan")
        if isinstance(file, str) and Path(file).name == file and os.path.isfile(folder / file):  # False where no file can have that name
            found[str(row.get("name"))] = ShardPlan.load(folder / file)
    return found


def _strategy(value: Mapping[str, Any], plans: Mapping[str, ShardPlan], *, is_whole: bool) -> Strategy:
    parts, parity, plan = object_of(value, "predicted_parts_us"), object_of(value, "parity"), plans.get(text_of(value, "name"))
    return Strategy(
        **variant_fields(value, "name"),
        is_whole=is_whole,
        parts_us={kind: _known(parts, key) for key, kind in FORECAST_KINDS.items() if key in parts},
        messages=tuple(_messages(object_of(value, "sent"))),
        held=tuple({what: _known(one, f"{what}_bytes") for what in HELD} for one in objects_of(value, "held_bytes", "held_bytes")),
        planned_bytes=None if plan is None else plan.held_bytes,
        parity=f"largest difference {_known(parity, 'max_rel_diff'):.1e} relative" if parity else "",
    )


def _known(value: Mapping[str, Any], key: str) -> float:
    return number_of(value, key) or 0.0


def _messages(sent: Mapping[str, Any]) -> Iterator[Messages]:
    predicted, counted = object_of(sent, "predicted"), object_of(sent, "counted")
    for kind in dict.fromkeys((*counted, *predicted)):
        was, is_ = ((_known(way, "messages"), _known(way, "bytes")) for way in (object_of(predicted, kind), object_of(counted, kind)))
        yield Messages(kind, None if sent.get("predicted") is None else was, is_)


def _facts(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    mesh, machine = list_of(value, "mesh"), object_of(value, "machine")
    yield "processes", f"{_known(value, 'num_devices'):.0f}, mesh {' x '.join(map(str, mesh))}"
    flops, bandwidth, latency = (number_of(machine, key) for key in ("tera_flops", "gigabytes_per_second", "latency_us"))
    if flops is not None and bandwidth is not None and latency is not None:
        yield "machine", f"each process {flops:.3g} TFLOP/s, {bandwidth:.3g} GB/s and {latency:.4g} us a message (measured)"
    if value.get("executable"):
        yield "executable", str(value["executable"])
    tau = number_of(value, "kendall_tau", minimum=-1.0)
    if tau is not None:
        yield "ranking", f"Kendall's tau of predicted and measured steps: {tau:+.2f}"
