"""Whatever is asked for, a plan is valid and worth what it says: Baechi's flags together, on random training graphs, by the oracle."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.cost import Profile
from baechi_ext.errors import InfeasibleError
from baechi_ext.group.grouping import GroupOptions
from baechi_ext.group.registry import GROUPERS, PLACER_TYPES
from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.ir.hints import Pin
from baechi_ext.place.adjust import ADJUSTMENTS
from baechi_ext.place.common import PlaceOptions
from baechi_ext.simulate import Timeline, simulate
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers.backend import Captured
from baechi_runtime.drivers.pipeline import PlanRequest, plan, whole_if_faster
from baechi_runtime.drivers.placement import place
from baechi_runtime.drivers.train_request import TrainRequest
from tests import oracle
from tests.group.training_graphs import training_graphs

FLAGS = st.booleans()
REQUESTS = st.builds(
    PlanRequest,
    method=st.sampled_from(["m_etf", "m_topo", "heft", "round_robin"]),
    grouper=st.sampled_from(list(GROUPERS)),
    placer_type=st.sampled_from(list(PLACER_TYPES)),
    only_forward=FLAGS,
    options=st.builds(PlaceOptions, seed=st.integers(0, 3)),
    group_options=st.builds(GroupOptions, FLAGS, FLAGS, FLAGS, FLAGS, FLAGS),
    adjustment_method=st.sampled_from(list(ADJUSTMENTS)),
    adjustment_with_memory_limit=FLAGS,
    cost_factor=st.sampled_from([1.0, 1.0, 3.0]),
)


@settings(max_examples=75)
@given(graph=training_graphs(5), request=REQUESTS, share=st.sampled_from([None, 1.1, 0.7]))
def test_every_request_gets_a_valid_plan(graph: OpGraph, request: PlanRequest, share: float | None) -> None:
    link = Link(0.5, 1.0)
    peak = simulate(graph, Cluster.uniform(1), (0,) * len(graph)).peak_memory_bytes[0]
    cluster = Cluster.uniform(3, link=link, memory_bytes=None if share is None else share * peak)
    try:
        made = plan(graph, cluster, request).plan
    except InfeasibleError as e:
        assert share == 0.7
        assert e.status in ("infeasible", "unknown")
        return
    assert oracle.violations(graph, cluster, made.placement, made.priority) == []
    assert made.predicted_step_us == pytest.approx(oracle.simulate(graph, cluster, made.placement, made.priority).makespan_us)
    assert made.lower_bound_us <= made.predicted_step_us


def _two_branches() -> OpGraph:
    """Two ops of 10 us that nothing joins, 8 bytes each."""
    return OpGraph.from_edges([Op("a", compute_us=10.0, persistent_bytes=8), Op("b", compute_us=10.0, persistent_bytes=8)], [])


def _alone(us: float) -> Timeline:
    """The same on one device, in `us` together."""
    graph = _two_branches()
    ops = [replace(op, compute_us=us / len(graph)) for op in graph.ops]
    return simulate(OpGraph.from_edges(ops, []), Cluster.uniform(1), [0] * len(graph))


@pytest.mark.parametrize(("alone_us", "placement"), [(9.0, {0}), (10.0, {0}), (10.5, {0}), (10.6, {0, 1}), (20.0, {0, 1})])
def test_a_step_that_one_device_does_about_as_fast_is_kept_whole(alone_us: float, placement: set[int]) -> None:
    graph, cluster, request = _two_branches(), Cluster.uniform(2, link=Link(1.0, 1.0)), PlanRequest()
    result = whole_if_faster(plan(graph, cluster, request), graph, cluster, request, _alone(alone_us))
    assert set(result.plan.placement) == placement
    assert result.plan.method == "auto"
    assert result.splits == (len(placement) > 1)
    assert result.predicted_step_us == (10.0 if result.splits else alone_us)


@pytest.mark.parametrize(
    ("speeds", "placement", "step_us", "single_us"),
    [((0.5, 0.5), {0, 1}, 20.0, 40.0), ((0.5, 1.0), {1}, 20.0, 40.0), ((1.0, 0.5), {0}, 20.0, 20.0), ((2.0, 2.0), {0, 1}, 5.0, 10.0)],
)
def test_one_device_is_as_fast_as_it_is_in_the_cluster(
    speeds: tuple[float, float], placement: set[int], step_us: float, single_us: float
) -> None:
    """A split that takes as long as the faster device alone is none; one that takes half as long as either is one, however slow both."""
    graph, request = _two_branches(), PlanRequest()
    cluster = Cluster(tuple(Device(f"device:{d}", speed=speed) for d, speed in enumerate(speeds)), Link(1.0, 1.0))
    single = one_device_timeline(graph, speeds[0])
    result = whole_if_faster(plan(graph, cluster, request), graph, cluster, request, single)
    assert (set(result.plan.placement), result.predicted_step_us, single.makespan_us) == (placement, step_us, single_us)


def test_a_step_is_compared_with_the_first_device_at_its_speed() -> None:
    graph, cluster = _two_branches(), Cluster((Device("device:0", speed=0.5), Device("device:1")), Link(1.0, 1.0))
    captured = Captured(graph, graph, Profile(graph.fingerprint, {}, "", 0, {}))
    placement = place(TrainRequest("gpt2", PlanRequest("single")), captured, (cluster, None))
    assert (placement.single.makespan_us, placement.result.predicted_step_us) == (40.0, 20.0)


def test_one_device_is_predicted_with_the_others_idle() -> None:
    graph, cluster, request = _two_branches(), Cluster.uniform(2, link=Link(1.0, 1.0)), PlanRequest("single")
    found = plan(graph, cluster, request)
    result = whole_if_faster(found, graph, cluster, request, _alone(14.0))
    assert (found.predicted_step_us, result.predicted_step_us) == (20.0, 14.0)
    assert result.lower_bound_us <= 14.0
    assert (result.plan.method, result.plan.placement) == ("single", found.plan.placement)
    assert result.plan.options == found.plan.options


def test_a_step_that_no_device_holds_is_split_however_long_it_takes() -> None:
    graph, cluster, request = _two_branches(), Cluster.uniform(2, link=Link(1.0, 1.0), memory_bytes=8), PlanRequest()
    assert whole_if_faster(plan(graph, cluster, request), graph, cluster, request, _alone(1.0)).splits


def test_what_is_asked_for_by_name_or_pin_stays_as_asked() -> None:
    graph, cluster = _two_branches(), Cluster.uniform(2, link=Link(1.0, 1.0))
    for request in (PlanRequest("m_etf"), PlanRequest(pins=(Pin("b", "1"),))):
        assert whole_if_faster(plan(graph, cluster, request), graph, cluster, request, _alone(1.0)).splits
