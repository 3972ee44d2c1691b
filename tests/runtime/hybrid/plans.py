"""Small steps, and plans of them on groups: by chance, and by the placer from given times."""

from collections.abc import Iterator, Mapping
from random import Random
from unittest.mock import patch

import torch
from torch import fx

from baechi_ext.capture.torch_joint import INPUT, CaptureOptions, capture_joint
from baechi_ext.errors import InfeasibleError
from baechi_ext.hybrid.groups import Groups
from baechi_ext.hybrid.placer import HybridResult, hybrid
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.ir import Cluster, Device, Link, OpGraph
from baechi_ext.place.common import PlanResult
from baechi_ext.place.registry import place
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.tables import build_tables
from runtime.hybrid.calls import CallPlan, PlannedCall
from runtime.hybrid.program import is_seeded
from runtime.models.registry import ModelOptions, make_step
from runtime.models.torch import alexnet
from runtime.sharding.binding import bind, executable
from runtime.sharding.captured import captured_graph
from runtime.sharding.forward import ForwardGraph
from runtime.sharding.layout import mesh_shape
from runtime.sharding.ops import sharding_of
from runtime.step import TrainingStep, optimizer_spec
from tests.runtime.sharding.small_models import CASES

OPTIMIZER = optimizer_spec("momentum", 0.01)
MODELS = {
    "alexnet": ModelOptions(batch_size=4, image_size=63),
    "wide_towers": ModelOptions(batch_size=4, image_size=8),
    "rnnlm": ModelOptions(batch_size=4, vocab_size=64, rnn_units=16, max_seq_length=8, rnn_chunk=4),
    "transformer": ModelOptions(batch_size=4, vocab_size=64, max_seq_length=8, num_layers=1, d_model=16, d_ff=32, num_heads=4),
}
NEAR, FAR = Link(1e-5, 1.0), Link(1e-3, 200.0)


def step_of(name: str) -> TrainingStep:
    """A small module or model."""
    if name in MODELS:
        with patch.object(alexnet, "UNITS", 64):
            return make_step(name, MODELS[name], OPTIMIZER)
    torch.manual_seed(0)
    module, inputs = CASES[name]()
    return TrainingStep(name, module, inputs, OPTIMIZER)


def by_chance(forward: ForwardGraph, groups: Groups, random: Random) -> CallPlan:
    """Calls on groups, in splits and in an order by chance; what shares a weight, a buffer or the random numbers is together."""
    captured = captured_graph(forward)
    size = len(groups[0])
    tables = build_tables(captured.graph, Machine(devices=size, tera_flops=0.001, gigabytes_per_second=2.0))
    tables = executable(tables, bind(forward, captured), mesh_shape(size))
    strategy = tables.strategy([random.randrange(n) for n in tables.sizes])
    calls = {call.name: call for call in forward.nodes}
    group = {}
    planned = {}
    for node, configuration in zip(captured.graph.nodes, strategy, strict=True):
        call = calls[node.name]
        if not _is_view(call):
            shared = list(_shared(call, forward.parameters | forward.buffers))
            own = next((group[what] for what in shared if what in group), random.randrange(len(groups)))
            group |= dict.fromkeys(shared, own)
            splits = {axis.name: parts for axis, parts in zip(node.axes, configuration, strict=True) if parts > 1}
            planned[node.name] = PlannedCall(own, splits, random.randrange(1000), random.randrange(1000))
    return CallPlan(groups, planned)


def _shared(call: fx.Node, state: Mapping[str, str]) -> Iterator[str]:
    """The parameters and buffers that a call reads, through views, too; and the random numbers."""
    if is_seeded(call):
        yield "random"
    for node in call.all_input_nodes:
        if node.name in state:
            yield state[node.name]
        elif _is_view(node):
            yield from _shared(node, state)


def _is_view(call: fx.Node) -> bool:
    returns = getattr(getattr(call.target, "_schema", None), "returns", ())
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _on_pairs(graph: OpGraph, cluster: Cluster) -> PlanResult:
    if len(cluster) != 2:
        raise InfeasibleError("only pairs are wanted", status="unknown")
    return place("m_etf", graph, cluster)


def by_placer(step: TrainingStep) -> CallPlan:
    """The calls of `placed`."""
    result = placed(step)
    return CallPlan.of(result.plan, result.timeline)


def placed(step: TrainingStep) -> HybridResult:
    """The placer's plan of a step whose ops all take as long, on two pairs of devices that are far from each other."""
    graph, _ = capture_joint(step.module, step.inputs, CaptureOptions(OPTIMIZER.name, OPTIMIZER.slots), step.name)
    sharding = sharding_of(step, graph)
    ops = [{**node, "compute_us": 0.0 if node["op"] == INPUT else 500.0} for node in graph.to_json()["nodes"]]
    graph = OpGraph.from_json(graph.to_json() | {"nodes": ops})
    near = {(f"d{i}", f"d{j}"): NEAR for pair in ((0, 1), (2, 3)) for i in pair for j in pair if i != j}
    cluster = Cluster(tuple(Device(f"d{i}") for i in range(4)), FAR, near)
    result = hybrid(graph, cluster, sharding, _on_pairs)
    assert isinstance(result.plan, HybridPlan), result.notes
    return result
