"""The ops of a captured step belong to the calls that they come from: forward, backward and update."""

from collections import defaultdict

import pytest
import torch

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.hybrid.placer import hybrid
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.hybrid.sharding import Sharding
from baechi_ext.ir import Cluster, Link, Op, OpGraph
from baechi_ext.place.registry import place
from baechi_runtime.models.training_step import TrainingStep, optimizer_spec
from baechi_runtime.sharding.ops import sharding_of
from baechi_runtime.torch.backend import Captured
from tests.runtime.sharding.small_models import CASES


def captured(name: str) -> tuple[OpGraph, Sharding]:
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    step = TrainingStep(name, module, inputs, optimizer_spec("momentum", 0.1))
    graph, binding = capture_joint(module, inputs, CaptureOptions("momentum", 1), name)
    return graph, sharding_of(Captured(graph, graph, None, step, binding))


def ops_by_node(graph: OpGraph, sharding: Sharding) -> dict[str, list[Op]]:
    found = defaultdict(list)
    for op, n in zip(graph.ops, sharding.node_of, strict=True):
        found["" if n is None else sharding.graph.nodes[n].name].append(op)
    return found


def test_ops_of_layers() -> None:
    found = ops_by_node(*captured("mlp"))
    kinds = {name: sorted(op.op.removesuffix(".default") for op in ops) for name, ops in found.items()}
    assert kinds["linear"] == ["aten.addmm", "aten.mm", "aten.sum.dim_IntList", "optimizer.momentum", "optimizer.momentum"]
    assert kinds["linear_1"].count("aten.mm") == 2
    assert kinds["relu"] == ["aten.relu", "aten.threshold_backward"]
    losses = ["aten._log_softmax", "aten._log_softmax_backward_data", "aten.nll_loss_backward", "aten.nll_loss_forward"]
    assert kinds["cross_entropy_loss"] == losses
    assert set(kinds[""]) == {"input"}


@pytest.mark.parametrize("name", CASES)
def test_every_op_that_computes_belongs_to_a_call(name: str) -> None:
    graph, sharding = captured(name)
    found = ops_by_node(graph, sharding)
    assert {op.op for op in found[""]} <= {"input"}
    for op, n in zip(graph.ops, sharding.node_of, strict=True):
        forward = graph.index.get(op.forward_op or "")
        if op.phase == "update" and forward is not None:
            assert n == sharding.node_of[forward]


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_real_steps_on_groups(name: str) -> None:
    """Costs are given; what is held and what is moved comes from the capture."""
    graph, sharding = captured(name)
    graph = OpGraph.from_json(graph.to_json())
    ops = [{**node, "compute_us": 0.0 if node["op"] == "input" else 500.0} for node in graph.to_json()["nodes"]]
    graph = OpGraph.from_json(graph.to_json() | {"nodes": ops})
    result = hybrid(graph, Cluster.uniform(2, link=Link(0.001, 1.0)), sharding, lambda graph, cluster: place("m_etf", graph, cluster))
    assert isinstance(result.plan, HybridPlan)
    alone = place("single", graph, Cluster.uniform(1))
    assert result.predicted_step_us < 0.75 * alone.predicted_step_us
    assert max(result.plan.peak_memory_bytes) < alone.plan.peak_memory_bytes[0]
    assert result.plan.of_groups.graph.order == graph.order
