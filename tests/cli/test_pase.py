"""`baechi pase`: what it prints and writes, the original's command line, and bad input."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_ext.errors import PlanError
from baechi_ext.shard.networks import NETWORKS
from baechi_ext.shard.plan import LayerSplit, ShardPlan
from tests.cli.files import ROOT, write

Run = Callable[..., tuple[int, str, str]]


def error_of(err: str) -> str:
    """The one line of an error; what took long has said so before."""
    lines = [line for line in err.splitlines() if not (line.startswith("sharding ") and line.endswith(" ..."))]
    assert len(lines) == 1
    return lines[0]


def test_the_originals_command_line(run: Run) -> None:
    code, out, _ = run("pase", "-p", 32, "-b", 128, "-g", "alexnet", "--flops", 10, "--bw", 16, "--algo", 0, "--cost_model=original")
    assert code == 0
    assert "minimum cost    53,136,349,552 FLOP a device (optimal)" in out
    assert "conv_6            batch 16, in_channels 2" in out


def test_both_algorithms_agree_where_the_naive_one_can(run: Run) -> None:
    costs = [json.loads(run("pase", "-g", "alexnet", "--algo", algo, "--json")[1])["cost_flop"] for algo in (0, 1)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)
    code, _, err = run("pase", "-g", "resnet101", "-p", 64, "--algo", 1, "--table_memory=1MiB")
    assert code == 1
    assert error_of(err).startswith("error: the table for ")


def test_measure_profile_and_analysis(run: Run) -> None:
    code, out, _ = run("pase", "-p", 7, "-b", 64, "-g", "rnnlm", "--measure", "--profile", "-a")
    assert code == 0
    assert "median of 5 after 2)" in out
    assert "cumulative" in out
    assert "build_tables" in out
    assert "where the cost lies" in out
    result = json.loads(run("pase", "-g", "rnnlm", "-a", "--json")[1])
    total = sum(layer["own_flop"] + layer["moved_flop"] for layer in result["layers"])
    assert total == pytest.approx(result["cost_flop"], rel=1e-9)
    assert all(sum(layer["kinds_flop"].values()) == pytest.approx(layer["own_flop"]) for layer in result["layers"])


def test_kinds_add_up_where_something_is_hidden(run: Run) -> None:
    flags = ["pase", "-g", "alexnet", "-a", "--overlap"]
    layers = json.loads(run(*flags, "--json")[1])["layers"]
    assert min(layer["hidden_flop"] for layer in layers) < 0
    assert all(sum(layer["kinds_flop"].values()) + layer["hidden_flop"] == pytest.approx(layer["own_flop"]) for layer in layers)
    table = run(*flags)[1].split("where the cost lies")[1].split("\n\n")[0]
    assert sum(float(share) for share in re.findall(r"(-?[\d.]+)%", table)) == pytest.approx(100, abs=0.1)


def test_the_plan_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, _ = run("pase", "-g", "rnnlm", "-m", 512, "-b", 64, "--latency", 5, "--out", file)
    assert code == 0
    assert str(file) in out
    plan = ShardPlan.load(file)
    kept = json.loads(file.read_text())
    assert {**plan.to_json(), **{key: kept[key] for key in ("command", "versions")}} == kept
    assert (plan.graph, plan.batch, plan.devices, plan.status) == ("rnnlm", 64, 8, "optimal")
    assert plan.options["width"] == 512
    assert plan.options["latency_us"] == 5
    assert plan.shard["lstm_1"].sizes == {"layers": 2, "sequence": 256, "batch": 64, "units": 512, "in_units": 512}
    assert plan.predicted_step_us == pytest.approx(plan.cost_flop / 10e12 * 1e6)
    assert all(layer.devices <= 8 for layer in plan.shard.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "plan"}, "this is not a shard plan: its kind is 'plan'"),
        ({"status": "perfect"}, r"the shard plan is broken: Invalid enum value 'perfect' - at `\$.status`; write it again"),
        ({"cost_flop": "much"}, r"the shard plan is broken: Expected `float`, got `str` - at `\$.cost_flop`; write it again"),
        ({"batch": None}, r"Expected `int`, got `null` - at `\$.batch`"),
        ({"devices": 0}, r"Expected `int` >= 1 - at `\$.devices`"),
        ({"shard": []}, "shard is not an object of layers"),
        ({"shard": {"x": {"sizes": {"a": 4}}}}, "layer x of the shard plan is broken: Object missing required field `splits`"),
        ({"shard": {"x": {"sizes": {"a": 4}, "splits": {"a": 3}}}}, "x splits its 'a' of 4 into 3 parts"),
        ({"shard": {"x": {"sizes": {"a": 4}, "splits": {"b": 2}}}}, "x splits its 'b' of None into 2 parts"),
        ({"shard": {"x": {"sizes": {"a": 16}, "splits": {"a": 16}}}}, "x is split over 16 devices of 8"),
    ],
)
def test_bad_plan_files(run: Run, tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "plan.json"
    assert run("pase", "--out", file)[0] == 0
    write(file, {**json.loads(file.read_text()), **change})
    with pytest.raises(PlanError, match=message):
        ShardPlan.load(file)


def test_the_documentation_names_every_field() -> None:
    text = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    section = text.partition("## Shard plan")[2].partition("\n## ")[0]
    numbers = {"cost_flop": 1.0, "lower_bound_flop": 1.0, "predicted_step_us": 1.0, "held_bytes": 1.0}
    layers = {"a": LayerSplit("op", {"x": 1}, {})}
    plan = ShardPlan(graph="g", batch=1, devices=1, status="optimal", cost_model="default", **numbers, shard=layers)
    written = plan.to_json()
    assert [name for name in (*written, *written["shard"]["a"]) if f'"{name}"' not in section] == []


def test_comparison_with_others(run: Run) -> None:
    code, out, _ = run("pase", "-p", 16, "--compare")
    assert code == 0
    assert "one weird trick" in out
    result = json.loads(run("pase", "-p", 16, "--compare", "--json")[1])
    assert [other["name"] for other in result["others"]] == ["data parallel", "one weird trick", "megatron", "random walk"]
    assert all(other["cost_flop"] >= result["cost_flop"] * (1 - 1e-9) for other in result["others"])
    assert result["others"][0]["cost_flop"] > 2 * result["cost_flop"]


def test_the_graph_as_dot(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "graph.dot"
    assert run("pase", "-d", file)[0] == 0
    text = file.read_text()
    first, rest = text.split("\n", 1)
    assert first.startswith(f"// baechi pase -d {file} (baechi ")
    assert rest.startswith('digraph "alexnet" {')
    assert text.count(" -> ") == 13
    assert '12 -> 13 [label="128 x 1024"];' in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["-p", 0], "0 devices; give 1 or more (-p)"),
        (["-p", -3], "-3 devices; give 1 or more (-p)"),
        (["-b", 4], "a batch of 4 is smaller than the number of devices, 8"),
        (["-b", 0, "-p", 1], "a batch of 0"),
        (["-b", "9" * 20], "a batch of 99999999999999999999; the limit is 999999999 (-b)"),
        (["-b", "9" * 20, "-p", "9" * 20], "a batch of 99999999999999999999; the limit is 999999999 (-b)"),
        (["--model_name", "alexnet", "-b", "9" * 20], "a batch of 99999999999999999999; the limit is 999999999 (-b)"),
        (["-g", "rnnlm", "-m", "9" * 20], "a hidden width of 99999999999999999999; the limit is 999999999 (-m)"),
        (["--flops", 0], "--flops is 0; give a finite number above 0"),
        (["--flops", "nan"], "--flops is nan; give a finite number above 0"),
        (["--bw", -1], "--bw is -1; give a finite number above 0"),
        (["--latency", -1], "--latency is -1; give a finite number of microseconds, 0 or more"),
        (["--node_bw", 0], "--node_bw is 0; give a finite number above 0"),
        (["--node_latency", 5], "give --devices_per_node as well"),
        (["--devices_per_node", 0], "0 devices per node; give 1 or more"),
        (["--optimizer_words", -1], "-1 numbers of optimizer state"),
        (["-m", 64], "alexnet has no hidden width to set; -m is for rnnlm and transformer"),
        (["-g", "rnnlm", "-m", 0], "a hidden width of 0; give 1 or more (-m)"),
        (["-g", "transformer", "-m", 100], "a hidden width of 100 does not divide into 8 heads"),
        (["--cost_model", "new"], "unknown cost model 'new'; choose one of default, original"),
        (["--cost_model", "original", "--halo"], "the original cost model splits no images"),
        (["--order", "any"], "unknown order 'any'; choose one of generate_seq, min_fill"),
        (["--algo", 1, "--order", "min_fill"], "--algo=1 is the order breadth_first, and --order=min_fill another"),
        (["-g", "transformer", "--table_memory", "1KiB"], "and 0.0009766 MiB are allowed; raise --table_memory"),
        (["--device_memory", "1MiB"], "no strategy fits 1 MiB a device: the least that can be held is "),
        (["--model_name", "alexnet", "-g", "alexnet"], "--graph=alexnet and --model_name=alexnet are graphs of their own"),
        (["--model_name", "alexnet", "-m", 5], "-m is the width of a graph by hand"),
        (["--model_name", "alexnet", "--cost_model", "original"], "--cost_model=original is for the graphs by hand"),
        (["--model_name", "alexnet", "-b", 8, "--batch_size", 16], "-b 8 and --batch_size=16 are the same"),
        (["--cost_path", "cost.json"], "--cost_path is of a captured model; name the model (--model_name)"),
        (["--num_layers", 2], "--num_layers is of a captured model; name the model (--model_name)"),
        (["train.py", "-b", 8], "-b is the batch of a graph; a script has its own"),
        (["train.py", "-g", "rnnlm"], "--graph=rnnlm and SCRIPT=train.py are graphs of their own"),
        (["nowhere.py"], "cannot read script 'nowhere.py'"),
        (["-g", "rnnlm", "--", "-x"], "what follows -- are the arguments of a script"),
        (["--model_name", "alexnet", "-b", 0], "a batch of 0; give 1 or more (-b)"),
        (["--out", "/nowhere/plan.json"], "cannot write '/nowhere/plan.json'"),
    ],
)
def test_bad_input_is_one_line(run: Run, line: list[object], message: str) -> None:
    code, out, err = run("pase", *line)
    assert (code, out) == (1, "")
    assert error_of(err).startswith("error: ")
    assert message in err


def test_an_unknown_graph(run: Run) -> None:
    assert run("pase", "-g", "vgg16")[::2] == (2, f"error: unknown graph 'vgg16'; choose one of {', '.join(NETWORKS)}\n")
    assert "unknown graph 'transfomer' (did you mean transformer?); choose" in run("pase", "-g", "transfomer")[2]


def test_beam_and_limits(run: Run) -> None:
    code, out, _ = run("pase", "-g", "transformer", "-b", 64, "-p", 16, "--table_memory=50KiB", "--beam", 10)
    assert code == 0
    assert "minimum cost" in out
    free, tight = (
        json.loads(run("pase", "-g", "transformer", "-b", 64, "--json", *limit)[1]) for limit in ([], ["--device_memory", "2700MiB"])
    )
    assert tight["held_bytes"] <= 2700 * 2**20 < free["held_bytes"]
    assert free["cost_flop"] <= tight["lower_bound_flop"] <= tight["cost_flop"]
