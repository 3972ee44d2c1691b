"""m_sct: what its favourite children gain, and when it needs no solver."""

import os
from pathlib import Path

import pytest

from baechi_ext.errors import SolverError
from baechi_ext.ir import Cluster, Link
from baechi_ext.place import sct_lp
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of
from tests.place.test_list_scheduler import AWAKE
from tests.place.training import branchy_blocks, towers

FAST = Link(us_per_byte=1e-4, latency_us=30)
SLOW = Link(us_per_byte=2e-3, latency_us=100)


def test_small_communication_times_optimum() -> None:
    """One child of a follows on its device at 4; the other crosses, 4-6, and ends at 10; d follows it there, 10-14."""
    graph = graph_of({"a": 4, "b": 4, "c": 4, "d": 4}, ("a", "b", 2), ("a", "c", 2), ("b", "d", 2), ("c", "d", 2))
    assert place("m_sct", graph, cluster_of(2)).predicted_step_us == 14


@pytest.mark.parametrize("seed", range(3))
def test_training_steps_come_near_the_bound(seed: int) -> None:
    for graph, k in ((towers(4, 12, seed), 2), (branchy_blocks(8, 4, seed), 4)):
        result = place("m_sct", graph, Cluster.uniform(k, link=FAST))
        assert result.predicted_step_us <= 1.15 * result.lower_bound_us


def test_it_is_never_behind_m_etf_and_sometimes_ahead() -> None:
    ratios = []
    for seed in range(6):
        for graph, k in ((towers(4, 12, seed), 3), (branchy_blocks(6, 4, seed), 4)):
            cluster = Cluster.uniform(k, link=SLOW)
            ratios.append(place("m_sct", graph, cluster).predicted_step_us / place("m_etf", graph, cluster).predicted_step_us)
    assert max(ratios) == 1.0
    assert min(ratios) < 0.99


def test_one_device_needs_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SolverError("called")

    monkeypatch.setattr(sct_lp, "solve", refuse)
    assert place("m_sct", AWAKE, cluster_of(1)).status == "optimal"
    with pytest.raises(SolverError, match="called"):
        place("m_sct", AWAKE, cluster_of(2))


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.5, 1.0])
def test_every_threshold_gives_a_plan(threshold: float) -> None:
    options = PlaceOptions(sct_threshold=threshold)
    result = place("m_sct", branchy_blocks(2, 3, 0), Cluster.uniform(3, link=FAST), options)
    assert result.plan.options["sct_threshold"] == threshold
    assert result.predicted_step_us < 1.5 * result.lower_bound_us


def test_too_little_time_is_no_error() -> None:
    """Without favourite children the schedules are m_etf's."""
    graph, cluster = branchy_blocks(20, 4, 0), Cluster.uniform(2, link=FAST)
    hurried = place("m_sct", graph, cluster, PlaceOptions(time_limit_seconds=1e-9))
    assert f"not solved in time for {len(graph)} of {len(graph)} ops" in hurried.notes[0]
    assert hurried.plan.placement == place("m_etf", graph, cluster).plan.placement
    assert place("m_sct", AWAKE, cluster_of(2)).notes == ()


def test_what_is_solved_in_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first of several slices is solved before the solver's time is up."""
    monkeypatch.setattr(sct_lp, "WHOLE_OPS", 0)
    monkeypatch.setattr(sct_lp, "SLICE_OPS", 30)
    solve, limits = sct_lp.solve, iter([10.0])
    monkeypatch.setattr(sct_lp, "solve", lambda lp, _: solve(lp, next(limits, 1e-9)))
    graph, cluster = branchy_blocks(20, 4, 0), Cluster.uniform(2, link=FAST)
    parts = sct_lp.slices(graph, cluster, sct_lp.pair_costs_us(graph, cluster))
    found = sct_lp.favourite_children(graph, cluster, 0.5, 60)
    assert {v for v, child in enumerate(found.child) if child is not None} <= set(parts[0].times)
    assert any(child is not None for child in found.child)
    assert found.unsolved_ops == sum(len(part.times) for part in parts[1:])


@pytest.mark.parametrize("has_highs", [True, False])
def test_solvers_write_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_highs: bool) -> None:
    """Checked at the file descriptors: the solvers are not Python."""
    import pulp

    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: has_highs)
    place("m_sct", branchy_blocks(4, 4, 0), Cluster.uniform(2, link=FAST))
    assert capfd.readouterr() == ("", "")


def test_solvers_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place("m_sct", AWAKE, cluster_of(2))
    assert os.listdir(tmp_path) == []
