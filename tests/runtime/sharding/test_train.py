"""`baechi train --sharding`: what it prints, writes and refuses."""

import json
from math import prod
from pathlib import Path

import pytest
import torch

from baechi_ext.capture.parts import Parts
from baechi_ext.errors import OptionError
from baechi_ext.shard.plan import ShardPlan
from baechi_runtime.cli.main import main
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.drivers.training import train
from baechi_runtime.models.registry import ModelOptions, make_step
from baechi_runtime.models.training_step import EagerStep, optimizer_spec
from baechi_runtime.report.sharded_summary import ShardedRun
from baechi_runtime.sharding.report import kendall_tau
from baechi_runtime.sharding.training import on_devices, split
from tests.runtime import forked
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.workers import finish, only_error

MODEL = ["--model_name=rnnlm", "--batch_size=4", "--vocab_size=64", "--rnn_units=16", "--max_seq_length=8", "--rnn_chunk=4"]


def on_two_machines(*arguments: str) -> str:
    """A worker on each: that both are on this one they are not told. What the command prints."""
    torchrun = ["--standalone", "--nproc-per-node=2", "-m", "tests.runtime.on_a_machine_of_its_own"]
    code, out, err = finish(forked.start(*torchrun, *arguments, "--workers=process", module="torch.distributed.run"))
    assert code == 0, err
    return out


def test_strategies_are_run_and_compared(tmp_path: Path, workers: ForkedWorkers) -> None:
    flags = ["--workers=process", "--sharding=pase,data_parallel,ddp,fsdp2", "--num_steps=2", "--json", f"--out={tmp_path}"]
    report = json.loads(workers.run("baechi_on_processes", 2, "train", *MODEL, *flags))
    by_name = {s["name"]: s for s in report["strategies"]}
    assert list(by_name) == ["pase", "data_parallel", "ddp", "fsdp2"]
    assert by_name["pase"]["predicted_step_us"] <= by_name["data_parallel"]["predicted_step_us"]
    assert all(sum(s["predicted_parts_us"].values()) == s["predicted_step_us"] for s in by_name.values())
    assert by_name["data_parallel"]["predicted_parts_us"]["gradients_us"] > 0
    assert by_name["data_parallel"]["parity"]["passed"]
    assert all(s["predicted_step_us"] > 0 and len(s["measured_step_us"]["samples"]) == 2 for s in by_name.values())
    parts = report["whole"]["predicted_parts_us"]  # torch's own step, which no executor of ours runs
    assert (parts["executor_us"], report["whole"]["layers"], report["whole"]["sent"]["predicted"]) == (0, [], {})
    assert min(parts["calls_us"], parts["update_us"]) > 0
    words = 64 * 16 * 2 + 64 + 2 * (16 + 16 + 1) * 4 * 16
    assert by_name["ddp"]["sent_bytes"] == 4 * words  # a sum of two goes round once each way: half of it, twice
    assert by_name["fsdp2"]["sent_bytes"] >= by_name["ddp"]["sent_bytes"]
    assert report["mesh"] == [2]
    assert json.loads((tmp_path / "report.json").read_text()) == report
    plan, out = str(tmp_path / "shard_plan.json"), tmp_path / "again"
    flags = [f"--sharding={plan}", "--train_steps=2", "--learning_rate=0.5", "--json", f"--out={out}"]
    report = json.loads(on_two_machines("train", *MODEL, *flags))
    (strategy,) = report["strategies"]
    losses = strategy["losses"]
    assert len(losses) == len(report["single_step_us"]["samples"]) == 2
    assert losses[1] < losses[0]
    assert (report["load_of_others"], report["doubts"]) == (None, [])  # a core for each, and nobody sees the load of both
    assert strategy["ratio"] is None  # the steps were not taken in turn
    assert strategy["plan"] == "shard_plan_file_1.json"
    run = ShardedRun.load(out)
    assert list(run.plans) == [plan]
    assert run.plan is not None
    assert run.plan == ShardPlan.load(out / "shard_plan.json")
    assert run.plan.cost_model == "measured"
    assert run.plans[run.split[0].name].held_bytes == run.plan.held_bytes


def test_data_parallelism_splits_examples_where_there_are_as_many_steps(workers: ForkedWorkers) -> None:
    """Words (steps + 1, batch): the loss is that of the whole batch, over all steps."""
    sizes = {"batch_size": 4, "max_seq_length": 3, "vocab_size": 64, "rnn_units": 16, "rnn_chunk": 3}
    flags = [*(f"--{name}={size}" for name, size in sizes.items()), "--dropout=0", "--train_steps=3", "--learning_rate=0.5", "--json"]
    command = ["train", "--model_name=rnnlm", "--workers=process", "--sharding=ddp,fsdp2", *flags]
    found = json.loads(workers.run("baechi_on_processes", 2, *command))["strategies"]
    eager = EagerStep(make_step("rnnlm", ModelOptions(**sizes, dropout=0.0), optimizer_spec("sgd", 0.5)), torch.device("cpu"))
    losses = [eager.run().item() for _ in range(3)]
    for strategy in found:
        assert strategy["losses"] == pytest.approx(losses, rel=1e-5)
        assert (strategy["parity"]["passed"], strategy["parity"]["tolerance"], strategy["note"]) == (True, 1e-4, "torch's own")
        assert strategy["parity"]["compared"] > 10


def test_each_process_drops_out_of_its_part_by_numbers_of_its_own(workers: ForkedWorkers) -> None:
    flags = [*MODEL, "--dropout=0.5", "--train_steps=1", "--json"]
    command = ["train", "--workers=process", "--sharding=ddp", *flags]
    (strategy,) = json.loads(workers.run("baechi_on_processes", 2, *command))["strategies"]
    sizes = {name.removeprefix("--"): int(size) for name, size in (flag.split("=") for flag in MODEL[1:])}
    step = make_step("rnnlm", ModelOptions(**sizes, dropout=0.5), optimizer_spec("sgd", 0.01))
    parts = Parts.of(step.inputs, [2, 2], step.batch_dim)
    losses = []
    for rank in range(2):
        torch.manual_seed(step.seed + rank)
        losses.append(step.module(*parts.inputs_of(step.inputs, rank)).item())
    assert strategy["losses"] == pytest.approx([sum(losses) / 2], rel=1e-5)
    assert strategy["parity"] is None
    assert strategy["note"].endswith("and not compared with it: each process draws random numbers of its own")


def test_a_search_keeps_within_the_memory_of_devices(workers: ForkedWorkers) -> None:
    flags = ["--workers=process", "--num_steps=1", "--sharding=pase", "--device_memory=16KiB", "--memory_fraction=0.5"]
    _, _, err = workers.finish("baechi_on_processes", 2, "train", *MODEL, *flags)
    assert "no strategy fits 0.007812 MiB a device" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sharding=pase,ddp", "--device_memory=1GiB"], "--device_memory limits what a search finds, and ddp is torch's own"),
        (["--sharding=pase", "--num_devices=2", "--mesh=2x2"], "--mesh=2x2 has 4 processes, and 2 run; give --mesh=2"),
        (["--sharding=best"], "unknown strategy 'best'"),
        (["--sharding=,"], "names no strategy"),
        (["--sharding=pase", "--workers=thread"], "drop --workers=thread"),
        (["--mesh=2x2"], "--mesh is for --sharding"),
        (["--sharding=pase", "--mesh=2y2"], "is not a mesh"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    done = forked.run("train", *MODEL, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in only_error(done.stderr)


def test_a_given_plan_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.chdir(tmp_path)
    given = tmp_path / "shard_plan_expert.json"
    given.write_text("{}")
    for out in (str(tmp_path), "."):
        request = TrainRequest("rnnlm", PlanRequest(), num_devices=1, workers="process", sharding=("pase", str(given)), out=out)
        with pytest.raises(OptionError, match=rf"shard_plan_expert.json is in the folder of --out={out}, .*; give another --out"):
            train(request, on_devices, split)
    assert given.read_text() == "{}"


def test_a_search_among_what_can_be_run_says_what_that_costs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    common = ["pase", *MODEL, "--batch_size=6", "-p", "6", "--flops=0.01", "--json"]
    assert main(common) == 0
    free = json.loads(capfd.readouterr().out)
    assert "executable" not in free
    assert main([*common, "--executable", f"--out={tmp_path / 'plan.json'}"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["configurations"] < free["configurations"]
    assert found["cost_flop"] >= free["cost_flop"]
    assert found["executable"].startswith(f"{found['cost_flop'] / free['cost_flop'] - 1:.2%} above the best")
    for layer in json.loads((tmp_path / "plan.json").read_text())["shard"].values():
        assert prod(layer["splits"].values()) in (1, 2, 3, 6)
    assert main(["pase", "--executable", "-p", "2"]) == 1
    assert "give --model_name or a script" in capfd.readouterr().err


def test_kendalls_tau() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 6**0.5)
    assert kendall_tau([1.0], [1.0]) is None
    assert kendall_tau([1, 1], [1, 2]) is None
