"""Where a search begins with a step over parts of a batch, and what it moves as one."""

from dataclasses import replace

import pytest

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.place.blocks import block_levels
from baechi_ext.place.common import PlaceOptions, begin
from baechi_ext.place.parted import _work_of_parts, ends_of_parts
from baechi_ext.place.registry import place
from baechi_ext.place.searching import cheap_start
from baechi_ext.place.trial import try_orders


def training_step(parts: int, layers: int = 4, weight_bytes: int = 100, speed: float = 10.0) -> OpGraph:
    """Layers of one op each, forward and backward, for each part; a parameter, sums of gradients and an update for each layer."""
    ops, edges = [], []
    for i in range(layers):
        ops.append(Op(f"parameter.{i}", "parameter", persistent_bytes=weight_bytes, resident=True, colocation=f"weight {i}"))
    for k in range(parts):
        for i in range(layers):
            ops.append(Op(f"forward{i}@{k}", compute_us=speed, part=k))
            edges.append((f"parameter.{i}", f"forward{i}@{k}", weight_bytes, "w"))
            if i:
                edges.append((f"forward{i - 1}@{k}", f"forward{i}@{k}", 10, "x"))
        for i in reversed(range(layers)):
            ops.append(Op(f"backward{i}@{k}", phase="backward", compute_us=2 * speed, part=k, forward_op=f"forward{i}@{k}"))
            edges.append((f"forward{i}@{k}", f"backward{i}@{k}", 10, "y"))
            if i < layers - 1:
                edges.append((f"backward{i + 1}@{k}", f"backward{i}@{k}", 10, "g"))
    for i in range(layers):
        ops.append(Op(f"update.{i}", phase="update", compute_us=1.0, colocation=f"weight {i}"))
        edges += [(f"backward{i}@{k}", f"update.{i}", weight_bytes, "gradient") for k in range(parts)]
        edges.append((f"parameter.{i}", f"update.{i}", weight_bytes, "w"))
    return OpGraph.from_edges(ops, edges)


def ends(graph: OpGraph, cluster: Cluster) -> dict[str, dict[str, int]]:
    found = ends_of_parts(begin("auto", graph, cluster, PlaceOptions()))
    return {name: dict(zip(graph.index, proposal.placement, strict=True)) for name, proposal in found.items()}


def test_each_device_gets_a_part_and_as_many_parameters() -> None:
    found = ends(training_step(2), Cluster.uniform(2))["data parallel"]
    assert {found[op] for op in found if op.endswith("@0")} == {0}
    assert {found[op] for op in found if op.endswith("@1")} == {1}
    assert sorted(found[f"parameter.{i}"] for i in range(4)) == [0, 0, 1, 1]
    assert all(found[f"update.{i}"] == found[f"parameter.{i}"] for i in range(4))


def test_a_device_twice_as_fast_gets_twice_as_many_parts() -> None:
    cluster = Cluster((Device("fast", speed=2.0), Device("slow")), Link(0.0, 1.0))
    found = ends(training_step(3), cluster)["data parallel"]
    assert [found[f"forward0@{k}"] for k in range(3)] == [0, 0, 1]


def test_parts_may_have_any_numbers() -> None:
    """The parts that there are count: something for each number up to the largest could take all memory."""
    graph = training_step(2)
    far = graph.replace_ops([replace(op, part=10**6) if op.part == 0 else op for op in graph.ops])
    assert _work_of_parts(far) == {1: 120.0, 10**6: 120.0}
    found = ends(far, Cluster.uniform(2))["data parallel"]
    assert {found[op] for op in found if op.endswith("@0")} == {1}
    assert {found[op] for op in found if op.endswith("@1")} == {0}


def test_stages_hold_all_parts_of_their_layers() -> None:
    found = ends(training_step(3), Cluster.uniform(2))["pipeline"]
    for i in range(4):
        stage = 0 if i < 2 else 1
        assert {found[f"{what}{i}@{k}"] for k in range(3) for what in ("forward", "backward")} == {stage}
        assert found[f"parameter.{i}"] == found[f"update.{i}"] == stage


def test_blocks_of_all_parts_and_of_each_part_hold_every_op_once() -> None:
    graph = training_step(3)
    levels = block_levels(graph, Cluster.uniform(2))
    for blocks in levels:
        assert sorted(v for block in blocks for v in block) == list(range(len(graph)))
    sets = [{frozenset(graph.ops[v].id for v in block) for block in blocks} for blocks in levels]
    assert any(frozenset(f"forward0@{k}" for k in range(3)) in blocks for blocks in sets)
    assert any(frozenset(op.id for op in graph.ops if op.part == 1) in blocks for blocks in sets)


@pytest.mark.parametrize(("weight_bytes", "expected"), [(0, "data parallel"), (10**6, "pipeline")])
def test_auto_is_as_good_as_the_better_end(weight_bytes: int, expected: str) -> None:
    """Dear weights stay where they are, cheap ones go to every part."""
    graph, cluster = training_step(4, weight_bytes=weight_bytes), Cluster.uniform(2, link=Link(1e-3, 0.1))
    task = begin("auto", graph, cluster, PlaceOptions())
    worth = {name: try_orders(task.simulator, p.placement, p.priorities).makespan_us for name, p in ends_of_parts(task).items()}
    assert min(worth, key=lambda name: worth[name]) == expected
    assert place("auto", graph, cluster, PlaceOptions(time_limit_seconds=0.5)).predicted_step_us <= worth[expected]


def test_a_whole_batch_has_no_ends() -> None:
    graph = OpGraph.from_edges([Op("a", compute_us=1.0), Op("b", compute_us=1.0)], [("a", "b", 1, "t")])
    assert not graph.is_parted
    assert training_step(2).is_parted


def test_plans_of_parts_that_do_not_fit_keep_no_other_from_being_looked_for() -> None:
    graph, cluster = training_step(3, layers=6, weight_bytes=37), Cluster.uniform(2, memory_bytes=279)
    task = begin("auto", graph, cluster, PlaceOptions(time_limit_seconds=2))
    excess = {
        name: sum(try_orders(task.simulator, p.placement, p.priorities).excess_bytes) for name, p in ends_of_parts(task).items()
    }
    assert min(excess.values()) > 200
    assert sum(cheap_start(task).trial.excess_bytes) < 20
