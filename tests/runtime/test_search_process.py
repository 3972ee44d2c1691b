"""A plan that is searched for in another process, while training goes on unplaced."""

import copy
import gc
import os
import signal
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import baechi_ext
from baechi_ext.cost.profile import OpProfile, Profile
from baechi_ext.ir import Cluster
from baechi_ext.ir.plan import PlanFile
from baechi_ext.place.common import PlaceOptions, Worth
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.torch.calls.module_call import call_of
from baechi_runtime.torch.calls.plan_cache import find_plan
from baechi_runtime.torch.calls.search_process import is_serializable, plan_from_json, plan_to_json, search
from baechi_runtime.torch.calls.session import ASIDE, SEARCHED_FOR
from tests.build import graph_of
from tests.runtime.forked import python

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is left for no search beside training")


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(20))) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(x) + self.right(x)).square().mean()


@pytest.fixture(autouse=True)
def _a_core_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("BAECHI_CACHE", str(tmp_path))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((64, 96), 1.0 / (1 + step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def is_searched_for(model: nn.Module) -> bool:
    report = baechi_ext.report(model)
    return report.plan is None and not report.refusal


def test_training_goes_on_until_the_plan_is_there() -> None:
    model = Towers()
    same = copy.deepcopy(model)
    baechi_ext.parallelize(model, devices=2, time_limit=0.3)
    losses = train(model, 2)
    assert call_of(model).session.is_searching()
    while is_searched_for(model):
        losses += train(model, 1)
    report = baechi_ext.report(model)
    assert report.plan is not None, report
    assert report.unplaced_calls[SEARCHED_FOR] >= 1
    assert "" not in report.unplaced_calls
    assert ASIDE in report.notes
    assert not call_of(model).session.is_searching()
    assert losses[:2] == train(same, 2)
    assert losses[2:] == [train(same, 1)[0] for _ in losses[2:]]


def test_where_the_search_fails_the_plan_is_searched_for_here() -> None:
    model = Towers()
    baechi_ext.parallelize(model, devices=2, time_limit=0.3)
    train(model, 2)
    call_of(model).session._aside.search._process.send_signal(signal.SIGKILL)
    while is_searched_for(model):
        train(model, 1)
    report = baechi_ext.report(model)
    assert report.plan is not None, report
    assert ASIDE not in report.notes


def test_a_module_that_is_unplaced_stops_its_search() -> None:
    model = Towers()
    baechi_ext.parallelize(model, devices=2)
    train(model, 2)
    process = call_of(model).session._aside.search._process
    baechi_ext.unplace(model)
    assert process.returncode == -signal.SIGKILL


def test_a_module_that_is_no_more_stops_its_search() -> None:
    model = baechi_ext.parallelize(Towers(), devices=2)
    train(model, 2)
    session, weight = call_of(model).session, weakref.ref(next(model.parameters()))
    process = session._aside.search._process
    del model
    gc.collect()
    assert process.returncode == -signal.SIGKILL
    assert weight() is None
    assert not session.is_searching()


def test_whoever_insists_on_placing_waits_for_the_plan() -> None:
    model = Towers()
    baechi_ext.parallelize(model, devices=2, time_limit=0.3, keep_placed=True)
    train(model, 2)
    assert baechi_ext.report(model).placed_steps == 1


def test_a_search_ends_with_its_training() -> None:
    script = """
import os, torch
from tests.runtime.test_search_process import Towers, train
import baechi_ext
from baechi_runtime.torch.calls.module_call import call_of
torch.set_num_threads(1)
model = Towers()
baechi_ext.parallelize(model, devices=2, time_limit=600.0)
train(model, 2)
print(call_of(model).session._aside.search._process.pid, flush=True)
os._exit(0)
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    there = Path("/proc", done.stdout.strip())
    for _ in range(600):
        if not there.exists() or "(zombie)" in (there / "status").read_text():
            return
        subprocess.run(["sleep", "0.1"], check=True)
    pytest.fail("it still searches a minute later")


def test_what_another_process_can_be_told() -> None:
    plain = PlanRequest("auto", options=PlaceOptions(seed=3, time_limit_seconds=7.0, worth=Worth(500.0, 0.02)))
    assert plan_from_json(plan_to_json(plain)) == plain
    assert is_serializable(PlanRequest("m_sct"))
    assert not is_serializable(PlanRequest("auto", initial_plan=PlanFile("plan.json", {})))
    assert not is_serializable(PlanRequest("auto", cost_factor=2.0))


def test_its_plan_is_of_the_step_that_one_host_gives_to_all_devices(tmp_path: Path) -> None:
    graph = graph_of({"a": 1.0, "b": 1.0})
    ops = {"a": OpProfile((1.0,), issue_us=50.0), "b": OpProfile((1.0,), issue_us=50.0)}
    profile = Profile(graph.fingerprint, dict(zip(graph.index, graph.op_digests, strict=True)), "cuda_event", 1, ops)
    asked = {
        "plan": plan_to_json(PlanRequest("auto", options=PlaceOptions(time_limit_seconds=0.1))),
        "graph": graph.to_json(),
        "profile": profile.to_json(),
        "cluster": Cluster.uniform(2).to_json(),
        "host": "one",
        "cache": str(tmp_path),
        "key": "k",
        "command": ["train"],
    }
    search(asked)
    kept = find_plan(tmp_path, "k", graph)
    assert kept is not None
    assert kept.plan.predicted_step_us == pytest.approx(100.0)
