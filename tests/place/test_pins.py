"""Pins hold in the plans of every method of the registry, after repair and search, and where plans cannot keep them there is none."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.hints import with_pins_of_groups
from baechi_ext.place.common import PlaceOptions, PlanResult, Proposal
from baechi_ext.place.effort import Effort
from baechi_ext.place.fitting import fit
from baechi_ext.place.list_scheduler import RELUCTANCES, runner
from baechi_ext.place.registry import place
from baechi_ext.place.repair import repair, trials_by_bytes
from baechi_ext.place.trial import Trial
from baechi_ext.simulate import Simulator, lower_bound_us, simulate
from tests import oracle
from tests.build import cluster_of, graph_of, with_memory
from tests.place.instances import RUNNABLE
from tests.place.list_plain import plain_runner
from tests.place.training import branchy_blocks
from tests.simulate.strategies import clusters, graphs

each_method = pytest.mark.parametrize("method", RUNNABLE)
OPTIONS = PlaceOptions(seed=1, time_limit_seconds=2)
EXAMPLES = settings(max_examples=25)


@st.composite
def pinned_graphs(draw: st.DrawFn, num_devices: int, max_ops: int = 7) -> OpGraph:
    """Some ops of a random graph are pinned, and with them their groups."""
    graph = draw(graphs(max_ops))
    pins = [draw(st.sampled_from([None, None, *range(num_devices)])) for _ in graph.ops]
    return with_pins_of_groups(graph.replace_ops([replace(op, pin=pin) for op, pin in zip(graph.ops, pins, strict=True)]))


def planned(method: str, graph: OpGraph, cluster: Cluster, options: PlaceOptions = OPTIONS) -> PlanResult:
    """The plan, after all that must hold for it was checked. The oracle's rules include pins. The expert is of another mind."""
    if method == "expert":
        graph = graph.replace_ops([replace(op, expert=0) for op in graph.ops])
    if method == "scotch":  # a program that ends by itself, but not soon where the machine is busy
        options = replace(options, time_limit_seconds=60)
    result = place(method, graph, cluster, options)
    plan = result.plan
    assert oracle.violations(graph, cluster, plan.placement, plan.priority) == []
    assert all(plan.placement[v] == pin for v, pin in graph.pins.items())
    assert plan.predicted_step_us == pytest.approx(oracle.simulate(graph, cluster, plan.placement, plan.priority).makespan_us)
    assert lower_bound_us(graph, cluster) <= plan.lower_bound_us * (1 + 1e-9)
    assert plan.lower_bound_us <= plan.predicted_step_us
    return result


@each_method
@EXAMPLES
@given(cluster=clusters(3), data=st.data())
def test_pins_hold(method: str, cluster: Cluster, data: st.DataObject) -> None:
    planned(method, data.draw(pinned_graphs(len(cluster))), cluster)


@each_method
@EXAMPLES
@given(cluster=clusters(3), share=st.floats(0.4, 1.2), data=st.data())
def test_pins_hold_in_limited_memory(method: str, cluster: Cluster, share: float, data: st.DataObject) -> None:
    """Where a plan had to be repaired, too. What is said to be infeasible is."""
    graph = data.draw(pinned_graphs(len(cluster), 5))
    limited = with_memory(cluster, share * simulate(graph, cluster, (0,) * len(graph)).peak_memory_bytes[0])
    try:
        planned(method, graph, limited)
    except InfeasibleError as e:
        assert e.status in ("infeasible", "unknown")
        if e.status == "infeasible":
            assert oracle.optimum(graph, limited).placement is None


@EXAMPLES
@given(cluster=clusters(3), data=st.data())
def test_exact_is_exact(cluster: Cluster, data: st.DataObject) -> None:
    graph = data.draw(pinned_graphs(len(cluster), 4))
    best_us = oracle.optimum(graph, cluster, with_orders=True).makespan_us
    result = planned("exact", graph, cluster, replace(OPTIONS, time_limit_seconds=20))
    assert result.plan.predicted_step_us == pytest.approx(best_us)
    assert result.status == "optimal"
    assert lower_bound_us(graph, cluster) <= best_us * (1 + 1e-9)


@pytest.mark.parametrize("method", ["auto", "m_etf", "m_sct", "heft", "refine"])
def test_the_rest_is_placed_around_the_pins(method: str) -> None:
    """a and b are pinned together; c and d, as long, had better go elsewhere."""
    graph = graph_of(dict.fromkeys("abcd", 10), pin={"a": 1, "b": 1})
    assert planned(method, graph, cluster_of(2)).predicted_step_us == 20


@pytest.mark.parametrize("method", ["auto", "refine"])
def test_a_search_moves_what_a_given_plan_has_elsewhere(method: str) -> None:
    graph = graph_of(dict.fromkeys("abcd", 10), pin={"a": 1, "b": 1})
    options = replace(OPTIONS, initial=Proposal((0, 0, 0, 0)))
    assert planned(method, graph, cluster_of(2), options).predicted_step_us == 20


def big() -> OpGraph:
    graph = branchy_blocks(20, 4, seed=3, parameter_bytes=3_000_000)
    pins = {"0.0.0": 1, "3.1.0": 2, "5.out": 2, "7.2.0": 0, "12.out": 1, "in": 2}
    found = with_pins_of_groups(graph.replace_ops([replace(op, pin=pins.get(op.id)) for op in graph.ops]))
    assert len(found.pins) == 2 * len(pins)
    return found


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("reluctance", RELUCTANCES)
def test_the_compiled_list_scheduler_does_as_the_plain_one(reluctance: float, turn: bool) -> None:
    graph = big()
    for cluster in (cluster_of(3, 100.0, 0.01), cluster_of(3, 0.0, 0.001, memory_bytes=250_000_000)):
        runs = [make(graph, cluster, None)(reluctance, turn, None) for make in (plain_runner, runner)]
        assert runs[0] == runs[1]
        assert runs[0].placement == graph.pinned(runs[0].placement)
        assert len(set(runs[0].placement)) == 3


def test_what_does_not_fit_is_repaired_around_the_pins() -> None:
    graph = big()
    cluster = cluster_of(3, 10.0, 0.001, memory_bytes=240_000_000)
    start = Trial(graph.pinned([0] * len(graph)), None, Simulator(graph, cluster))
    assert not start.valid
    for found in (repair(start.simulator, start, 1), fit(start, 1, Effort(simulated_ops=1_000_000)), *trials_by_bytes(start.simulator)):
        assert found.placement == graph.pinned(found.placement)
        assert sum(found.excess_bytes) < sum(start.excess_bytes)
    assert planned("auto", graph, cluster, OPTIONS).splits


def test_pins_that_do_not_fit() -> None:
    graph = graph_of(dict.fromkeys("abc", 1), persistent_bytes=dict.fromkeys("abc", 60), pin={"a": 1, "b": 1})
    with pytest.raises(InfeasibleError, match=r"pinned to device 'device:1' \(2 ops\) need at least 120 bytes, and it has 100") as e:
        place("m_etf", graph, cluster_of(2, memory_bytes=100))
    assert (e.value.status, e.value.conflict) == ("infeasible", ("a", "b"))


def test_a_proof_of_what_the_rest_leaves() -> None:
    """60 and 60 are pinned apart; 70 fits beside neither, and no device is left."""
    sizes = {"a": 60, "b": 60, "c": 70}
    graph = graph_of(dict.fromkeys("abc", 1), persistent_bytes=sizes, pin={"a": 0, "b": 1})
    with pytest.raises(InfeasibleError) as e:
        place("m_etf", graph, cluster_of(2, memory_bytes=125))
    assert e.value.status == "infeasible"
    together = graph.replace_ops([replace(op, pin=0 if op.id in "ab" else None) for op in graph.ops])
    assert planned("m_etf", together, cluster_of(2, memory_bytes=125)).plan.placement == (0, 0, 1)
