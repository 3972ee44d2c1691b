"""m_etf: known optima, quality on training steps, and that its work grows in proportion to the graph."""

import pytest

from baechi_ext.ir import Cluster, Link
from baechi_ext.place import list_scheduler
from baechi_ext.place.list_state_kernel import Groups, State
from baechi_ext.place.registry import place
from baechi_ext.simulate.arrays import Problem
from tests.build import cluster_of, graph_of
from tests.place.training import branchy_blocks, towers

FAST = Link(us_per_byte=1e-4, latency_us=30)


def test_independent_ops_are_balanced() -> None:
    graph = graph_of({f"o{i}": us for i, us in enumerate((7, 6, 5, 4, 3, 2, 1))})
    result = place("m_etf", graph, cluster_of(2))
    assert (result.status, result.predicted_step_us) == ("optimal", 14)


def test_chain_stays_on_one_device() -> None:
    graph = graph_of({"a": 3, "b": 3, "c": 3}, ("a", "b", 1), ("b", "c", 1))
    result = place("m_etf", graph, cluster_of(4))
    assert len(set(result.plan.placement)) == 1
    assert result.status == "optimal"


def test_dear_transfers_leave_everything_on_one_device() -> None:
    graph = graph_of({"a": 1, "b": 5, "c": 5, "d": 1}, ("a", "b", 9), ("a", "c", 9), ("b", "d", 9), ("c", "d", 9))
    assert place("m_etf", graph, cluster_of(2)).predicted_step_us == 12


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "num_devices"), [(4, 2), (8, 4)])
def test_towers_are_nearly_perfectly_balanced(count: int, num_devices: int, seed: int) -> None:
    """The lower bound is total / devices, so that even the optimum is a little above it."""
    result = place("m_etf", towers(count, 12, seed), Cluster.uniform(num_devices, link=FAST))
    assert result.predicted_step_us <= 1.15 * result.lower_bound_us


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_devices", [2, 4])
def test_branchy_blocks_gain_from_every_device(num_devices: int, seed: int) -> None:
    graph = branchy_blocks(8, 4, seed)
    cluster = Cluster.uniform(num_devices, link=FAST)
    result = place("m_etf", graph, cluster)
    assert result.predicted_step_us <= 1.2 * result.lower_bound_us
    assert result.predicted_step_us < 0.7 * place("single", graph, cluster).predicted_step_us


@pytest.mark.parametrize("method", ["m_etf", "m_sct"])
def test_the_fast_device_is_worth_waiting_for(method: str) -> None:
    """a 0-3, c 3-5 and d 5-8.5 on the fast device, b 0-8 on the slow one; starting early, c goes where it ends late."""
    graph = graph_of({"a": 6, "b": 8, "c": 4, "d": 7}, ("a", "c", 4), ("a", "d", 4), ("c", "d", 0))
    assert place(method, graph, cluster_of(2, speeds=(1.0, 2.0))).predicted_step_us == 8.5


def test_half_the_memory_costs_no_more_than_the_time_of_one_device() -> None:
    graph = branchy_blocks(8, 4, 0, parameter_bytes=10_000_000)
    peak = place("single", graph, Cluster.uniform(1)).plan.peak_memory_bytes[0]
    cluster = Cluster.uniform(2, memory_bytes=0.6 * peak, link=FAST)
    result = place("m_etf", graph, cluster)
    assert max(result.plan.peak_memory_bytes) <= 0.6 * peak
    assert result.predicted_step_us < graph.total_compute_us()


def test_work_grows_in_proportion_to_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: at how many ops and inputs the scheduler looks for when they are on a device."""
    looks = 0
    original = list_scheduler.run

    def counting(problem: Problem, groups: Groups, state: State) -> None:
        nonlocal looks
        original(problem, groups, state)
        looks += int(state.totals["looks"][0])

    monkeypatch.setattr(list_scheduler, "run", counting)
    per_op = []
    for blocks in (10, 80):
        graph = branchy_blocks(blocks, 4, 0)
        looks = 0
        place("m_etf", graph, Cluster.uniform(4, link=FAST))
        per_op.append(looks / len(graph))
    assert per_op[1] < 1.2 * per_op[0]
