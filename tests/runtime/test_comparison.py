"""Conclusions from a comparison's samples: intervals that hold together, what is told apart, and the advice in words."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baechi_ext.cost import OpProfile, Profile
from baechi_ext.ir import Cluster, Link, OpGraph, Plan
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.registry import place
from baechi_ext.simulate import simulate
from baechi_runtime.drivers.backend import Captured
from baechi_runtime.drivers.comparing import keep
from baechi_runtime.drivers.comparison import Comparison, Contender
from baechi_runtime.drivers.ranking import Engine
from baechi_runtime.measure.samples import Measurement, Ratio, Samples, enough_samples
from tests.build import graph_of

GRAPH = graph_of({"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0})
CLUSTER = Cluster.uniform(2, link=Link(us_per_byte=0.0, latency_us=1.0))
DIGESTS = dict(zip(GRAPH.index, GRAPH.op_digests, strict=True))
PROFILE = Profile(GRAPH.fingerprint, DIGESTS, "thread_cpu", 0, {op.id: OpProfile((op.compute_us,)) for op in GRAPH.ops})
STEP = Captured(GRAPH, GRAPH, PROFILE)
STEPS = 15


def around(us: float, *, noise: float = 0.01, seed: int = 0, steps: int = STEPS) -> tuple[float, ...]:
    return tuple((us * np.exp(noise * np.random.default_rng(seed).standard_normal(steps))).tolist())


ONE = around(400)


def comparison(samples: dict[str, tuple[float, ...]], refused: dict[str, str] | None = None, **changes: object) -> Comparison:
    """A comparison of methods that took these times. `whole` is a method that gave a plan without a split."""
    found = []
    for method in samples:
        if method != "eager":
            found.append(Contender(method, place("single" if method in ("single", "whole") else "m_etf", GRAPH, CLUSTER), step=STEP))
    found += [Contender(method, refusal=why) for method, why in (refused or {}).items()]
    measurement = Measurement(0.01, False, {name: Samples(us) for name, us in samples.items()}, {})
    single = simulate(GRAPH, Cluster.uniform(1), [0] * 4, None)
    made = Comparison("toy", "thread", tuple(found), measurement, single, "accounting", ())
    return replace(made, **changes)


def test_intervals_of_all_pairs_hold_together() -> None:
    two = comparison({"single": around(400), "m_etf": around(200, seed=1)})
    four = comparison({"single": around(400), **{m: around(200, seed=i + 1) for i, m in enumerate(("m_etf", "m_sct", "auto"))}})
    assert (two.error, four.error) == (0.05, 0.05 / 6)
    plain = Ratio.of(two.samples("single"), two.samples("m_etf"))
    assert two.gain("m_etf") == plain
    wide = four.gain("m_etf")
    assert wide.low < plain.low
    assert wide.high > plain.high


def test_differences_by_chance_are_rarely_seen_however_many_methods_there_are() -> None:
    """Eight variants that are all alike: in at most 5 of 100 comparisons does any pair seem to differ; here in at most 10 of 100."""
    wrong = 0
    for seed in range(100):
        alike = {name: around(100, noise=0.2, seed=1000 * seed + i) for i, name in enumerate(("single", *"abcdefg"))}
        found = comparison({"single": alike["single"]}, measurement=Measurement(0.0, False, {k: Samples(v) for k, v in alike.items()}, {}))
        object.__setattr__(found, "contenders", tuple(Contender(name) for name in alike))
        wrong += any(found.differ(x, y) for x in alike for y in alike if x < y)
    assert wrong <= 10


@pytest.mark.parametrize(("error", "least"), [(0.05, 6), (0.05 / 3, 7), (0.05 / 28, 11)])
def test_how_many_samples_are_enough(error: float, least: int) -> None:
    assert enough_samples(error) == least
    assert 2 * 0.5**least <= error < 2 * 0.5 ** (least - 1)


def test_a_faster_split_is_recommended_with_its_interval_and_its_equals() -> None:
    found = comparison({"single": around(400), "m_topo": around(380, seed=1), "m_etf": around(250, seed=2), "auto": around(250.5, seed=3)})
    assert found.recommended in ("m_etf", "auto")
    other = {"m_etf": "auto", "auto": "m_etf"}[found.recommended]
    gain = found.gain(found.recommended)
    assert found.recommendation() == (
        f"Split, with {found.recommended} ({other} can't be told from it): its step is {gain} times as fast as one device's."
    )
    assert found.beside("m_topo", "single") == "faster"
    assert found.beside("m_topo", found.best) == "slower"
    assert found.beside(other, found.best) == "can't tell"


def test_pairs_tell_who_is_faster_whatever_the_medians_are() -> None:
    """A machine that is slower for half of the time, and three rounds in which it was not so for one of them."""
    one = (10.0,) * 9 + (20.0,) * 11
    split = tuple(10.0 if i in (9, 10, 11) else 1.02 * us for i, us in enumerate(one))
    found = comparison({"single": one, "m_etf": split})
    assert found.median("m_etf") < found.median("single")
    assert found.gain("m_etf").high < 1
    assert (found.beats("single", "m_etf"), found.beats("m_etf", "single"), found.differ("m_etf", "single")) == (True, False, True)
    assert (found.beside("m_etf", "single"), found.recommended) == ("slower", "single")
    assert found.recommendation().startswith("Don't split: even the best of the splits, m_etf, is slower, 0.98 (")


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ({"single": ONE, "m_etf": around(420, seed=1)}, "Don't split: even the best of the splits, m_etf, is slower, 0.9"),
        ({"single": ONE, "m_etf": around(399, seed=1)}, "Don't split: no method is clearly faster than one device; the best, m_etf, is 1"),
        ({"single": around(400, noise=0.3), "m_etf": around(390, noise=0.3, seed=1)}, "Don't split until more steps (--num_steps) "),
        ({"single": ONE, "whole": around(300, seed=1)}, "Don't split: no method gave a plan with more than one device"),
        ({"single": ONE[:3], "m_etf": around(100, steps=3)}, "Don't split on so few steps: the quickest of the splits, m_etf, was 4.0"),
        ({"m_etf": ONE, "m_sct": around(300)}, "Split, with m_sct: one device cannot run the step (too big)"),
        ({}, "Nothing to choose from: no method's step could be measured."),
    ],
)
def test_the_words_follow_from_the_intervals(samples: dict[str, tuple[float, ...]], words: str) -> None:
    refused = {} if "single" in samples else {"single": "too big"}
    found = comparison({"eager": around(500), **samples}, refused)
    assert found.recommendation().startswith(words)
    assert found.recommendation().count(". ") == 0  # one sentence
    assert found.recommended == ("m_sct" if "m_sct" in samples else "single" if samples else None)


@pytest.mark.parametrize(("eager_us", "said"), [(200, True), (300, False), (400, False)])
def test_where_one_device_is_refused_a_faster_unplaced_step_is_told(eager_us: float, said: bool) -> None:
    found = comparison({"eager": around(eager_us, seed=3), "m_sct": around(300)}, {"single": "too big"})
    times = found.ratio("m_sct", "eager")
    yet = f"; yet the step unplaced, which no limit of a device binds, is {times} times as fast as that"
    assert found.recommendation() == f"Split, with m_sct: one device cannot run the step (too big){yet if said else ''}."


def test_a_split_that_the_unplaced_step_beats_is_not_recommended() -> None:
    """Though it beats our own program on one device."""
    found = comparison({"eager": around(300, seed=2), "single": ONE, "m_etf": around(320, seed=1)})
    assert found.error == 0.05 / 3
    assert found.beside("m_etf", "single") == "faster"
    assert found.recommended == "single"
    over = Ratio.of(found.samples("eager"), found.samples("m_etf"), 0.05 / 3)
    told = f"m_etf is {found.gain('m_etf')} times as fast as our program on one device, but {over} times as fast as the step unplaced."
    assert found.recommendation() == f"Don't split: {told}"
    assert found.report().unplaced.ratio == found.gain("eager")
    alike = comparison({"eager": around(300, seed=2), "single": ONE, "m_etf": around(299.5, seed=1)})
    assert alike.recommended == "single"
    over = Ratio.of(alike.samples("eager"), alike.samples("m_etf"), 0.05 / 3)
    unclear = f"on one device, but not clearly faster than the step unplaced, {over} times as fast"
    assert alike.recommendation().endswith(f"{unclear}.")
    busy = replace(alike, measurement=replace(alike.measurement, load_of_others=0.5))
    assert busy.recommendation().endswith(f"{unclear}; besides, {busy.doubts()[0]}.")


def test_a_split_that_torch_compile_beats_is_not_recommended() -> None:
    samples = {"torch.compile": around(200, seed=3), "eager": around(500, seed=2), "single": ONE, "m_etf": around(250, seed=1)}
    found = comparison(samples)
    compiled = Contender("torch.compile", step=STEP, notes=["torch.compile took 9 s"])
    found = replace(found, contenders=(compiled, *found.contenders[1:]))
    assert (found.recommended, found.planned, found.best) == ("single", "single", "torch.compile")
    over = Ratio.of(found.samples("torch.compile"), found.samples("m_etf"), found.error)
    assert found.recommendation().endswith(f"on one device, but {over} times as fast as one device under torch.compile.")
    row = found.to_json()["methods"][0]
    assert (row["method"], row["plan"], row["note"]) == ("torch.compile", None, "torch.compile took 9 s")
    unsplit = comparison({"eager": around(500, seed=2), "single": ONE, "whole": around(390, seed=1)})
    taken = {**unsplit.measurement.samples, "torch.compile": found.samples("torch.compile")}
    unsplit = replace(unsplit, contenders=(compiled, *unsplit.contenders), measurement=replace(unsplit.measurement, samples=taken))
    gain = unsplit.gain("torch.compile")
    assert unsplit.recommendation().endswith(f"; under torch.compile, one device is {gain} times as fast as our program there.")
    slower = {**found.measurement.samples, "torch.compile": Samples(around(350))}
    slow = replace(found, measurement=replace(found.measurement, samples=slower))
    assert slow.recommended == "m_etf"


def test_noise_and_too_few_steps_are_said() -> None:
    few = comparison({"single": around(400, steps=3), "m_etf": around(100, steps=3)})
    assert "3 steps of each tell nothing for sure, 6 may" in few.recommendation()
    loud = comparison({"single": around(400), "m_etf": around(100)})
    loud = replace(loud, measurement=replace(loud.measurement, load_of_others=0.5))
    assert loud.recommendation().endswith("one device's, but other processes took 50% of the cores (more than 10%).")


def test_an_engine_that_is_fastest_is_recommended_and_a_plan_stands_for_the_comparison() -> None:
    found = comparison({"single": ONE, "m_etf": around(250), "auto": around(300)})
    engine = Contender("ddp", step=STEP, engine=Engine("ddp", "DDP", 180.0), flag="--sharding=ddp")
    samples = {**found.measurement.samples, "ddp": Samples(around(200))}
    found = replace(found, contenders=(*found.contenders, engine), measurement=replace(found.measurement, samples=samples))
    assert (found.recommended, found.planned) == ("ddp", "m_etf")
    assert found.recommendation().startswith("Split, with ddp, which is --sharding=ddp: its step is 2.00 (")
    row = found.to_json()["methods"][-1]
    assert (row["predicted_step_us"], row["plan"], row["flag"]) == (180.0, None, "--sharding=ddp")


def test_what_is_kept(tmp_path: Path) -> None:
    found = comparison({"eager": around(500), "single": around(400), "m_etf": around(250), "auto": around(251)}, {"expert": "no hints"})
    found = replace(found, model="a name that is no formula: $^$")
    made_by = MadeBy(("baechi", "compare"), {"baechi": "0"})
    keep(tmp_path, STEP, found, made_by)
    kept = json.loads((tmp_path / "compare.json").read_text())
    assert kept == {**found.to_json(), **made_by.to_json()}
    rows = {row["method"]: row for row in kept["methods"]}
    assert set(rows) == {"single", "m_etf", "auto", "expert"}
    assert rows["expert"] == {**rows["expert"], "measured_step_us": None, "ratio": None, "plan": None, "note": "no hints"}
    assert rows["auto"]["note"] == "places every op where m_etf does"
    assert rows["m_etf"]["ratio"]["low"] <= rows["m_etf"]["ratio"]["median"] <= rows["m_etf"]["ratio"]["high"]
    assert rows["single"]["predicted_step_us"] == 400
    graph = OpGraph.load(tmp_path / "graph.json")
    assert (graph.ops, kept["recommended"]) == (GRAPH.ops, "m_etf")
    for row in rows.values():
        if row["plan"] is not None:
            plan = Plan.load(tmp_path / row["plan"], graph)
            assert (plan.predicted_step_us > 0, plan.made_by) == (True, made_by)
    assert (tmp_path / "plan.json").read_bytes() == (tmp_path / "plan_m_etf.json").read_bytes()


def test_the_table_says_why_a_method_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    found = comparison({"eager": around(500), "single": around(400), "m_etf": around(250)}, {"expert": "the [bold]graph has no hints"})
    found.print()
    out = capsys.readouterr().out
    assert "not measured: the [bold]graph has no hints" in out
    assert out.startswith(found.recommendation() + "\n")
    assert "\x1b" not in out
