"""`baechi compare` as a user calls it: several methods really measured, with those that fail in the table."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_ext.ir import OpGraph, Plan
from baechi_runtime.files.run_folder import RunFolder

SMALL = ["--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--num_steps=2", "--device_speeds=1"]
Run = Callable[..., tuple[int, str, str]]


def test_methods_are_measured_in_turn_and_kept(run: Run, tmp_path: Path) -> None:
    code, out, err = run("compare", *SMALL, "--placement_methods=m_etf,expert", f"--out={tmp_path / 'c'}", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert json.loads((tmp_path / "c" / "compare.json").read_text()) == found
    assert (found["schema_version"], found["kind"], found["model"]) == (1, "baechi comparison", "wide_towers")
    assert found["command"][:3] == ["baechi", "compare", SMALL[0]]
    assert set(found["versions"]) >= {"baechi", "python", "torch"}
    graph, rows = OpGraph.load(tmp_path / "c" / "graph.json"), {row["method"]: row for row in found["methods"]}
    assert list(rows) == ["single", "m_etf", "expert"]
    for row in rows.values():
        samples, ratio, one = (row["measured_step_us"]["samples"], row["ratio"], rows["single"]["measured_step_us"]["samples"])
        pairs = sorted(a / b for a, b in zip(one, samples, strict=True))
        assert (len(samples), ratio["low"], ratio["high"]) == (2, pairs[0], pairs[-1])
        assert row["parity"]["max_abs_diff"] == 0
        assert row["differs_from_one_device"] is False  # two steps tell nothing
        plan = Plan.load(tmp_path / "c" / row["plan"], graph)
        assert row["method"] == "single" or row["predicted_step_us"] == plan.predicted_step_us
    assert (rows["single"]["splits"], rows["m_etf"]["splits"]) == (False, True)
    assert found["recommended"] == "single"
    assert found["recommendation"].startswith("Don't split on so few steps: the quickest of the splits, ")
    assert (tmp_path / "c" / "plan.json").read_bytes() == (tmp_path / "c" / "plan_single.json").read_bytes()
    assert (tmp_path / "c" / "profile.json").exists()
    for name, graph in (("single", "graph"), ("m_etf", "graph_split")):
        code, out, err = run("explain", tmp_path / "c" / f"plan_{name}.json", f"--graph={tmp_path / 'c' / graph}.json", "--json")
        assert code == 0, err
        assert (json.loads(out)["step_us"], json.loads(out)["notes"]) == (pytest.approx(rows[name]["predicted_step_us"]), [])
    folder = RunFolder.load(tmp_path / "c")
    assert {op.device for op in folder.measured.ops} == set(folder.plan.placement) == {0}
    assert len(folder.measured.ops) == len(folder.graph)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile calls a compiler of C++")
@pytest.mark.parametrize("command", ["compare --placement_methods=m_etf", "train --placement_method=m_etf"])
def test_the_step_under_torch_compile_is_measured_beside_the_plans(run: Run, command: str) -> None:
    small = "--model_name=gpt2 --batch_size=2 --max_seq_length=4 --num_layers=1 --d_model=8 --num_heads=2 --vocab_size=11 --dropout=0"
    code, out, err = run(*command.split(), *small.split(), "--num_steps=2", "--compile", "--json")
    assert code == 0, err
    found = json.loads(out)
    if found["kind"] == "baechi comparison":
        compiled = found["methods"][0]
        assert (compiled["method"], compiled["plan"], compiled["note"][:19]) == ("torch.compile", None, "torch.compile took ")
        assert (len(compiled["measured_step_us"]["samples"]), compiled["parity"]["passed"]) == (2, True)
    else:
        assert len(found["measured_step_us"]["torch.compile"]["samples"]) == 2
        assert found["notes"][0].startswith("torch.compile took ")


@pytest.mark.parametrize("flag", ["--train_steps=3", "--costgen", "--sharding=pase", "SCRIPT"])
def test_compile_is_for_steps_that_are_compared(run: Run, flag: str) -> None:
    code, out, err = run("train", "--compile", __file__ if flag == "SCRIPT" else flag)
    assert (code != 0, out) == (True, "")
    assert "--compile" in err.splitlines()[-1]
    assert "drop" in err.splitlines()[-1]


def test_a_method_without_a_plan_says_why_and_the_others_go_on(run: Run, tmp_path: Path) -> None:
    code, out, err = run("compare", *SMALL, "--placement_methods=single,m_etf", "--device_memory=6MB", f"--out={tmp_path / 'c'}")
    assert code == 0, err
    folder = RunFolder.load(tmp_path / "c")
    assert (folder.plan.method, folder.measured.executor) == ("m_etf", "thread")  # a folder that shows the recommended plan
    single = next(line for line in out.splitlines() if line.startswith("single "))
    assert "not measured: " in single
    split = next(line for line in out.splitlines() if line.startswith("m_etf "))
    assert "the best" in split
    assert out.splitlines()[0].startswith("Split, with m_etf: one device cannot run the step (")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--placement_methods=m_etf,best"], 2, "unknown value 'best'; choose one of auto, refine, single"),
        (["--placement_methods=,"], 2, "',' names nothing; give names with commas between them"),
        (["--placement_method=m_etf"], 2, "--placement_method"),
        (["--placement_methods=m_etf", "--expert_file=x"], 2, "--expert_file is only for expert, and none of these is compared"),
        (["--placement_methods=m_etf", "--microbatches=2"], 2, "--microbatches is for the plan of auto, which is not compared"),
        (["--train_steps=3"], 2, "unrecognized arguments: --train_steps=3"),
        (["--cluster=/nowhere.json"], 1, "cannot read cluster file"),
        (["--", "script.py"], 2, "name the script before it: baechi compare SCRIPT"),
    ],
)
def test_bad_input(run: Run, flags: list[str], code: int, message: str) -> None:
    found, out, err = run("compare", *SMALL, *flags)
    assert (found, out) == (code, "")
    assert message in err
    assert err.startswith("error:")
