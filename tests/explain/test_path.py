"""The critical path and the data path of steps worked out by hand, and what must hold for any step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.explain.path import (
    COMPUTE,
    DATA,
    DEVICE,
    DEVICE_BUSY,
    HANDLING,
    HOST,
    LINK,
    LINK_BUSY,
    OP,
    START,
    TRANSFER,
    Paths,
    Stretch,
    critical_ops,
)
from baechi_ext.ir import Cluster, Device, Link, OpGraph
from baechi_ext.simulate import Timeline, simulate
from tests.build import cluster_of, graph_of
from tests.simulate.strategies import cases


def said(timeline: Timeline, path: tuple[Stretch, ...]) -> list[tuple[str, str, float, float, str]]:
    return [(s.kind, timeline.graph.ops[s.op].id, s.start_us, s.end_us, s.cause) for s in path]


def parts(paths: Paths, path: tuple[Stretch, ...]) -> dict[tuple, float]:
    return {(part.kind, part.device, part.target): part.us for part in paths.parts(path)}


def test_what_each_op_waits_for() -> None:
    # Device 0: a 0-2, b 2-7. a's 4 bytes take 2-6 to device 1, where d runs 0-9 and c 9-10.
    graph = graph_of({"a": 2, "b": 5, "d": 9, "c": 1}, ("a", "c", 4))
    paths = Paths(simulate(graph, cluster_of(2), (0, 0, 1, 1), (0, 1, 2, 3)))
    assert said(paths.timeline, paths.critical()) == [(OP, "d", 0, 9, START), (OP, "c", 9, 10, DEVICE)]
    assert said(paths.timeline, paths.data()) == [
        (OP, "a", 0, 2, START),
        (TRANSFER, "a", 2, 6, DATA),
        (DEVICE_BUSY, "c", 6, 9, DATA),
        (OP, "c", 9, 10, DATA),
    ]
    assert parts(paths, paths.critical()) == {(COMPUTE, 1, None): 10}
    assert parts(paths, paths.data()) == {(COMPUTE, 0, None): 2, (TRANSFER, 0, 1): 4, (DEVICE_BUSY, 1, None): 3, (COMPUTE, 1, None): 1}


def test_a_transfer_waits_for_another_one() -> None:
    # a 0-1 sends 10 bytes 1-11 to x; b 1-2 on the same device sends 5, requested at 2, to y on device 2: 11-16; y 16-17.
    graph = graph_of({"a": 1, "b": 1, "x": 1, "y": 1}, ("a", "x", 10), ("b", "y", 5))
    paths = Paths(simulate(graph, cluster_of(3), (0, 0, 1, 2), (0, 1, 2, 3)))
    assert said(paths.timeline, paths.critical()) == [
        (OP, "a", 0, 1, START),
        (TRANSFER, "a", 1, 11, DATA),
        (TRANSFER, "b", 11, 16, LINK),
        (OP, "y", 16, 17, DATA),
    ]
    assert said(paths.timeline, paths.data()) == [
        (DEVICE_BUSY, "b", 0, 1, DATA),
        (OP, "b", 1, 2, START),
        (LINK_BUSY, "b", 2, 11, DATA),
        (TRANSFER, "b", 11, 16, DATA),
        (OP, "y", 16, 17, DATA),
    ]


def test_the_time_that_transfers_take_from_devices() -> None:
    # a computes 3 and sends for 2, b receives for 1 and computes 4.
    graph = graph_of({"a": 3, "b": 4}, ("a", "b", 1))
    link = Link(us_per_byte=5, send_us=2, receive_us=1)
    paths = Paths(simulate(graph, Cluster((Device("x"), Device("y")), link), (0, 1)))
    assert parts(paths, paths.critical()) == {
        (COMPUTE, 0, None): 3,
        (HANDLING, 0, None): 2,
        (TRANSFER, 0, 1): 5,
        (HANDLING, 1, None): 1,
        (COMPUTE, 1, None): 4,
    }


def test_phases_are_told_apart() -> None:
    graph = graph_of({"a": 1, "b": 2, "c": 4}, ("a", "b", 0), ("b", "c", 0), phase={"b": "backward", "c": "update"})
    paths = Paths(simulate(graph, cluster_of(1), (0, 0, 0)))
    assert [(part.phase, part.us) for part in paths.parts(paths.critical())] == [("update", 4), ("backward", 2), ("forward", 1)]


@pytest.mark.parametrize(
    ("placement", "path"),
    [
        ((0, 0, 0, 0), "acbd"),  # one device: whatever runs is on it
        ((0, 1, 0, 0), "abd"),  # b's two transfers outweigh c
        ((0, 0, 1, 0), "acd"),
    ],
)
def test_the_critical_path_is_what_holds_the_step_up(placement: tuple[int, ...], path: str) -> None:
    graph = graph_of({"a": 1, "b": 2, "c": 3, "d": 1}, ("a", "b", 4), ("a", "c", 4), ("b", "d", 4), ("c", "d", 4))
    timeline = simulate(graph, cluster_of(2), placement)
    assert "".join(graph.ops[v].id for v in critical_ops(timeline)) == path


def test_both_paths_of_a_step_end_with_what_its_host_takes_beyond_them() -> None:
    graph = graph_of({"a": 1, "b": 2}, ("a", "b", 4), issue_us={"a": 4, "b": 6})
    paths = Paths(simulate(graph, cluster_of(2), (0, 1)))
    for path in (paths.critical(), paths.data()):
        assert path[-1] == Stretch(HOST, 1, None, 7, 10, HOST)
        assert [(part.kind, part.us) for part in paths.parts(path)] == [(TRANSFER, 4), (HOST, 3), (COMPUTE, 2), (COMPUTE, 1)]


def test_an_empty_step_has_no_path() -> None:
    paths = Paths(simulate(graph_of({}), cluster_of(1), ()))
    assert (paths.critical(), paths.data(), paths.parts(())) == ((), (), ())


@given(case=cases(), data=st.data())
def test_both_paths_go_from_the_start_to_the_end(case: tuple[OpGraph, Cluster], data: st.DataObject) -> None:
    graph, cluster = case
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=len(graph), max_size=len(graph)))
    priority = data.draw(st.none() | st.permutations(range(len(graph))))
    paths = Paths(simulate(graph, cluster, placement, priority))
    for path in (paths.critical(), paths.data()):
        assert (path[0].start_us, path[-1].end_us) == (0, paths.timeline.makespan_us)
        assert all(one.end_us == other.start_us for one, other in pairwise(path))
        assert sum(part.us for part in paths.parts(path)) == pytest.approx(paths.timeline.makespan_us)
    assert not {DEVICE_BUSY, LINK_BUSY} & {stretch.kind for stretch in paths.critical()}


@given(case=cases(), data=st.data())
def test_what_a_stretch_of_the_critical_path_follows_holds_it_up(case: tuple[OpGraph, Cluster], data: st.DataObject) -> None:
    graph, cluster = case
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=len(graph), max_size=len(graph)))
    path = Paths(simulate(graph, cluster, placement)).critical()
    assert path[0].cause == START
    for before, stretch in pairwise(path):
        if stretch.kind == HOST:
            assert (stretch, stretch.cause, stretch.op) == (path[-1], HOST, before.op)
            continue
        if stretch.cause == DEVICE:
            assert (before.kind, placement[before.op]) == (OP, placement[stretch.op])
        elif stretch.cause == LINK:
            one, other = before.transfer, stretch.transfer
            assert one is not None
            assert other is not None
            assert one.source == other.source or one.target == other.target
            assert not cluster.parallel_transfers
        elif stretch.kind == TRANSFER:
            assert (before.kind, before.op, stretch.cause) == (OP, stretch.op, DATA)
        else:
            assert stretch.cause == DATA
            assert before.op in graph.predecessors[stretch.op]
            assert before.transfer is None or (before.transfer.target, before.transfer.tensor in graph.inputs[stretch.op]) == (
                placement[stretch.op],
                True,
            )
