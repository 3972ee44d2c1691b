"""ShardReport: predicted and measured times of steps split in several ways, and what they sent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from baechi_ext.shard.machine import Machine
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.samples import ENOUGH, TOO_FEW, Noise, Ratio, Samples
from baechi_runtime.report.findings import Findings, labelled, load_text
from baechi_runtime.report.report import Held, Layer, MeasuredMachine, ParityCheck, Sent, SentBy, Sharded, StepParts, Strategy
from baechi_runtime.report.tables import as_range, as_size, as_time, show, table_of
from baechi_runtime.report.verdict import line_of, sharded_verdict
from baechi_runtime.sharding.counts import Traffic
from baechi_runtime.sharding.forecast import Forecast

if TYPE_CHECKING:
    from rich.table import Table

WHOLE = "not split"
"""The name of the step that every process runs whole."""


@dataclass(frozen=True)
class StrategyRun:
    """A strategy that was run, and what each process sends and holds in a step. `parity` is None for torch's own data parallelism, whose
    dropout differs; `plan` is the file of its shard plan, where there is one."""

    name: str
    note: str
    forecast: Forecast
    samples: Samples
    traffic: Traffic
    held: tuple[Held, ...]
    parity: Parity | None = None
    losses: tuple[float, ...] = ()
    plan: str | None = None

    @property
    def predicted_us(self) -> float:
        return self.forecast.step_us

    def reported(self, single: Samples | None) -> Strategy:
        """`single`: the steps that are not split, taken in turn with these; None where they were not."""
        forecast = self.forecast
        return Strategy(
            name=self.name,
            note=self.note,
            plan=self.plan,
            predicted_step_us=self.predicted_us,
            predicted_parts_us=StepParts(**forecast.to_json()),
            measured_step_us=self.samples,
            ratio=None if single is None else Ratio.of(single, self.samples),
            sent_bytes=self.traffic.sent_bytes,
            collectives=dict(self.traffic.calls),
            sent=SentBy(predicted=None if forecast.traffic is None else _sent(forecast.traffic), counted=_sent(self.traffic)),
            held_bytes=list(self.held),
            layers=[Layer(name=name, **parts.to_json()) for name, parts in forecast.layers.items()],
            parity=None if self.parity is None else ParityCheck.of(self.parity),
            losses=list(self.losses),
        )


def _sent(traffic: Traffic) -> dict[str, Sent]:
    return {kind: Sent(**sent) for kind, sent in traffic.to_json().items()}


@dataclass(frozen=True)
class ShardReport(Findings):
    """Everything `baechi train --sharding` found out, or `auto` that runs an engine of torch's own. `machine` are the processes as a
    search saw them, None where there was none, and `executable` the cost of keeping to what can be run; `single` is the step that every
    process runs whole. `load_of_others` and `oversubscribed` are as for Noise. `in_turn`: the steps took turns, to be
    compared; in a training they do not."""

    model: str
    mesh: tuple[int, ...]
    single: StrategyRun
    runs: tuple[StrategyRun, ...]
    machine: Machine | None = None
    executable: str = ""
    notes: tuple[str, ...] = ()
    load_of_others: float | None = None
    oversubscribed: bool = False
    in_turn: bool = True

    @property
    def tau(self) -> float | None:
        """Kendall's tau of predicted and measured steps; None for fewer than two."""
        return kendall_tau([run.predicted_us for run in self.runs], [run.samples.median for run in self.runs])

    def report(self) -> Sharded:
        machine, single = self.machine, self.single.samples if self.in_turn else None
        seen = None if machine is None else (machine.tera_flops, machine.gigabytes_per_second, machine.latency_us)
        return Sharded(
            model=self.model,
            executor="sharded",
            num_devices=prod(self.mesh),
            mesh=list(self.mesh),
            machine=seen and MeasuredMachine(*seen),
            executable=self.executable,
            single_step_us=self.single.samples,
            whole=self.single.reported(single),
            strategies=[run.reported(single) for run in self.runs],
            kendall_tau=self.tau,
            load_of_others=self.load_of_others,
            doubts=self.doubts(),
            notes=list(self.notes),
        )

    def doubts(self) -> list[str]:
        """Why the steps are too noisy to compare, one reason each; empty where they are not."""
        found = Noise(self.load_of_others, self.oversubscribed).disturbances()
        return [*found, TOO_FEW] if self.in_turn and len(self.single.samples.us) < ENOUGH else found

    def print(self) -> None:
        """Prints the verdict, the table of strategies and the facts behind it on stdout."""
        verdict, *facts = self.lines()
        show(verdict, "", self._table(), "", *facts)

    def _table(self) -> "Table":
        def row(run: StrategyRun) -> tuple[str, ...]:
            parity = "-" if run.parity is None else f"{run.parity.max_rel_diff:.1e}"
            times = as_time(run.predicted_us), as_time(run.samples.median), as_range(run.samples.us)
            return run.name, *times, as_size(run.traffic.sent_bytes), str(run.traffic.calls.total()), parity, run.note

        names = ("strategy", "predicted", "measured", "min to max", "sent", "messages", "parity", "what it is")
        return table_of(names, map(row, self.runs), words=("what it is",))

    def lines(self) -> Iterator[str]:
        """The verdict, and the facts behind it."""
        yield line_of(sharded_verdict(self.report().strategies, self.doubts()))
        machine, processes = self.machine, f"{prod(self.mesh)}, mesh {' x '.join(map(str, self.mesh))}"
        if machine is not None:
            link = f"{machine.gigabytes_per_second:.3g} GB/s and {as_time(machine.latency_us)} a message"
            processes += f", each {machine.tera_flops:.3g} TFLOP/s, {link} (measured)"
        yield labelled("processes", processes)
        yield labelled("one process", f"{as_time(self.single.samples.median)} a step that is not split")
        if self.executable:
            yield labelled("executable", self.executable)
        if self.tau is not None:
            yield labelled("ranking", f"Kendall's tau of predicted and measured: {self.tau:+.2f}")
        if self.load_of_others is not None:
            yield labelled("CPU load", load_text(self.load_of_others))
        yield from (labelled("note", note) for note in self.notes)
        for run in self.runs:
            if run.losses:
                yield labelled("losses", f"{run.name}: " + " ".join(f"{loss:.6g}" for loss in run.losses))


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders: 1 the same, -1 the reverse; None where one of them is no order (fewer than two, or all equal)."""
    p, m = (np.sign(np.subtract.outer(values, values)) for values in (predicted, measured))  # each pair in both directions
    scale = np.abs(p).sum() * np.abs(m).sum()
    return float((p * m).sum() / scale**0.5) if scale else None
