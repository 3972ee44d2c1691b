"""The effects of Baechi's flags on a run."""

from pathlib import Path

import pytest

from baechi_ext.ir import Link, OpGraph, Plan
from baechi_ext.simulate import simulate
from baechi_runtime.cli.flags.train import train_request
from baechi_runtime.cli.main import make_parser
from tests.runtime import forked


def test_they_reach_the_request() -> None:
    argv = ["--memory_fraction=0.8", "--placer_memory_fraction=0.5", "--comm_cost_factor=3", "--cost_factor=2", "--logdir=here"]
    request = train_request(make_parser().parse_args(["train", *argv]))
    assert request.memory_fraction == pytest.approx(0.4)
    assert (request.comm_cost_factor, request.plan.cost_factor, request.out) == (3, 2, "here")
    assert not request.log_device_placement
    assert train_request(make_parser().parse_args(["train", "--log_placer_device_placement"])).log_device_placement


def test_a_run_with_them(tmp_path: Path) -> None:
    model = ["--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--num_steps=1", "--placement_method=m_etf"]
    costs = ["--comm_cost_coeffs=0.5,4", "--comm_cost_factor=2", "--cost_factor=1.5", "--log_device_placement=True"]
    done = forked.run("train", *model, *costs, f"--logdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "with 2 times the links' costs" in done.stdout
    assert "planned with costs off by up to 1.5 times" in done.stdout
    graph = OpGraph.load(tmp_path / "graph.json")
    plan = Plan.load(tmp_path / "plan.json", graph)
    shown = [line.split(" -> ") for line in done.stderr.splitlines() if " -> " in line]
    devices = [device.name for device in plan.cluster.devices]
    assert shown == [[op.id, devices[d]] for op, d in zip(graph.ops, plan.placement, strict=True)]
    assert [plan.cluster.link(0, 1), plan.cluster.link(1, 0)] == [Link(us_per_byte=1, latency_us=8)] * 2
    assert plan.options["cost_factor"] == 1.5
    assert simulate(graph, plan.cluster, plan.placement, plan.priority).makespan_us == plan.predicted_step_us
