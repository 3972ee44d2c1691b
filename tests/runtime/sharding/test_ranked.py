"""torch's own engines beside the plans of `auto`: their predicted steps, which of them run, and that these compute the same step."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from baechi_ext.capture.parts import Parts
from baechi_ext.ir import Cluster, Link, OpGraph, Plan
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import RunOptions, TrainRequest
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.models.registry import ModelOptions, make_step
from baechi_runtime.models.training_step import EagerStep, TrainingStep, optimizer_spec
from baechi_runtime.sharding import ranked
from baechi_runtime.sharding.ranked import why_not
from baechi_runtime.torch.parity import is_mean_of_parts
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.workers import only_error

SIZES = {"batch_size": 4, "vocab_size": 60, "max_seq_length": 6, "num_layers": 2, "d_model": 32, "num_heads": 4}
GPT2 = ["--model_name=gpt2", "--dropout=0", *(f"--{name}={size}" for name, size in SIZES.items())]
TOWERS = ["--model_name=wide_towers", "--batch_size=4", "--image_size=16"]
TRAIN = ["train", "--workers=process", "--num_devices=2", "--time_limit=0.1", "--json"]
FEW = ["--num_steps=2"]


def notes_of(report: dict[str, object], *parts: str) -> list[str]:
    return [note for note in report["notes"] if all(part in note for part in parts)]


def eager_losses(steps: int) -> list[float]:
    """The losses of GPT2's steps in plain PyTorch, by a learning rate of 0.1."""
    eager = EagerStep(make_step("gpt2", ModelOptions(**SIZES, dropout=0.0), optimizer_spec("sgd", 0.1)), torch.device("cpu"))
    return [eager.run().item() for _ in range(steps)]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow), "pase"])
def test_a_chosen_engine_runs_the_step_that_is_not_placed(engine: str, workers: ForkedWorkers) -> None:
    """Its losses are those of the whole batch in plain PyTorch."""
    flags = ["--train_steps=4", "--learning_rate=0.1"]
    report = json.loads(workers.run("ranked_on_processes", 2, engine, *TRAIN, *GPT2, *flags))
    (strategy,) = report["strategies"]
    assert (report["kind"], strategy["name"], report["machine"]) == ("baechi sharding report", engine, None)
    assert strategy["parity"]["passed"]
    assert strategy["parity"]["compared"] > 10
    assert strategy["parity"]["tolerance"] == (1e-8 if engine == "pase" else 1e-4)
    title = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP2", "pase": "the best sharding of layers by counted operations"}[engine]
    assert notes_of(report, f"{title} runs the step: it is predicted to take", "the plan of auto", "of which a few steps took")
    assert strategy["losses"] == pytest.approx(eager_losses(4), rel=1e-5)


def test_a_comparison_measures_parts_and_engines_beside_the_plan(tmp_path_factory: pytest.TempPathFactory, workers: ForkedWorkers) -> None:
    """The plan that it keeps is one that can be looked at, whatever is the fastest."""
    out = tmp_path_factory.mktemp("compared")
    flags = ["--placement_methods=auto", f"--out={out}", *TRAIN[1:], *FEW]
    found = json.loads(workers.run("ranked_on_processes", 2, "none", "compare", *GPT2, *flags))
    rows = {row["method"]: row for row in found["methods"]}
    assert list(rows) == ["single", "auto", "auto_2_parts", "ddp", "fsdp2", "pase"]
    for name, row in rows.items():
        assert len(row["measured_step_us"]["samples"]) == 2, (name, row["note"])
        assert row["parity"]["passed"]
        assert row["predicted_step_us"] > 0
        assert (row["plan"] is None) == (name in ("ddp", "fsdp2", "pase"))
    assert [row["flag"] for row in rows.values()][:2] == ["", ""]
    assert re.fullmatch("--microbatches=(2,2|1,3|3,1)", rows["auto_2_parts"]["flag"])  # shares by speed, which is measured
    assert [row["flag"] for row in rows.values()][3:] == ["--sharding=ddp", "--sharding=fsdp2", ""]
    assert (out / "plan.json").read_bytes() == (out / f"plan_{found['planned']}.json").read_bytes()
    parts = "graph" if found["planned"] == "auto_2_parts" else "graph_parts"
    plan = Plan.load(out / "plan_auto_2_parts.json", OpGraph.load(out / f"{parts}.json"))
    assert plan.predicted_step_us == rows["auto_2_parts"]["predicted_step_us"]
    assert RunFolder.load(out).plan.method in ("single", "auto")


def test_a_comparison_says_why_an_engine_is_not_measured(workers: ForkedWorkers) -> None:
    flags = ["--placement_methods=auto", *TRAIN[1:], *FEW, "--dropout=0.1"]
    found = json.loads(workers.run("ranked_on_processes", 2, "ddp", "compare", *GPT2, *flags))
    (row,) = [row for row in found["methods"] if row["method"] == "ddp"]
    assert row["measured_step_us"] is None
    assert "DistributedDataParallel: its processes would draw other random numbers" in row["note"]


def test_batch_norm_keeps_an_engine_out_unless_parts_may_be_normalised(
    tmp_path_factory: pytest.TempPathFactory, workers: ForkedWorkers
) -> None:
    """Then its steps are timed beside those that are not split."""
    kept = json.loads(workers.run("ranked_on_processes", 2, "ddp", *TRAIN, *FEW, *TOWERS))
    assert "strategies" not in kept
    assert notes_of(kept, "DistributedDataParallel is predicted to take", "--batch_norm=per_part allows that", "--sharding=ddp runs it")
    out = tmp_path_factory.mktemp("run")
    chosen = json.loads(workers.run("ranked_on_processes", 2, "ddp", *TRAIN, *FEW, *TOWERS, "--batch_norm=per_part", f"--out={out}"))
    (strategy,) = chosen["strategies"]
    assert strategy["parity"]["passed"]
    assert len(strategy["measured_step_us"]["samples"]) == len(chosen["single_step_us"]["samples"]) == 2
    assert sum(strategy["predicted_parts_us"].values()) == pytest.approx(strategy["predicted_step_us"])
    assert strategy["sent_bytes"] > 0
    assert json.loads((out / "report.json").read_text()) == chosen
    assert not (out / "plan.json").exists()


def test_what_computes_another_step_is_a_parity_error(workers: ForkedWorkers) -> None:
    """Not even the reasons against it being asked for lets it go on."""
    codes, out, err = workers.finish("ranked_on_processes", 2, "ddp+unasked", *TRAIN, *FEW, *GPT2, "--dropout=0.1")
    assert (codes[0], out) == (1, "")
    assert "differs" in only_error(err)


def test_what_is_not_even_tried() -> None:
    """A batch that does not divide, and a model of which each device has room for half."""
    step = make_step("gpt2", ModelOptions(**SIZES, dropout=0.0), optimizer_spec("adam", 0.1))
    weights = sum(p.nbytes for p in step.module.parameters())
    assert [why_not(name, step, 2, 0.0, None) for name in ranked.TITLES] == ["", "", ""]
    reason = "it gives each of 3 processes as much of a batch, and this one has 4 examples"
    assert [why_not(name, step, 3, 0.0, None) for name in ranked.TITLES] == [reason, reason, ""]
    ddp, fsdp2, pase = (why_not(name, step, 2, 3.0 * weights, 4.0 * weights) for name in ranked.TITLES)
    assert re.fullmatch(r"it would hold [\d.]+ KiB on each device, which has [\d.]+ KiB", ddp)
    assert fsdp2 == pase == ""


@pytest.mark.parametrize(
    "asked",
    [
        {"plan": PlanRequest("m_etf")},
        {"plan": PlanRequest(cost_factor=2)},
        {"microbatches": 1},
        {"microbatches": 2},
        {"workers": "thread"},
        {"link": Link(0, 0)},
        {"cluster": Cluster.uniform(2)},
        {"comm_cost_factor": 2},
        {"run": RunOptions(9, checkpoint="folder")},
        {"log_device_placement": True},
        {"relaxed_random": True},
        {"costgen": True},
        {"cuda": True},
    ],
)
def test_who_asks_for_something_gets_it(asked: dict[str, Any]) -> None:
    request = TrainRequest("gpt2", PlanRequest(), workers="process", microbatches=None)
    assert request.is_ranked
    assert replace(request, run=RunOptions(9), device_memory=1 << 20, batch_norm_per_part=True).is_ranked
    assert not replace(request, **asked).is_ranked


def test_engines_are_predicted_beside_the_plan_that_runs(workers: ForkedWorkers) -> None:
    """The plan's own rehearsal leaves no trace in what it trains. Layers that can't be sharded are no reason to stop."""
    flags = ["--train_steps=4", "--learning_rate=0.1"]
    report = json.loads(workers.run("ranked_on_processes", 2, "none+unsplittable", *TRAIN, *GPT2, *flags))
    assert "strategies" not in report
    assert notes_of(report, "DistributedDataParallel is predicted to take")
    assert notes_of(report, "FSDP2 is predicted to take")
    assert notes_of(report, "the best sharding of layers by counted operations was not tried: no way to split it")
    assert notes_of(report, "the plan of auto", "of which a few steps took")
    assert report["losses"] == pytest.approx(eager_losses(4), rel=1e-5)


def test_steps_of_an_engine_draw_the_same_numbers_on_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else a process draws between them: layers that are split drop out other numbers of one tensor otherwise."""
    loaded = SimpleNamespace(seed=0, run=lambda: (torch.rand(()).item(), 1.0))
    monkeypatch.setattr(ranked._Worker, "_ready", lambda self, name: loaded)
    monkeypatch.setattr(ranked._Worker, "processes", SimpleNamespace(device=torch.device("cpu")))
    request = TrainRequest("gpt2", PlanRequest(), workers="process")
    step = make_step("gpt2", ModelOptions(**SIZES), optimizer_spec("sgd", 0.1))
    drawn = []
    for rank in range(2):
        worker = ranked._Worker(request, [], rank, step)
        worker.load("pase")
        torch.rand(1 + rank)
        before = torch.get_rng_state()
        drawn.append([worker.step("pase")[0] for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


class Labelled(nn.Module):
    """A mean over the labels that are not 0, or their sum."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.reduction = reduction

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(x).flatten(0, 1), labels.flatten(), ignore_index=0, reduction=self.reduction)


@pytest.mark.parametrize(
    ("padding", "reduction", "is_mean"),
    [((0, 0, 0, 0), "mean", True), ((0, 2, 2, 0), "mean", True), ((0, 0, 0, 1), "mean", False), ((0, 0, 0, 0), "sum", False)],
)
def test_a_loss_is_a_mean_over_parts_that_count_alike(padding: Sequence[int], reduction: str, is_mean: bool) -> None:
    torch.manual_seed(1)
    labels = torch.randint(1, 3, (4, 5))
    for row, length in enumerate(padding):
        labels[row, :length] = 0
    step = TrainingStep("labelled", Labelled(reduction), (torch.randn(4, 5, 4), labels), optimizer_spec("sgd", 0.1), batch=4)
    assert is_mean_of_parts(step, Parts.of(step.inputs, (2, 2))) == is_mean
