"""ShardReport: what steps split in several ways were predicted to take, took, and sent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baechi_ext.ir.files import SCHEMA_VERSION
from baechi_ext.shard.machine import Machine
from runtime.parity_result import Parity
from runtime.samples import Samples
from runtime.sharding.forecast import Forecast
from runtime.sharding.ranking import kendall_tau
from runtime.sharding.traffic import Traffic
from runtime.tables import as_size, as_time


@dataclass(frozen=True)
class StrategyRun:
    """A strategy that was run. `parity` is None for torch's own data parallelism, whose dropout differs."""

    name: str
    note: str
    forecast: Forecast
    samples: Samples
    traffic: Traffic
    parity: Parity | None
    losses: tuple[float, ...] = ()

    @property
    def predicted_us(self) -> float:
        return self.forecast.step_us

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "note": self.note,
            "predicted_step_us": self.predicted_us,
            "predicted_parts_us": self.forecast.to_json(),
            "measured_step_us": self.samples.to_json(),
            "sent_bytes": self.traffic.sent_bytes,
            "collectives": dict(self.traffic.calls),
            "parity": None if self.parity is None else self.parity.to_json(),
            "losses": list(self.losses),
        }


@dataclass(frozen=True)
class ShardReport:
    """Everything `baechi train --sharding` found out. `executable` is what it costs that a strategy can be run; `single` the step that
    every process runs whole."""

    model: str
    mesh: tuple[int, ...]
    machine: Machine
    executable: str
    single: Samples
    runs: tuple[StrategyRun, ...]
    command: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def tau(self) -> float | None:
        """Kendall's tau of predicted and measured steps; None for fewer than two."""
        return kendall_tau([run.predicted_us for run in self.runs], [run.samples.median for run in self.runs])

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        machine = self.machine
        return {
            "schema_version": SCHEMA_VERSION,
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
            "single_step_us": self.single.to_json(),
            "strategies": [run.to_json() for run in self.runs],
            "kendall_tau": self.tau,
            "command": list(self.command),
            "versions": dict(self.versions),
        }

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
        yield f"one process   {as_time(self.single.median)} a step that is not split"
        yield f"executable    {self.executable}"
        if self.tau is not None:
            yield f"ranking       Kendall's tau of predicted and measured: {self.tau:+.2f}"
        for run in self.runs:
            if run.losses:
                yield f"losses        {run.name}: " + " ".join(f"{loss:.6g}" for loss in run.losses)
