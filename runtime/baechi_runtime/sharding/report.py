"""ShardReport: predicted and measured times of steps split in several ways, and what they sent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from baechi_runtime.measure.samples import ERROR, Noise, Ratio, Samples, too_few, too_wide
from baechi_runtime.report.findings import Findings, labelled
from baechi_runtime.report.report import SentBy, Sharded, Strategy
from baechi_runtime.report.sharded_summary import facts_of
from baechi_runtime.report.tables import as_range, as_size, as_time, show, table_of
from baechi_runtime.report.verdict import fastest, line_of, sharded_verdict
from baechi_runtime.sharding.counts import Traffic
from baechi_runtime.sharding.forecast import Forecast

if TYPE_CHECKING:
    from rich.table import Table

WHOLE = "not split"
"""The name of the step that every process runs whole."""


def strategy_of(forecast: Forecast, samples: Samples, traffic: Traffic, **known: Any) -> Strategy:
    """The report of a strategy that was run; `traffic` is what each process sends in a step. `known`: its other fields."""
    return Strategy(
        **known,
        predicted_step_us=forecast.step_us,
        predicted_parts_us=forecast.parts,
        measured_step_us=samples,
        sent_bytes=traffic.sent_bytes,
        collectives=dict(traffic.calls),
        sent=SentBy(predicted=None if forecast.traffic is None else forecast.traffic.by_kind(), counted=traffic.by_kind()),
        layers=list(forecast.layers),
    )


def sharded_of(whole: Strategy, strategies: Sequence[Strategy], noise: Noise, *, in_turn: bool, **known: Any) -> Sharded:
    """The report of the step that every process runs whole, and of those that are split, with why they are too noisy to compare; they are
    compared where they were taken in turn, with intervals that hold together (Bonferroni), as the best is picked by the same samples.
    `known`: its other fields."""
    single, error = whole.measured_step_us, ERROR / max(len(strategies), 1)
    doubts = noise.disturbances()
    if in_turn and single is not None:
        whole, *strategies = (_compared(s, single, error) for s in (whole, *strategies))
        best = fastest(strategies)
        doubts += too_wide(None if best is None else best.ratio) + too_few(len(single.us), error)
    us = [(s.predicted_step_us or 0.0, s.measured_step_us.median) for s in strategies if s.measured_step_us is not None]
    return Sharded(
        **known,
        executor="sharded",
        single_step_us=single,
        whole=whole,
        strategies=list(strategies),
        interval_error=error,
        kendall_tau=kendall_tau([predicted for predicted, _ in us], [measured for _, measured in us]),
        load_of_others=noise.load_of_others,
        doubts=doubts,
    )


def _compared(strategy: Strategy, single: Samples, error: float) -> Strategy:
    steps = strategy.measured_step_us
    return structs.replace(strategy, ratio=None if steps is None else Ratio.of(single, steps, error))


@dataclass(frozen=True)
class ShardReport(Findings):
    """Everything `baechi train --sharding` found out, or `auto` that runs an engine of torch's own."""

    sharded: Sharded

    def report(self) -> Sharded:
        return self.sharded

    def print(self) -> None:
        """Prints the verdict, the table of strategies and the facts behind it on stdout."""
        verdict, *facts = self.lines()
        show(verdict, "", self._table(), "", *facts)

    def _table(self) -> "Table":
        def row(s: Strategy, steps: Samples) -> tuple[str, ...]:
            parity = "-" if s.parity is None else f"{inf if s.parity.max_rel_diff is None else s.parity.max_rel_diff:.1e}"
            times = as_time(s.predicted_step_us or 0.0), as_time(steps.median), as_range(steps.us)
            return s.name, *times, as_size(s.sent_bytes), str(sum(s.collectives.values())), parity, s.note

        names = ("strategy", "predicted", "measured", "min to max", "sent", "messages", "parity", "what it is")
        rows = [row(s, s.measured_step_us) for s in self.sharded.strategies if s.measured_step_us is not None]
        return table_of(names, rows, words=("what it is",))

    def lines(self) -> Iterator[str]:
        """The verdict, and the facts behind it."""
        report = self.sharded
        yield line_of(sharded_verdict(report.strategies, report.doubts or (), error=report.error))
        yield from (labelled(*fact) for fact in facts_of(report))
        yield from (labelled("note", note) for note in report.notes)
        for s in report.strategies:
            if s.losses:
                yield labelled("losses", f"{s.name}: " + " ".join(f"{loss:.6g}" for loss in s.losses))


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders: 1 the same, -1 the reverse; None where one of them is no order (fewer than two, or all equal)."""
    p, m = (np.sign(np.subtract.outer(values, values)) for values in (predicted, measured))  # each pair in both directions
    scale = np.abs(p).sum() * np.abs(m).sum()
    return float((p * m).sum() / scale**0.5) if scale else None
