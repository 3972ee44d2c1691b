"""ShardReport: what steps split in several ways were predicted to take, took, and sent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baechi_ext.ir.files import SCHEMA_VERSION
from baechi_ext.shard.machine import Machine
from runtime.parity_result import Parity
from runtime.run_folder import SHARDING_REPORT
from runtime.samples import ENOUGH, TOO_FEW, Measurement, Ratio, Samples
from runtime.sharding.forecast import Forecast
from runtime.sharding.held import HeldByStep
from runtime.sharding.ranking import kendall_tau
from runtime.sharding.traffic import Traffic
from runtime.tables import as_size, as_time

WHOLE = "not split"
"""What the step is called that every process runs whole."""


@dataclass(frozen=True)
class StrategyRun:
    """A strategy that was run, and what each process sends and holds in a step. `parity` is None for torch's own data parallelism, whose
    dropout differs; `plan` is the file of its shard plan, where there is one."""

    name: str
    note: str
    forecast: Forecast
    samples: Samples
    traffic: Traffic
    held: tuple[HeldByStep, ...]
    parity: Parity | None = None
    losses: tuple[float, ...] = ()
    plan: str | None = None

    @property
    def predicted_us(self) -> float:
        return self.forecast.step_us

    def to_json(self, single: Samples | None) -> dict[str, Any]:
        """`single`: the steps that are not split, taken in turn with these; None where they were not."""
        forecast = self.forecast
        return {
            "name": self.name,
            "note": self.note,
            "plan": self.plan,
            "predicted_step_us": self.predicted_us,
            "predicted_parts_us": forecast.to_json(),
            "measured_step_us": self.samples.to_json(),
            "ratio": None if single is None else Ratio.of(single, self.samples).to_json(),
            "sent_bytes": self.traffic.sent_bytes,
            "collectives": dict(self.traffic.calls),
            "sent": {"predicted": None if forecast.traffic is None else forecast.traffic.to_json(), "counted": self.traffic.to_json()},
            "held_bytes": [held.to_json() for held in self.held],
            "layers": [{"name": name, **parts.to_json()} for name, parts in forecast.layers.items()],
            "parity": None if self.parity is None else self.parity.to_json(),
            "losses": list(self.losses),
        }


@dataclass(frozen=True)
class ShardReport:
    """Everything `baechi train --sharding` found out. `executable` is what it costs that a strategy can be run; `single` the step that
    every process runs whole. `load_of_others` and `oversubscribed` are as for a Measurement. `in_turn`: the steps took turns, to be
    compared; in a training they do not."""

    model: str
    mesh: tuple[int, ...]
    machine: Machine
    executable: str
    single: StrategyRun
    runs: tuple[StrategyRun, ...]
    load_of_others: float | None = None
    oversubscribed: bool = False
    in_turn: bool = True
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def tau(self) -> float | None:
        """Kendall's tau of predicted and measured steps; None for fewer than two."""
        return kendall_tau([run.predicted_us for run in self.runs], [run.samples.median for run in self.runs])

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        machine, single = self.machine, self.single.samples if self.in_turn else None
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": SHARDING_REPORT,
            "model": self.model,
            "executor": "sharded",
            "num_devices": machine.devices,
            "mesh": list(self.mesh),
            "machine": {
                "tera_flops": machine.tera_flops,
                "gigabytes_per_second": machine.gigabytes_per_second,
                "latency_us": machine.latency_us,
            },
            "executable": self.executable,
            "single_step_us": self.single.samples.to_json(),
            "whole": self.single.to_json(single),
            "strategies": [run.to_json(single) for run in self.runs],
            "kendall_tau": self.tau,
            "load_of_others": self.load_of_others,
            "doubts": self.doubts(),
            "command": list(self.command),
            "versions": dict(self.versions),
        }

    def doubts(self) -> list[str]:
        """Why the steps are too noisy to compare, one reason each; empty where they are not."""
        found = Measurement({}, {}, self.load_of_others, self.oversubscribed).disturbances()
        return [*found, TOO_FEW] if self.in_turn and len(self.single.samples.us) < ENOUGH else found

    def lines(self) -> Iterator[str]:
        """For a person."""
        width = max(9, *(len(run.name) for run in self.runs))
        titles = f"{'predicted':>10}  {'measured':>10}  {'min to max':>24}  {'sent':>10}  messages  {'parity':<9}  what it is"
        yield f"{'strategy':<{width}}  {titles}"
        for run in self.runs:
            us = run.samples.us
            spread = f"{as_time(min(us))} to {as_time(max(us))}"
            parity = "-" if run.parity is None else f"{run.parity.max_rel_diff:.1e}"
            sent = as_size(run.traffic.sent_bytes)
            times = f"{as_time(run.predicted_us):>10}  {as_time(run.samples.median):>10}  {spread:>24}"
            yield f"{run.name:<{width}}  {times}  {sent:>10}  {run.traffic.count:>8}  {parity:<9}  {run.note}".rstrip()
        yield ""
        machine = self.machine
        link = f"{machine.gigabytes_per_second:.3g} GB/s and {as_time(machine.latency_us)} a message"
        mesh = " x ".join(map(str, self.mesh))
        yield f"processes     {machine.devices}, mesh {mesh}, each {machine.tera_flops:.3g} TFLOP/s, {link} (measured)"
        yield f"one process   {as_time(self.single.samples.median)} a step that is not split"
        yield f"executable    {self.executable}"
        if self.tau is not None:
            yield f"ranking       Kendall's tau of predicted and measured: {self.tau:+.2f}"
        if self.load_of_others is not None:
            yield f"others' load  {self.load_of_others:.1%} of the cores while measuring"
        if self.doubts():
            more = ", or with more --num_steps" if self.in_turn else ""
            yield f"inconclusive  {'; '.join(self.doubts())}: run again on a quiet machine{more}"
        for run in self.runs:
            if run.losses:
                yield f"losses        {run.name}: " + " ".join(f"{loss:.6g}" for loss in run.losses)
