"""`baechi explain` and `baechi diff` of shard plans, and what other commands say of these."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shard_plan(run: Run, tmp_path: Path) -> Path:
    """AlexNet on 8 devices."""
    file = tmp_path / "shard_plan.json"
    assert run("pase", "-p", 8, "--out", file)[0] == 0
    return file


def test_a_plan_says_what_its_step_consists_of(run: Run, shard_plan: Path) -> None:
    code, out, _ = run("explain", shard_plan)
    assert code == 0
    said = json.loads(run("explain", shard_plan, "--json")[1])
    assert said["bound_by"] == "compute"
    assert sum(said["parts_us"].values()) == pytest.approx(said["step_us"])
    assert sum(said["kinds_us"].values()) == pytest.approx(said["step_us"])
    assert said["parts_us"]["compute"] == said["kinds_us"]["compute"]
    totals = [layer["total_us"] for layer in said["layers"]]
    assert totals == sorted(totals, reverse=True)
    assert f"{said['parts_us']['compute'] / said['step_us']:.0%} compute" in out
    assert out.index("costliest of 14 layers") < out.index(said["layers"][0]["name"]) < out.index("what messages cost")


def test_words_of_the_sentence_are_those_of_the_tables(run: Run, shard_plan: Path) -> None:
    """In a plan of measured calls, too, and where messages go on while a layer computes."""
    plan = json.loads(shard_plan.read_text())
    costs = {"compute": 500.0, "executor": 300.0, "weight gradient": 250.0, "hidden": -100.0, "update": 50.0}
    plan["shard"] = {name: {**layer, "costs_us": costs if name == "linear_10" else {}} for name, layer in plan["shard"].items()}
    shard_plan.write_text(json.dumps({**plan, "predicted_step_us": 1000.0}))
    said = json.loads(run("explain", shard_plan, "--json")[1])
    assert said["parts_us"] == {"compute": 500.0, "executor": 300.0, "messages": 150.0, "update": 50.0}
    lines = run("explain", shard_plan)[1].splitlines()
    assert "50% compute, 30% executor, 15% messages, 5% update. It is bound by compute." in lines[0]
    rows = [line.split() for line in lines]
    assert ["compute", "500", "us", "50%"] in rows
    assert ["executor", "300", "us", "30%"] in rows
    layer = next(row for row in rows if row[:2] == ["linear_10", "linear"])
    assert " ".join(layer[layer.index("ms") :]).startswith("ms 100% 500 us 300 us 150 us 50 us")
    assert ["linear_10", "weight", "gradient", "150", "us", "15%"] in rows
    sides = [line.split() for line in run("diff", shard_plan, shard_plan)[1].splitlines()]
    parts = {"compute": "500", "executor": "300", "messages": "150", "update": "50"}
    assert all([part, us, "us", us, "us"] in sides for part, us in parts.items())


def test_a_folder_with_a_shard_plan_is_explained(run: Run, shard_plan: Path) -> None:
    said = [json.loads(run("explain", plan, "--json")[1]) for plan in (shard_plan.parent, shard_plan)]
    assert [answer.pop("command")[2] for answer in said] == [str(shard_plan.parent), str(shard_plan)]
    assert said[0] == said[1]


def test_what_is_of_plans_of_ops_is_refused(run: Run, shard_plan: Path) -> None:
    for command in (("explain", "--graph=g.json"), ("explain", "--num_devices=2"), ("diff", shard_plan, "--graph=g.json")):
        code, out, err = run(command[0], shard_plan, *command[1:])
        assert (code, out) == (2, "")
        assert "is a shard plan, which holds its layers" in err


def test_a_layer_says_what_its_other_splits_would_cost(run: Run, shard_plan: Path) -> None:
    said = json.loads(run("explain", shard_plan, "linear_10", "--json")[1])
    assert said["splits"] == {"units": 2, "in_features": 4}
    assert said["is_cheapest"]
    assert min(other["change_us"] for other in said["others"]) > 0
    code, out, _ = run("explain", shard_plan, "linear_10")
    assert code == 0
    assert out.startswith("linear_10 is split by units 2 x in_features 4: split in_features 8, the best other way, the step would take")
    assert "(as it is)" in out


def test_a_better_split_is_said_to_be_one(run: Run, shard_plan: Path) -> None:
    plan = json.loads(shard_plan.read_text())
    plan["shard"]["linear_10"]["others"][0]["change_us"] = -0.5 * plan["predicted_step_us"]
    shard_plan.write_text(json.dumps(plan))
    assert not json.loads(run("explain", shard_plan, "linear_10", "--json")[1])["is_cheapest"]
    assert "-50.0%. What can keep a plan from that: a memory limit" in run("explain", shard_plan, "linear_10")[1]


def test_two_plans_differ_in_some_layers(run: Run, shard_plan: Path, tmp_path: Path) -> None:
    slow, other = tmp_path / "slow.json", tmp_path / "other.json"
    assert run("pase", "-p", 8, "--bw=1", "--out", slow)[0] == 0
    first, second = (json.loads(file.read_text()) for file in (shard_plan, slow))
    said = json.loads(run("diff", shard_plan, slow, "--json")[1])
    differ = {name for name in first["shard"] if first["shard"][name]["splits"] != second["shard"][name]["splits"]}
    assert {layer["name"] for layer in said["changed"]} == differ != set()
    assert (said["before"]["step_us"], said["after"]["step_us"]) == (first["predicted_step_us"], second["predicted_step_us"])
    assert f"{len(differ)} of 14 layers are split differently" in run("diff", shard_plan, slow)[1]
    assert "every layer is split alike" in run("diff", shard_plan, shard_plan)[1]
    assert run("pase", "-g", "rnnlm", "-p", 8, "--out", other)[0] == 0
    code, _, err = run("diff", shard_plan, other)
    assert code == 1
    assert "the shard plans are of two networks: they differ in layer" in err


def test_plans_of_two_kinds_are_not_compared(run: Run, shard_plan: Path, plan: Path) -> None:
    code, _, err = run("diff", shard_plan, plan)
    assert code == 1
    assert f"{plan} is not a shard plan, and the other one is; compare two of a kind" in err


def test_a_plan_by_another_program_may_say_no_costs(run: Run, shard_plan: Path) -> None:
    plan = json.loads(shard_plan.read_text())
    for layer in plan["shard"].values():
        for field in ("costs_us", "held_bytes", "others"):
            del layer[field]
    shard_plan.write_text(json.dumps(plan))
    code, _, err = run("explain", shard_plan)
    assert code == 1
    assert "the shard plan has no costs of its layers; write it again: baechi pase --out" in err


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("costs_us", [], "Expected `object`, got `array` - at `$.costs_us`"),
        ("costs_us", {"compute": "much"}, "Expected `float`, got `str` - at `$.costs_us[...]`"),
        ("others", [{}], "Object missing required field `splits` - at `$.others[0]`"),
        ("others", [{"splits": {}, "held_change_bytes": 0}], "Object missing required field `change_us` - at `$.others[0]`"),
        ("held_bytes", -1, "Expected `float` >= 0.0 - at `$.held_bytes`"),
    ],
)
def test_damaged_costs_are_refused(run: Run, shard_plan: Path, field: str, value: object, message: str) -> None:
    plan = json.loads(shard_plan.read_text())
    plan["shard"]["linear_10"][field] = value
    shard_plan.write_text(json.dumps(plan))
    code, _, err = run("explain", shard_plan)
    assert code == 1
    assert f"{shard_plan}: the layer linear_10 of the shard plan is broken: {message}" in err


def test_a_layer_that_is_not_there_is_a_usage_error(run: Run, shard_plan: Path) -> None:
    code, _, err = run("explain", shard_plan, "linear")
    assert code == 2
    assert "has no layer 'linear'; layers are called as in it, such as linear_10, linear_11" in err


@pytest.mark.parametrize("command", [("simulate",), ("export", "--format=dot")])
def test_what_takes_plans_of_ops_says_what_takes_a_shard_plan(run: Run, graph: Path, shard_plan: Path, command: tuple[str, ...]) -> None:
    code, _, err = run(*command, graph, shard_plan)
    assert code == 1
    assert "this is a shard plan, which says how layers are split and not where ops are; baechi explain and diff take it" in err
