"""Reports of placed calls and steps: their line, what they say of a prediction, and what all of them have in JSON."""

import json
from dataclasses import replace

import pytest

from baechi_ext.ir import Cluster, Link
from baechi_ext.place.registry import place
from baechi_ext.simulate import simulate
from baechi_runtime.measure.samples import Measurement, Noise, Samples, samples_by_name
from baechi_runtime.report.call_report import FORWARD_ALONE, OTHER_SHAPES, CallReport
from baechi_runtime.report.findings import Findings, prediction_error
from baechi_runtime.report.report import ParityCheck, Verified
from baechi_runtime.report.step_report import Progressed, RunReport, StepReport
from tests.build import graph_of

GRAPH = graph_of({"a": 100.0, "b": 100.0})
RESULT = place("m_etf", GRAPH, Cluster.uniform(2, link=Link(us_per_byte=0.0, latency_us=1.0)))
SINGLE = simulate(GRAPH, Cluster.uniform(1), [0, 0], None)
PARITY = ParityCheck(passed=True, max_abs_diff=0.0, max_rel_diff=0.0, compared=3, tolerance=1e-6)
BREAK = "model.py:7"


def calls(**changes: object) -> CallReport:
    about = {
        "kind": "module",
        "name": "Net",
        "method": "m_etf",
        "result": RESULT,
        "single": SINGLE,
        "samples": samples_by_name(eager=[300.0] * 7, placed=[150.0] * 8),
        "noise": Noise(0.0, oversubscribed=False),
        "verified": Verified(2, 5, 4, 0.0),
        "placed_steps": 5,
        "shapes": 1,
        "unplaced_calls": {},
        "refusal": "",
        "fragments": 2,
        "setup_seconds": 1.5,
        "graph_breaks": (BREAK,),
    }
    return CallReport(**{**about, **changes})


def step(measurement: Measurement) -> StepReport:
    about = {"model": "toy", "executor": "thread", "parity": PARITY, "peak_bytes": (), "peaks_measured_by": "accounting", "probe": None}
    return StepReport(result=RESULT, single=SINGLE, measurement=measurement, **about)


IN_TURN = Measurement(0.0, False, {name: Samples((us,) * 8) for name, us in (("eager", 220.0), ("single", 210.0), ("placed", 125.0))}, {})
RUN = RunReport(
    model="toy", executor="thread", result=RESULT, single=SINGLE, parity=PARITY, progressed=Progressed((1.0, 0.5), None, (9.0, 11.0), None),
    checkpoint=None, notes=("a note",),
)  # fmt: skip


def test_the_line_of_calls_that_run_placed() -> None:
    assert calls().line() == (
        "Net: 2.00 times as fast: steps of 150 us placed, 300 us as it is; m_etf, 1 + 1 ops on device:0, device:1; 5 steps placed, "
        "verified 2 of 5, last at call 4 (largest relative difference 0); predicted 200 us on one device, 100 us placed; "
        f"set-up took 1.5 s, placing saves 150 us a step: paid back at step 10001; 1 graph break, the first: {BREAK}"
    )


def test_what_placing_saves_is_said_where_it_is_sure() -> None:
    """By blocks of both, as the speed-up is: the medians alone are of a fast half and a slow one."""
    plain, placed = [300.0, 300.0, 600.0, 600.0] * 4, [150.0, 150.0, 300.0, 300.0] * 4
    line = calls(samples=samples_by_name(eager=plain, placed=placed[:14]), per_block=2).line()
    assert line.startswith("Net: 2.00 times as fast: steps of 150 us placed, 450 us as it is; ")
    assert "150 us placed, 300 us as it is on one core; " in calls(on_one_core=True).line()
    assert "placing saves 150 us a step" in line
    close = [us * factor for us, factor in zip([300.0] * 16, [0.95, 0.95, 1.08, 1.08] * 4, strict=True)]
    for eager, said in ((close, "; placing does not clearly save time"), ([280.0] * 16, "; placing saves nothing")):
        line = calls(samples=samples_by_name(eager=eager, placed=[300.0] * 16), per_block=2).line()
        assert f"set-up took 1.5 s{said}; 1 graph break" in line
        assert "paid back" not in line


FEW = {"samples": samples_by_name(eager=[300.0], placed=[150.0] * 8)}


@pytest.mark.parametrize(
    ("changes", "doubts"),
    [
        ({}, []),
        (FEW, ["fewer than 7 plain steps were timed (1); let the script take more steps"]),
        ({"noise": Noise(0.5, oversubscribed=False)}, ["other processes took 50% of the cores (more than 10%)"]),
        ({"noise": Noise(None, oversubscribed=True)}, ["there are more CPU devices than cores, so devices take turns"]),
        ({"samples": samples_by_name(placed=[150.0])}, []),
    ],
)
def test_a_gain_that_is_in_doubt_says_so_before_its_number_and_pays_nothing_back(changes: dict[str, object], doubts: list[str]) -> None:
    report = calls(**changes)
    said = f"Net: inconclusive: {'; '.join(doubts)}; 2.00 times as fast: " if doubts else "set-up took 1.5 s"
    assert said in str(report)
    assert ("inconclusive" in str(report), "paid back" in str(report)) == (bool(doubts), not doubts and len(report.samples) == 2)
    assert report.to_json()["doubts"] == report.doubts == doubts


def test_steps_that_took_no_turns_are_in_doubt_for_that_and_more_of_them_would_not_help() -> None:
    why = "plain steps were not timed, as --keep_placed takes no turns, so no speed-up is known"
    alone = {us: calls(samples=samples_by_name(placed=[150.0] * us), per_block=2).measurement().doubts() for us in (2, 8)}
    assert alone == {2: [why, "fewer than 7 placed steps were timed (2)"], 8: [why]}
    begun = calls(samples=samples_by_name(placed=[150.0]), per_block=2).measurement().doubts()
    assert begun[0] == "fewer than 7 plain steps were timed (0); let the script take more steps"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"refusal": "it was unplaced"}, "placed for 5 steps, then as it is; it was unplaced; verified 2 of 5, "),
        ({"refusal": "it differs", "placed_steps": 0}, "not placed; it differs; predicted 200 us on one device, 100 us placed; set-up "),
        ({"result": None, "single": None, "unplaced_calls": {"no gradients": 3}}, "not placed; 3 calls ran as they are: no gradients; "),
        (
            {"result": None, "unplaced_calls": {f"it was so: {FORWARD_ALONE}": 36, "the first of its kind": 6}, "recompiles": ("n == 4",)},
            "not placed; 6 calls ran as they are: the first of its kind (last for n == 4); ",
        ),
        ({"unplaced_calls": {OTHER_SHAPES: 2}}, "2.00 times as fast: steps of "),
    ],
)
def test_graph_breaks_are_in_every_line(changes: dict[str, object], said: str) -> None:
    line = calls(**changes).line()
    assert line.startswith(f"Net: {said}")
    assert line.endswith(f"1 graph break, the first: {BREAK}")
    assert ("2 steps of other shapes ran unplaced" in line) == (OTHER_SHAPES in calls(**changes).unplaced_calls)


def test_how_far_a_prediction_is_off_and_on_which_side() -> None:
    assert [prediction_error(us, 1000.0) for us in (966.0, 1034.0)] == ["prediction 3.4% too low", "prediction 3.4% too high"]
    speedup = list(step(IN_TURN).lines())[1]
    assert speedup == "speed-up       1.68 (1.68 to 1.68) over one device, predicted 2.00; prediction 20.0% too low"


UNPLACED = calls(kind="step", result=None, single=None, samples={})


@pytest.mark.parametrize("report", [calls(), UNPLACED, step(IN_TURN), RUN], ids=["module", "unplaced", "step", "training"])
def test_every_report_is_json_with_the_schema_and_the_same_fields_of_a_plan(report: Findings) -> None:
    said = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (said["schema_version"], said["method"]) == (1, "m_etf")
    assert {"predicted_step_us", "measured_step_us", "transfers", "bytes_moved", "notes"} <= set(said)


@pytest.mark.parametrize(("compiled_us", "said"), [(100.0, "0.80"), (150.0, "1.20")])
def test_a_plan_that_torch_compile_beats_says_so(compiled_us: float, said: str) -> None:
    measured = replace(IN_TURN, samples={**IN_TURN.samples, "torch.compile": Samples((compiled_us,) * 8)})
    assert next(iter(step(measured).lines())).startswith(f"{said} times as fast as torch.compile. ")


def test_the_verdict_comes_before_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Against plain eager, unless our program on one device is as fast as the split."""
    step(IN_TURN).print()
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["1.76 times as fast as plain eager. Splitting pays (95% interval 1.76 to 1.76).", ""]
    assert printed[2].startswith("step ") and "speed-up over eager" in printed[2]
    replace(step(IN_TURN), unplaced="tf.function, one thread").print()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1.76 times as fast as plain tf.function. Splitting pays (95% interval 1.76 to 1.76)."
    assert "speed-up over tf.function" in printed[2]
    alone = replace(IN_TURN, samples={**IN_TURN.samples, "single": Samples((124.0,) * 8)})
    said = "0.99 times as fast as our program on one device. Splitting does not pay here (95% interval 0.99 to 0.99)."
    assert next(iter(step(alone).lines())) == said
    assert next(iter(step(replace(IN_TURN, load_of_others=0.5)).lines())) == (
        "Inconclusive: other processes took 50% of the cores (more than 10%). Run it again on a quiet machine, or with more --num_steps."
    )


@pytest.mark.parametrize(("steps", "interval"), [(5, "range"), (6, "95% interval")])
def test_few_steps_have_a_range_and_no_interval(steps: int, interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    step(replace(IN_TURN, samples={name: Samples(samples.us[:steps]) for name, samples in IN_TURN.samples.items()})).print()
    assert capsys.readouterr().out.splitlines()[2].split("eager")[1].strip() == interval


@pytest.mark.parametrize(("noisy", "doubted"), [("eager", True), ("single", False)])
def test_the_ratio_that_the_verdict_is_on_must_not_be_too_wide(noisy: str, doubted: bool) -> None:
    """The noise of a step that the verdict says nothing of does not count."""
    found = step(replace(IN_TURN, samples={**IN_TURN.samples, noisy: Samples((200.0, 300.0) * 4)})).report()
    assert found.doubts == ["the ratio's interval is 40% wide (more than 15%)"] * doubted
    assert found.conclusive == (not doubted)
    compiled = step(replace(IN_TURN, samples={**IN_TURN.samples, "torch.compile": Samples((140.0, 220.0) * 4)})).report()
    assert compiled.doubts == ["the ratio's interval is 44% wide (more than 15%)"]


def test_steps_of_a_script_are_compared_apart() -> None:
    """Unpaired, and with what is missing as null; there is no step of one device's program."""
    few = calls(samples=samples_by_name(placed=[150.0] * 3))
    said = step(Measurement(0.0, False, few.samples, {}, per_block=0)).to_json()
    assert (said["measured_step_us"]["eager"], said["speedup_over_eager"], said["conclusive"]) == (None, None, False)
    assert (said["unplaced"], "speedup" in said) == ("eager, one device", False)
    assert [doubt[:27] for doubt in said["doubts"]] == ["fewer than 7 plain steps we", "fewer than 7 placed steps w"]
    enough = samples_by_name(eager=[300.0] * 7, placed=[150.0] * 9)
    said = step(Measurement(0.0, False, enough, {}, per_block=0)).to_json()
    assert (said["speedup_over_eager"]["median"], said["conclusive"]) == (2.0, True)
    blocks = samples_by_name(eager=[300.0, 310.0] * 3 + [600.0, 620.0] * 3, placed=[150.0, 155.0] * 3 + [300.0, 310.0] * 3)
    conclusive = {n: calls(samples=blocks, per_block=n).doubts == [] for n in (0, 2)}
    assert conclusive == {0: False, 2: True}
