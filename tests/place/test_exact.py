"""`exact` against the exhaustive oracle, its two proofs one by one, and its second process, which must leave nothing behind."""

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baechi_ext.errors import InfeasibleError, MissingBackendError
from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.exact import placer
from baechi_ext.place.exact.placer import longest_step_us
from baechi_ext.place.exact.process import SolverProcess
from baechi_ext.place.exact.search import Search, exchangeable
from baechi_ext.place.registry import place
from baechi_ext.simulate import Simulator, simulate
from tests import oracle
from tests.build import cluster_of, graph_of, with_memory
from tests.place.instances import RUNNABLE
from tests.simulate.strategies import clusters, graphs

TIES = graph_of({"a": 1, "b": 5, "c": 5, "d": 5}, ("a", "b", 2), ("a", "c", 2), ("a", "d", 2))


def searched_us(graph: OpGraph, cluster: Cluster) -> float:
    """The best step that the search alone proves; infinite where no plan is valid."""
    search, best_us = Search(Simulator(graph, cluster)), float("inf")
    while not search.done:
        found = search.run(best_us)
        if found is not None:
            assert found.timeline.makespan_us < best_us
            assert oracle.violations(graph, cluster, found.placement, found.priority) == []
            best_us = found.timeline.makespan_us
    return best_us


def random_instance(num_ops: int, num_devices: int, us_per_byte: float, seed: int) -> tuple[OpGraph, Cluster]:
    rng = random.Random(seed)
    names = [f"o{i}" for i in range(num_ops)]
    edges = [(s, names[j], 50 + i) for j in range(1, num_ops) for i, s in enumerate(names[:j]) if rng.random() < 2 / j]
    graph = graph_of({name: rng.uniform(10, 100) for name in names}, *edges)
    return graph, cluster_of(num_devices, 0.0, us_per_byte)


@settings(max_examples=60)
@given(graphs(max_ops=4), clusters(max_devices=3), st.sampled_from([None, 8, 14, 20]))
def test_search_finds_the_optimum(graph: OpGraph, cluster: Cluster, memory_bytes: int | None) -> None:
    cluster = with_memory(cluster, memory_bytes)
    best = oracle.optimum(graph, cluster, with_orders=True)
    assert searched_us(graph, cluster) == pytest.approx(best.makespan_us)


@pytest.mark.parametrize("seed", range(8))
def test_twelve_ops_on_three_devices_are_proven(seed: int) -> None:
    graph, cluster = random_instance(12, 3, (0.02, 0.2, 1.0, 3.0)[seed % 4], seed)
    result = place("exact", graph, cluster, PlaceOptions())
    assert result.status == "optimal"
    assert result.lower_bound_us == pytest.approx(result.predicted_step_us)
    assert oracle.violations(graph, cluster, result.plan.placement, result.plan.priority) == []
    step = oracle.simulate(graph, cluster, result.plan.placement, result.plan.priority)
    assert result.predicted_step_us == pytest.approx(step.makespan_us)
    for method in RUNNABLE:
        if method not in ("exact", "expert"):
            with contextlib.suppress(MissingBackendError):  # scotch is a program of its own
                assert result.predicted_step_us <= place(method, graph, cluster).predicted_step_us * (1 + 1e-9)


def test_the_memory_that_depends_on_the_order_counts() -> None:
    """Both big tensors at once do not fit; so each is read before the next is made."""
    graph = graph_of({"a": 1, "b": 1, "ra": 1, "rb": 1}, ("a", "ra", 6), ("b", "rb", 6))
    result = place("exact", graph, cluster_of(1, memory_bytes=10), PlaceOptions())
    assert (result.status, result.predicted_step_us, result.plan.peak_memory_bytes) == ("optimal", 4, (6,))


def test_an_op_that_takes_no_time_lets_go_of_memory_at_the_instant_of_a_choice() -> None:
    """a and p end at 10, where w reads a's tensor and lets it go; the copy of p's is there at 15, and b runs until then."""
    costs = {"a": 10, "w": 0, "b": 1, "p": 10, "r": 1}
    graph = graph_of(costs, ("a", "w", 100), ("p", "r", 100), pin={"a": 1, "w": 1, "b": 1, "p": 0, "r": 1})
    assert searched_us(graph, cluster_of(2, 5.0, 0.0, memory_bytes=150)) == 16


def test_kinds_of_devices_that_come_in_turn_are_told_apart_where_transfers_tie() -> None:
    """u's tensors leave one after the other, the first to the lower index: better to the slow one, so the fast one is the last."""
    graph = graph_of({"u": 1, "w1": 100, "w2": 100}, ("u", "w1", 0), ("u", "w2", 0), persistent_bytes={"u": 100, "w1": 20, "w2": 30})
    kinds = [Device("A0", 20, 2.0), Device("B0", 30, 1.0), Device("B1", 30, 1.0), Device("A1", 20, 2.0), Device("C", 100, 1.0)]
    assert searched_us(graph, Cluster(tuple(kinds), Link(us_per_byte=0.0, latency_us=10.0))) == 111


def test_infeasible_is_proven_where_only_the_search_sees_it() -> None:
    """a's tensor of 6 bytes waits for r while m needs 8; each op alone fits."""
    graph = graph_of(
        {"a": 1, "m": 1, "r": 1},
        ("a", "r", 6, "x"), ("a", "m", 1, "y"), ("m", "r", 1, "z"),
        temporary_bytes={"m": 6}, colocation=dict.fromkeys("amr", "g"),
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match="no plan can exist: exact tried every placement and order") as e:
        place("exact", graph, cluster_of(2, memory_bytes=10), PlaceOptions())
    assert e.value.status == "infeasible"


def test_devices_that_differ_only_in_name_are_told_apart_where_transfers_tie() -> None:
    """a's tensor goes to two devices with equal urgency; the one of lower index gets it first, and that may be the wrong one."""
    graph = graph_of({"a": 1, "b": 5, "c": 5, "z": 4}, ("a", "b", 2, "x"), ("a", "c", 2, "y"), ("b", "z", 9), ("c", "z", 1))
    for cluster in (cluster_of(3), cluster_of(3, parallel_transfers=True)):
        assert searched_us(graph, cluster) == pytest.approx(oracle.optimum(graph, cluster, with_orders=True).makespan_us)


FIVE = {"v": 1, "a": 5, "b": 7, "c": 2, "c2": 3}
"""Ops of a hub that sends three tensors: b's and a's to one device, c's to another, from which one comes back."""
US = st.integers(1, 7)


@settings(max_examples=25)
@given(st.fixed_dictionaries(dict.fromkeys(FIVE, US)), st.lists(US, min_size=4, max_size=4), st.sampled_from([None, 1500]))
@example(FIVE, [3, 1, 3, 20], 1500)
def test_devices_are_told_apart_where_several_tensors_go_to_one(costs: dict[str, int], sizes: list[int], memory_bytes: int | None) -> None:
    edges = [("v", "a", sizes[0], "A"), ("v", "b", sizes[1], "B"), ("v", "c", sizes[2], "C"), ("c", "c2", sizes[3], "D")]
    together = {"v": "V", "c2": "V", "a": "AB", "b": "AB"}
    graph = graph_of(costs, *edges, colocation=together, persistent_bytes=dict.fromkeys("vac", 1000))
    cluster = cluster_of(3, memory_bytes=memory_bytes)
    assert searched_us(graph, cluster) == pytest.approx(oracle.optimum(graph, cluster, with_orders=True).makespan_us)


def test_what_can_be_exchanged() -> None:
    twin, relabelings = exchangeable(cluster_of(3))
    assert twin == [0, 0, 0]
    assert len(set(relabelings)) == 6
    assert relabelings[0] == (0, 1, 2)
    assert exchangeable(cluster_of(2, speeds=(1.0, 2.0))) == ([0, 1], [(0, 1)])
    named = Cluster((Device("a"), Device("b"), Device("c")), Link(1), {("a", "b"): Link(2)})
    assert exchangeable(named)[0] == [0, 1, 2]
    assert exchangeable(cluster_of(8)) == (list(range(8)), [tuple(range(8))])
    assert exchangeable(cluster_of(8, parallel_transfers=True)) == ([0] * 8, [tuple(range(8))])


def task(graph: OpGraph, cluster: Cluster, seconds: float = 30.0) -> dict[str, object]:
    return {
        "graph": graph.to_json(),
        "cluster": cluster.to_json(),
        "horizon_us": longest_step_us(graph, cluster),
        "placement": None,
        "start_us": None,
        "seconds": seconds,
        "threads": 1,
        "seed": 0,
    }


CHARGED = Cluster.uniform(2, link=Link(1, 2, send_us=1, receive_us=1), memory_bytes=18)
SOLVED = {
    "ties": (TIES, cluster_of(3)),
    "charged and tight": (
        graph_of({"a": 2, "b": 3, "c": 4}, ("a", "b", 1), ("b", "c", 1), persistent_bytes=dict.fromkeys("abc", 8)),
        CHARGED,
    ),
    "not whole": random_instance(6, 2, 0.123, 1),
    "unequal": (random_instance(5, 3, 0.3, 2)[0], cluster_of(3, 0.5, 0.3, speeds=(1.0, 2.0, 0.7))),
}


@pytest.mark.parametrize("case", SOLVED)
def test_the_solver_alone_proves_a_bound_and_proposes_schedules(case: str) -> None:
    graph, cluster = SOLVED[case]
    bounds, makespans = [], []
    with SolverProcess(task(graph, cluster)) as solver:
        while solver.status is None:
            for message in solver.messages(1.0):
                bounds += [message["bound_us"]] if "bound_us" in message else []
                if "placement" in message:
                    makespans.append(simulate(graph, cluster, message["placement"], message["start_us"]).makespan_us)
    assert (solver.status, solver.complaint) == ("optimal", "")
    best_us = searched_us(graph, cluster)
    assert 0.8 * best_us <= max(bounds) <= best_us * (1 + 1e-12)
    assert min(makespans) >= max(bounds) * (1 - 1e-9)


def test_the_solver_says_what_does_not_fit() -> None:
    graph = graph_of(dict.fromkeys("abc", 1), persistent_bytes=dict.fromkeys("abc", 6))
    with SolverProcess(task(graph, cluster_of(2, memory_bytes=10))) as solver:
        while solver.status is None:
            list(solver.messages(1.0))
    assert solver.status == "infeasible"


def test_a_solver_that_fails_says_why() -> None:
    with SolverProcess({"graph": {}}) as solver:
        while solver.status is None:
            list(solver.messages(1.0))
    assert solver.status == "failed"
    assert "exit code 1: " in solver.complaint


def test_a_seed_may_be_larger_than_the_solvers() -> None:
    with SolverProcess({**task(graph_of({"a": 1}), cluster_of(2)), "seed": 2**40 + 1}) as solver:
        while solver.status is None:
            list(solver.messages(1.0))
    assert (solver.status, solver.complaint) == ("optimal", "")


def test_half_a_message_is_a_failure() -> None:
    assert [SolverProcess._read(line) for line in ('{"status": "opt', "7", '{"status": "optimal"}')] == [
        {"status": "failed"}, {"status": "failed"}, {"status": "optimal"},
    ]  # fmt: skip


def test_a_graph_too_large_for_the_solver_has_a_quick_plan_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "_MOST_COPIES", 9)
    result = place("exact", *random_instance(60, 3, 0.1, 0), PlaceOptions(time_limit_seconds=2))
    assert any("are too many for the solver, so what more it would have found" in note for note in result.notes)


@pytest.mark.parametrize("surprise", ["modules of Python's names", "a folder that is gone", "paths that are no text"])
def test_the_solver_does_not_care_where_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surprise: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    if surprise == "modules of Python's names":
        for name in ("queue", "json", "threading"):
            (here / f"{name}.py").write_text("raise SystemExit('of a person')")
    elif surprise == "a folder that is gone":
        monkeypatch.syspath_prepend("")
        here.rmdir()
    else:
        monkeypatch.setattr(sys, "path", [*sys.path, here])
    with SolverProcess(task(graph_of({"a": 1}), cluster_of(2))) as solver:
        while solver.status is None:
            list(solver.messages(1.0))
    assert (solver.status, solver.complaint) == ("optimal", "")


def test_beyond_the_proof_there_is_a_gap() -> None:
    graph, cluster = random_instance(60, 3, 0.1, 0)
    result = place("exact", graph, cluster, PlaceOptions(time_limit_seconds=2))
    assert result.plan.lower_bound_us <= result.predicted_step_us
    assert result.predicted_step_us <= place("m_etf", graph, cluster).predicted_step_us
    assert result.placement_seconds < 60


@pytest.mark.parametrize("graph", [graph_of({}), graph_of({"a": 0, "b": 0}), graph_of({"a": 3})], ids=["empty", "no time", "one op"])
def test_nothing_to_decide(graph: OpGraph) -> None:
    result = place("exact", graph, cluster_of(3), PlaceOptions())
    assert (result.status, result.predicted_step_us) == ("optimal", sum(op.compute_us for op in graph.ops))


def test_the_same_plan_again() -> None:
    graph, cluster = random_instance(11, 3, 0.4, 5)
    first, second = (place("exact", graph, cluster, PlaceOptions()).plan for _ in range(2))
    assert (first.placement, first.priority) == (second.placement, second.priority)


def test_without_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingBackendError, match="pip install 'ortools"):
        place("exact", TIES, cluster_of(2), PlaceOptions())


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_an_interrupt_leaves_no_process() -> None:
    graph, cluster = random_instance(60, 3, 0.1, 0)
    with pytest.raises(KeyboardInterrupt), SolverProcess(task(graph, cluster)) as solver:
        next(solver.messages(30.0))
        pid = solver._process.pid
        assert is_running(pid)
        raise KeyboardInterrupt
    assert not is_running(pid)


PARENT = """
import time
from tests.place.test_exact import SolverProcess, random_instance, task
with SolverProcess(task(*random_instance(60, 3, 0.1, 0), seconds=300.0)) as solver:
    next(solver.messages(60.0))
    print(solver._process.pid, flush=True)
    time.sleep(300.0)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")
def test_a_killed_parent_leaves_no_process() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(pid)


def test_an_op_of_no_memory_limit_beside_one() -> None:
    graph = OpGraph.from_edges([Op("a", compute_us=4, persistent_bytes=9), Op("b", compute_us=4)], [])
    cluster = Cluster((Device("small", 5, 4.0), Device("large", None, 1.0)))
    assert place("exact", graph, cluster, PlaceOptions()).plan.placement == (1, 0)
