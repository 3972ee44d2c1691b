"""The promises of the generated cases: the same on every machine, the ratio they are named for, a plan that fits."""

from dataclasses import replace

import pytest

from baechi_ext.ir.plan import memory_violations, placement_violations
from baechi_ext.simulate import simulate
from benchmarks.families import HELD_OUT, SETS, TIGHT, TUNING, Case, known_plan, make_cluster

CASES = [*TUNING, *HELD_OUT]
each_quick_case = pytest.mark.parametrize("case", [case for case in CASES if case.ops <= 1000], ids=lambda case: case.name)


@each_quick_case
def test_size_and_ratio(case: Case) -> None:
    graph, link = case.graph, case.cluster.default
    assert 0.85 * case.ops <= len(graph) <= 1.2 * case.ops
    transfer_us = sum(link.transfer_us(t.bytes) for t in graph.tensors) / len(graph.tensors)
    assert transfer_us == pytest.approx(case.ccr * graph.total_compute_us() / len(graph))


@each_quick_case
def test_a_plan_fits(case: Case) -> None:
    limits = {device.memory_bytes for device in case.cluster.devices}
    assert (limits == {None}) == (case.memory == "loose")
    loose = replace(case.cluster, devices=tuple(replace(d, memory_bytes=None) for d in case.cluster.devices))
    placement, priority, peaks = known_plan(case.graph, loose)
    assert placement_violations(case.graph, case.cluster, placement) == []
    assert simulate(case.graph, case.cluster, placement, priority).peak_memory_bytes == peaks
    assert memory_violations(case.cluster, peaks) == []
    if case.memory == "tight":
        assert limits.pop() <= TIGHT * max(peaks) + 1


@each_quick_case
def test_the_same_again(case: Case) -> None:
    again = replace(case)
    assert (again.graph, again.cluster) == (case.graph, case.cluster)


def test_a_graph_does_not_depend_on_the_machine() -> None:
    graph = TUNING[0].graph
    assert (TUNING[0].name, graph.fingerprint[:12]) == ("layered-20-1-2-loose", "a5a4561c6610")


def test_the_sets_share_no_graph() -> None:
    assert {case.seed for case in TUNING} & {case.seed for case in HELD_OUT} == set()
    assert {case.family for case in HELD_OUT} - {case.family for case in TUNING} == {"wavefront", "recurrent", "transformer"}
    for cases in SETS.values():
        assert len({case.name for case in cases}) == len(cases)


def test_training_graphs_look_like_training_steps() -> None:
    graph = next(case.graph for case in TUNING if case.name == "training-500-0.1-2-tight")
    phases = [op.phase for op in graph.ops]
    assert phases.count("forward") == phases.count("backward") > 2 * phases.count("update") > 0
    for members in graph.groups.values():
        held = [graph.ops[v] for v in members if graph.ops[v].persistent_bytes]
        assert sorted(op.phase for op in held) == ["forward", "update"]  # the parameter, and its optimizer's slot
        assert {graph.ops[v].phase for v in members} == {"forward", "backward", "update"}
    assert max(map(len, graph.groups.values())) > 3  # a parameter that two ops share


def test_clusters() -> None:
    case = TUNING[0]
    nodes = make_cluster("nodes", case.cluster.default)
    assert nodes.link(0, 1) == case.cluster.default
    assert nodes.link(0, 5).latency_us == nodes.link(5, 0).latency_us == 5 * case.cluster.default.latency_us
    assert make_cluster("parallel", case.cluster.default).parallel_transfers
    assert len({device.speed for device in make_cluster("speeds", case.cluster.default).devices}) == 3
    assert len(make_cluster("14", case.cluster.default)) == 14
