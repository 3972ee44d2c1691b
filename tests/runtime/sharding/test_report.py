"""Conclusions of a sharded run's report, from made-up values."""

import pytest

from baechi_runtime.measure.samples import TOO_FEW, Noise, Samples
from baechi_runtime.report.report import StepParts
from baechi_runtime.sharding.counts import Traffic
from baechi_runtime.sharding.forecast import Forecast
from baechi_runtime.sharding.report import WHOLE, ShardReport, sharded_of, strategy_of


def report(*, in_turn: bool, load_of_others: float) -> ShardReport:
    """A report of one strategy, twice as fast as not split; two steps of either."""
    steps, none = Samples((20.0, 22.0)), Traffic()
    single = steps if in_turn else None
    whole = strategy_of(Forecast(StepParts(calls_us=20.0)), steps, single, none, name=WHOLE)
    split = strategy_of(Forecast(StepParts(calls_us=10.0)), Samples((10.0, 11.0)), single, none, name="pase")
    return ShardReport(sharded_of(whole, [split], Noise(load_of_others, oversubscribed=False), model="rnnlm", num_devices=2, mesh=[2]))


def test_steps_in_turn_are_compared_and_too_few_are_a_doubt() -> None:
    found = report(in_turn=True, load_of_others=0.0)
    (strategy,) = found.to_json()["strategies"]
    assert strategy["ratio"]["median"] == 2
    assert found.to_json()["doubts"] == [TOO_FEW]
    assert next(found.lines()) == f"Inconclusive: {TOO_FEW}. Run it again on a quiet machine, or with more --num_steps."


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
