"""The contract a placer relies on, which holds for every grouper and every placer type, with and without backward ops."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.errors import OptionError
from baechi_ext.group.grouping import Grouping, GroupOptions
from baechi_ext.group.registry import GROUPERS, PLACER_TYPES, group
from baechi_ext.ir.cluster import Cluster, Link
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import placement_violations
from baechi_ext.simulate import lower_bound_us, simulate
from tests.group.training_graphs import PROPERTY, any_graphs, chain, names, small, training_graphs

CLUSTER = Cluster.uniform(3, link=Link(us_per_byte=0.5, latency_us=1.0))
CONTRACT = settings(PROPERTY, max_examples=25)
ANY = st.one_of(training_graphs(), any_graphs())

every_choice = pytest.mark.parametrize(
    "choice",
    [
        pytest.param({"grouper": g, "placer_type": p, "only_forward": f}, id=f"{g}-{p}{'-only_forward' * f}")
        for g in GROUPERS
        for p in PLACER_TYPES
        for f in (False, True)
    ]
    + [
        pytest.param({"grouper": g, "placer_type": p, "only_forward": f, "options": o}, id=f"{g}-{p}{'-only_forward' * f}-{name}")
        for g, p, f, name, o in (
            ("tf", "default", False, "important", GroupOptions(only_important_ops=True)),
            ("coplace", "colocation", True, "important", GroupOptions(only_important_ops=True)),
            ("tf", "colocation", False, "all_edges", GroupOptions(consider_all_edges=True)),
            ("tf", "colocation", False, "resolve", GroupOptions(resolve_cycle=True)),
            ("coplace", "colocation", True, "resolve", GroupOptions(resolve_cycle=True, only_important_ops=True)),
            ("tf", "fusion", False, "disjoint", GroupOptions(check_disjoint_paths=True)),
            ("coplace", "fusion", False, "cycles", GroupOptions(allow_cycle=True)),
            ("tf", "fusion", True, "cycles", GroupOptions(allow_cycle=True)),
        )
    ],
)


def turns_edges(choice) -> bool:
    """True if tensors sent back are counted as if they were sent forward, by each of their readers on its own."""
    options = choice.get("options", GroupOptions())
    return choice["only_forward"] or options.resolve_cycle or options.allow_cycle


def cut_bytes(graph: OpGraph, placement) -> int | float:
    """Bytes that have to be moved: each tensor once per device that reads it and does not make it."""
    return sum(t.bytes * len({placement[w] for w in t.readers} - {placement[t.producer]}) for t in graph.tensors)


def as_json(grouping: Grouping) -> str:
    return json.dumps([grouping.coarse.to_json(), grouping.members])


@every_choice
@CONTRACT
@given(ANY)
def test_expand_covers_each_op_once(choice, graph):
    grouping = group(graph, cluster=Cluster.uniform(2), **choice)
    assert grouping.fine is graph
    assert sorted(v for members in grouping.members for v in members) == list(range(len(graph)))
    group_of = grouping.expand(range(len(grouping.coarse)))
    assert all(group_of[v] == g for g, members in enumerate(grouping.members) for v in members)
    rank = {v: i for i, v in enumerate(graph.order)}
    assert all(list(members) == sorted(members, key=rank.get) for members in grouping.members)


@every_choice
@CONTRACT
@given(ANY)
def test_times_and_persistent_bytes_are_sums(choice, graph):
    grouping = group(graph, cluster=Cluster.uniform(2), **choice)
    for op, members in zip(grouping.coarse.ops, grouping.members, strict=True):
        fine = [graph.ops[v] for v in members]
        assert op.compute_us == sum(m.compute_us for m in fine)
        assert op.persistent_bytes == sum(m.persistent_bytes for m in fine)
        assert op.temporary_bytes >= max(m.temporary_bytes for m in fine)


@every_choice
@CONTRACT
@given(ANY, st.data())
def test_a_coarse_cut_costs_what_the_fine_cut_costs(choice, graph, data):
    grouping = group(graph, cluster=Cluster.uniform(2), **choice)
    n = len(grouping.coarse)
    placement = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    coarse, fine = cut_bytes(grouping.coarse, placement), cut_bytes(graph, grouping.expand(placement))
    assert coarse >= fine if turns_edges(choice) else coarse == fine


@every_choice
@CONTRACT
@given(ANY, st.data())
def test_a_legal_coarse_placement_expands_to_a_legal_fine_one_that_runs(choice, graph, data):
    grouping = group(graph, cluster=Cluster.uniform(2), **choice)
    coarse = grouping.coarse
    device: dict[str, int] = {}
    for op in coarse.ops:
        device.setdefault(op.colocation or f"op {op.id}", data.draw(st.integers(0, 2)))
    placement = [device[op.colocation or f"op {op.id}"] for op in coarse.ops]
    expanded = grouping.expand(placement)
    assert placement_violations(coarse, CLUSTER, placement) == placement_violations(graph, CLUSTER, expanded) == []
    assert len(simulate(coarse, CLUSTER, placement).started) == len(coarse)
    timeline = simulate(graph, CLUSTER, expanded)
    assert len(timeline.started) == len(graph)
    assert timeline.makespan_us >= lower_bound_us(graph, CLUSTER)


@every_choice
@CONTRACT
@given(ANY)
def test_the_input_is_untouched_and_the_result_the_same_each_time(choice, graph):
    graph, same = (OpGraph.from_json(graph.to_json()) for _ in range(2))
    before = graph.to_json()
    first = group(graph, **choice)
    assert graph.to_json() == before
    assert as_json(first) == as_json(group(graph, **choice)) == as_json(group(same, **choice))


def test_the_result_does_not_depend_on_hash_seeds():
    code = (
        "import json, sys; from baechi_ext.group.registry import group; from baechi_ext.ir.op_graph import OpGraph\n"
        "graph = OpGraph.from_json(json.load(sys.stdin))\n"
        "for p in ('colocation', 'fusion'): print(json.dumps(group(graph, grouper='coplace', placer_type=p).coarse.to_json()))"
    )
    text = json.dumps(chain(12).to_json())
    printed = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", code], input=text, env=environment, capture_output=True, text=True, check=True)
        printed.append(done.stdout)
    assert printed[0] == printed[1] != ""


def test_default_without_merging_is_the_graph_itself():
    graph = chain(2)
    assert group(graph).coarse is graph


def test_more_devices_get_smaller_merged_groups():
    ids = [f"op{i:02}" for i in range(33)]
    graph = small(" ".join(f"{a}>{b}" for a, b in zip(ids, ids[1:], strict=False)), compute_us=dict.fromkeys(ids[:32], 1.0))
    largest = {}
    for n in (1, 2, 4):
        groups = group(graph, grouper="coplace", cluster=Cluster.uniform(n)).coarse.groups
        largest[n] = max(sum(graph.ops[v].compute_us for v in members) for members in groups.values())
    assert largest == {1: 8, 2: 4, 4: 2}


def test_only_forward_chains_are_seen_by_the_grouper():
    graph = chain(4)  # 21 us in all: with one device a merged group may take 5.25, as a convolution (3) and a relu (2) do
    grouping = group(graph, grouper="coplace", placer_type="colocation", only_forward=True, cluster=Cluster.uniform(1))
    layers = [[f"conv{i}", f"relu{i}", f"relu{i}_bw", f"conv{i}_bw", f"update{i}"] for i in range(1, 5)]
    assert names(graph, grouping.members) == [*layers, ["loss"]]
    assert [op.colocation for op in grouping.coarse.ops] == ["w1", "w2", "w3", "w4", None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grouper": "none"}, "unknown grouper 'none'; choose one of tf, coplace, grain"),
        ({"placer_type": "none"}, "unknown placer type 'none'; choose one of default, colocation, fusion"),
    ],
)
def test_an_option_nothing_can_be_done_with_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        group(chain(1), **options)
