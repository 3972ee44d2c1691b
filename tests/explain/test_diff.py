"""Differences of two plans of one graph."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import MismatchError
from baechi_ext.explain import diff_plans
from baechi_ext.ir import Cluster, Device, Link, Plan
from baechi_ext.simulate import simulate
from tests.build import cluster_of, graph_of, with_memory
from tests.explain.plans import plan_of, plans

GRAPH = graph_of(
    {"a": 10, "b": 6, "c": 4},
    ("a", "c", 4),
    persistent_bytes={"a": 100, "b": 20},
    module={"a": "net.one", "b": "net.one", "c": "net.two"},
)


@given(plan=plans())
def test_equal_plans_do_not_differ(plan: Plan) -> None:
    diff = diff_plans(plan, plan)
    assert diff.is_empty
    value = diff.to_json()
    assert value["same"] is True
    assert (value["moved"], value["modules"], value["reordered"], value["cluster_changes"]) == ([], [], [], [])
    assert value["before"] == value["after"]
    assert value["ranks_differ"] == (None if plan.priority is None else 0)


@given(plan=plans(), data=st.data())
def test_moved_ops_are_those_on_other_devices(plan: Plan, data: st.DataObject) -> None:
    n, devices = len(plan.graph), st.integers(0, len(plan.cluster) - 1)
    other = replace(plan, placement=tuple(data.draw(st.lists(devices, min_size=n, max_size=n))))
    diff = diff_plans(plan, other)
    moved = [v for v in range(n) if plan.placement[v] != other.placement[v]]
    assert list(diff.moved) == moved
    assert diff.moved_us == sum(plan.graph.ops[v].compute_us for v in moved)
    assert sum(module.ops for module in diff.modules) == len(moved)
    assert diff.after.makespan_us == simulate(plan.graph, plan.cluster, other.placement, plan.priority).makespan_us
    assert not set(diff.moved) & set(diff.reordered)
    json.dumps(diff.to_json(), allow_nan=False)
    assert len(diff_plans(other, plan).moved) == len(moved)


def test_by_module() -> None:
    diff = diff_plans(plan_of(GRAPH, cluster_of(2), (0, 0, 0)), plan_of(GRAPH, cluster_of(2), (1, 0, 1)))
    assert [(m.name, m.source, m.target, m.ops, m.of_ops, m.compute_us, m.persistent_bytes) for m in diff.modules] == [
        ("net.one", "device:0", "device:1", 1, 2, 10, 100),
        ("net.two", "device:0", "device:1", 1, 1, 4, 0),
    ]
    assert (diff.moved_us, diff.moved_bytes) == (14, 100)
    assert diff.to_json()["moved"][0] == {"op": "a", "source": "device:0", "target": "device:1"}
    assert (diff.to_json()["before"]["makespan_us"], diff.to_json()["after"]["makespan_us"]) == (20, 14)


def test_by_kind_where_no_module_is_known() -> None:
    graph = graph_of({"a": 1, "b": 1})
    diff = diff_plans(plan_of(graph, cluster_of(2), (0, 0)), plan_of(graph, cluster_of(2), (0, 1)))
    assert [m.name for m in diff.modules] == ["test"]


def test_another_order() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1})
    first, second = (plan_of(graph, cluster_of(2), (0, 0, 0, 0), priority) for priority in ((0, 1, 2, 3), (1, 2, 3, 0)))
    diff = diff_plans(first, second)
    assert [graph.ops[v].id for v in diff.reordered] == ["d"]  # before the others now: one op, not four
    assert (diff.priorities, diff.ranks_differ, diff.moved, diff.is_empty) == ((True, True), 4, (), False)
    assert diff_plans(first, replace(first, priority=None)).priorities == (True, False)
    scaled = replace(first, priority=(0, 10, 20, 30))
    assert (diff_plans(first, scaled).ranks_differ, diff_plans(first, scaled).is_empty) == (0, True)


def test_what_placement_and_priorities_do_alone() -> None:
    # Device 0 runs a and b; c waits for a's 4 bytes. A puts b first, B puts b elsewhere and a first.
    first, second = plan_of(GRAPH, cluster_of(3), (0, 0, 1), (1, 0, 2)), plan_of(GRAPH, cluster_of(3), (0, 2, 1), (0, 1, 2))
    diff = diff_plans(first, second)
    assert (diff.before.makespan_us, diff.after.makespan_us) == (24, 18)
    assert diff.crossed is not None
    assert (diff.crossed.placement_after_us, diff.crossed.priority_after_us) == (18, 18)


# Clusters


def test_devices_go_by_name() -> None:
    one, other = (Cluster(tuple(map(Device, names)), Link(1.0)) for names in (("x", "y"), ("y", "x")))
    diff = diff_plans(plan_of(GRAPH, one, (0, 1, 0)), plan_of(GRAPH, other, (1, 0, 1)))
    assert (diff.moved, diff.cluster_changes, diff.crossed) == ((), (), None)
    assert diff.is_empty


def test_devices_of_other_names_go_by_position() -> None:
    one, other = (Cluster(tuple(map(Device, names)), Link(1.0)) for names in (("x", "y"), ("p", "q")))
    diff = diff_plans(plan_of(GRAPH, one, (0, 1, 0)), plan_of(GRAPH, other, (0, 1, 1)))
    assert [GRAPH.ops[v].id for v in diff.moved] == ["c"]
    assert diff.cluster_changes == ("device 'x' is called 'p'", "device 'y' is called 'q'")


def test_what_clusters_differ_in() -> None:
    one = Cluster((Device("x", 100), Device("y")), Link(1.0, 2.0))
    other = Cluster((Device("x", 50, 2.0), Device("z")), Link(1.0, 3.0), parallel_transfers=True)
    diff = diff_plans(plan_of(GRAPH, one, (0, 1, 0)), plan_of(GRAPH, other, (0, 1, 0)))
    assert [GRAPH.ops[v].id for v in diff.moved] == ["b"]
    assert diff.cluster_changes == (
        "device 'y' is gone",
        "the speed of 'x' is 2, was 1",
        "the memory of 'x' is 50 bytes, was 100 bytes",
        "device 'z' is new",
        "transfers of one device are parallel now",
    )
    same = replace(one, default=Link(0.5, 2.0))
    changes = diff_plans(plan_of(GRAPH, one, (0, 1, 0)), plan_of(GRAPH, same, (0, 1, 0))).cluster_changes
    assert len(changes) == 1
    assert changes[0].startswith("2 of 2 links differ, such as 'x' -> 'y': {'us_per_byte': 0.5")


def test_devices_that_only_change_their_names() -> None:
    first, second = plan_of(GRAPH, cluster_of(3), (0, 1, 2)), plan_of(GRAPH, cluster_of(3), (2, 1, 1))
    diff = diff_plans(first, second)
    assert (len(diff.moved), diff.renamed, diff.moved_renamed) == (2, (2, 1, 0), 1)
    limited = with_memory(cluster_of(3), 500)
    unlike = replace(limited, devices=(Device("device:0", 400), *limited.devices[1:]))
    assert diff_plans(plan_of(GRAPH, unlike, (0, 1, 2)), plan_of(GRAPH, unlike, (2, 1, 1))).renamed is None


def test_plans_of_other_graphs_are_refused() -> None:
    with pytest.raises(MismatchError, match="the two plans are of different graphs"):
        diff_plans(plan_of(GRAPH, cluster_of(2), (0, 0, 0)), plan_of(graph_of({"a": 1}), cluster_of(2), (0,)))
