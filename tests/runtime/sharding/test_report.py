"""Conclusions of a sharded run's report, from made-up values."""

import pytest

from baechi_runtime.measure.samples import Noise, Ratio, Samples
from baechi_runtime.report.report import StepParts, Strategy
from baechi_runtime.sharding.counts import Traffic
from baechi_runtime.sharding.forecast import Forecast
from baechi_runtime.sharding.report import WHOLE, ShardReport, sharded_of, strategy_of

TOO_FEW = "fewer than 6 steps were measured"


def report(*, in_turn: bool, load_of_others: float) -> ShardReport:
    """A report of one strategy, twice as fast as not split; two steps of either."""
    steps, none = Samples((20.0, 22.0)), Traffic()
    whole = strategy_of(Forecast(StepParts(calls_us=20.0)), steps, none, name=WHOLE)
    split = strategy_of(Forecast(StepParts(calls_us=10.0)), Samples((10.0, 11.0)), none, name="pase")
    noise = Noise(load_of_others, oversubscribed=False)
    return ShardReport(sharded_of(whole, [split], noise, in_turn=in_turn, model="rnnlm", num_devices=2, mesh=[2]))


def test_steps_in_turn_are_compared_and_too_few_are_a_doubt() -> None:
    found = report(in_turn=True, load_of_others=0.0)
    (strategy,) = found.to_json()["strategies"]
    assert strategy["ratio"]["median"] == 2
    assert found.to_json()["doubts"] == [TOO_FEW]
    assert next(found.lines()) == f"Inconclusive: {TOO_FEW}. Run it again on a quiet machine, or with more --num_steps."


def several(*gains: float, steps: int, noise: float = 0.0) -> ShardReport:
    """A report of as many strategies, taken in turn, whose gains vary by so much."""

    def strategy(name: str, gain: float) -> Strategy:
        us = tuple(100.0 / (gain + noise * (i - (steps - 1) / 2) / steps) for i in range(steps))
        return strategy_of(Forecast(StepParts(calls_us=10.0)), Samples(us), Traffic(), name=name)

    split = [strategy(f"s{i}", gain) for i, gain in enumerate(gains)]
    return ShardReport(sharded_of(strategy(WHOLE, 1.0), split, Noise(0.0, oversubscribed=False), in_turn=True, num_devices=2, mesh=[2]))


def test_the_best_of_several_strategies_pays_for_having_been_picked() -> None:
    one, four = several(1.3, steps=15, noise=0.1), several(1.2, 1.3, 1.1, 1.0, steps=15, noise=0.1)
    alone, picked = one.sharded.strategies[0], four.sharded.strategies[1]
    assert (one.sharded.error, four.sharded.error) == (0.05, 0.05 / 4)
    assert alone.ratio is not None
    assert picked.ratio is not None
    assert picked.ratio.low < alone.ratio.low
    assert picked.ratio == Ratio.of(four.sharded.single_step_us, picked.measured_step_us, 0.05 / 4)
    assert next(four.lines()).startswith("1.30 times as fast as the step not split, with s1. Splitting pays (98.75% interval ")
    assert several(1.3, steps=7).sharded.doubts == []
    assert several(1.2, 1.3, 1.1, 1.0, steps=7).sharded.doubts == ["fewer than 8 steps were measured"]


def test_a_wide_interval_of_the_best_is_a_doubt() -> None:
    (doubt,) = several(1.3, 1.0, steps=15, noise=1.0).sharded.doubts
    assert doubt.startswith("the ratio's interval is ")


def test_the_verdict_comes_before_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report(in_turn=False, load_of_others=0.0).print()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "pase has the shortest step; how it compares with the step not split is not known."
    assert printed[2].split() == ["strategy", "predicted", "measured", "min", "to", "max", "sent", "messages", "parity", "what", "it", "is"]


def test_a_training_is_not_compared_and_more_steps_would_not_help_it() -> None:
    """No flag says how often the step that is not split is timed beforehand."""
    found = report(in_turn=False, load_of_others=0.5).to_json()
    assert [strategy["ratio"] for strategy in (found["whole"], *found["strategies"])] == [None, None]
    line = next(report(in_turn=False, load_of_others=0.5).lines())
    assert line == "Inconclusive: other processes took 50% of the cores (more than 10%). Run it again on a quiet machine."
    assert not any("Inconclusive" in line for line in report(in_turn=False, load_of_others=0.0).lines())
