"""Turning proposals into a plan: the choice, the repair, and the messages where there is none."""

from collections.abc import Sequence

import pytest

from baechi_ext.errors import GraphError, InfeasibleError, OptionError, PlanError
from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.place.common import SMALL, PlaceOptions, Proposal, arrange, begin, conclude
from baechi_ext.place.feasibility import minimal_bytes, require_feasible
from baechi_ext.place.registry import METHODS, place
from baechi_ext.place.repair import held_at_peak, repair, trials_by_bytes
from baechi_ext.place.trial import longest_placed_path_order, try_orders
from baechi_ext.simulate import Simulator, simulate
from tests import oracle
from tests.build import cluster_of, graph_of
from tests.place.instances import RUNNABLE
from tests.place.training import branchy_blocks

TWO_GROUPS = graph_of(
    {"a": 1, "b": 1, "c": 1, "d": 1},
    persistent_bytes={"a": 6, "b": 5, "c": 5, "d": 4},
    colocation={"a": "heavy", "b": "heavy"},
)


def concluded(graph, cluster, *proposals, **arguments):  # type: ignore[no-untyped-def]
    return conclude(begin("test", graph, cluster, PlaceOptions()), proposals, **arguments)


def test_the_fastest_valid_proposal_is_taken() -> None:
    graph = graph_of({"a": 4, "b": 4, "c": 4}, persistent_bytes={"a": 1, "b": 1, "c": 1})
    proposals = [Proposal((0, 0, 0)), Proposal((0, 1, 2)), Proposal((0, 1, 1))]
    assert concluded(graph, cluster_of(3), *proposals).plan.placement == (0, 1, 2)
    cluster = Cluster((Device("0", 5), Device("1", 5), Device("full", 0)))
    assert concluded(graph, cluster, *proposals, repairs=False).plan.placement == (0, 1, 1)


def test_the_best_order_is_taken() -> None:
    """Without priorities the longer op x goes first and z waits; the suggested order starts its producer y first."""
    graph = graph_of({"x": 9, "y": 2, "z": 6}, ("y", "z", 4))
    result = concluded(graph, cluster_of(2), Proposal((0, 0, 1), ((1.0, 0.0, 2.0),)))
    assert (result.plan.priority, result.predicted_step_us) == ((1.0, 0.0, 2.0), 12)


def test_orders_with_transfers_are_tried_unasked() -> None:
    graph = graph_of({"x": 9, "y": 2, "z": 6}, ("y", "z", 4))
    assert longest_placed_path_order(graph, cluster_of(2), (0, 0, 1)) == (-9, -12, -6)
    assert concluded(graph, cluster_of(2), Proposal((0, 0, 1))).predicted_step_us == 12


def test_status_is_optimal_only_at_the_bound() -> None:
    graph = graph_of({"a": 4, "b": 4, "c": 4})
    assert concluded(graph, cluster_of(3), Proposal((0, 1, 2))).status == "optimal"
    assert concluded(graph, cluster_of(3), Proposal((0, 1, 1))).status == "feasible"


def test_a_split_group_is_refused() -> None:
    with pytest.raises(PlanError, match="test: colocation group 'heavy' is split"):
        concluded(TWO_GROUPS, cluster_of(2), Proposal((0, 1, 0, 0)))


def test_an_overfull_device_is_repaired() -> None:
    result = concluded(TWO_GROUPS, cluster_of(2, memory_bytes=11), Proposal((0, 0, 0, 0)))
    assert oracle.violations(TWO_GROUPS, cluster_of(2, memory_bytes=11), result.plan.placement) == []


def test_repair_can_be_declined() -> None:
    with pytest.raises(InfeasibleError, match=r"not proven impossible; .*'device:0' needs 20 bytes and has 11; use more"):
        concluded(TWO_GROUPS, cluster_of(2, memory_bytes=11), Proposal((0, 0, 0, 0)), repairs=False)


@pytest.mark.parametrize(("limit_seconds", "device"), [(1e-9, 0), (60.0, 1)])
def test_without_time_what_fits_is_taken_unrepaired(limit_seconds: float, device: int) -> None:
    """A slow plan fits; a fast one needs one more byte, and fits once an op has moved."""
    n = SMALL + 2
    ops = [Op(f"o{v}", compute_us=1, persistent_bytes=1) for v in range(n)]
    cluster = Cluster((Device("slow", n), Device("fast", n - 1, speed=100.0)))
    task = begin("test", OpGraph.from_edges(ops, []), cluster, PlaceOptions(time_limit_seconds=limit_seconds))
    placement = conclude(task, [Proposal((0,) * n), Proposal((1,) * n)]).plan.placement
    assert sum(placement) == (n - 1) * device


@pytest.mark.parametrize(("limit_seconds", "more"), [(1e-9, False), (60.0, True)])
def test_without_time_no_further_devices_and_orders_are_tried(limit_seconds: float, more: bool) -> None:
    """The slow device comes first until places are exchanged; the op that is ready first goes first until longest paths do."""
    times_us = {"head": 1, "long": 2, "tail": 9, "short": 2} | dict.fromkeys((f"o{v}" for v in range(SMALL)), 0)
    graph = OpGraph.from_edges(
        [Op(name, compute_us=us) for name, us in times_us.items()], [("head", "long", 1, "x"), ("long", "tail", 1, "y")]
    )
    cluster = Cluster((Device("slow", speed=0.5), Device("fast"), Device("other", speed=0.25)), Link(0.0, 0.0))
    task = begin("test", graph, cluster, PlaceOptions(time_limit_seconds=limit_seconds))
    made = []

    def make(sequence: Sequence[int]) -> Sequence[int]:
        made.append(tuple(sequence))
        return (sequence[0], sequence[0], sequence[1], *(sequence[0],) * (SMALL + 1))

    proposal = arrange(task, make)
    assert (len(made) > 1) == more
    started = conclude(task, [proposal]).timeline.started
    assert (started.index(1) < started.index(3)) == more


def test_repair_moves_what_costs_least() -> None:
    """c and d are as large, but d's reader is at the target already."""
    graph = graph_of(
        {"a": 1, "c": 1, "d": 1, "r": 1},
        ("a", "c", 3),
        ("d", "r", 3),
        persistent_bytes={"a": 4, "c": 4, "d": 4},
    )
    simulator = Simulator(graph, cluster_of(2, memory_bytes=17))
    start = try_orders(simulator, (0, 0, 0, 1), [None])
    assert not start.valid
    fixed = repair(simulator, start, seed=0)
    assert fixed.valid
    assert fixed.placement == (0, 0, 1, 1)


def test_repair_exchanges_where_a_move_alone_does_not_fit() -> None:
    """7 + 5 | 6 + 2 with 10 bytes each: 5 must go and 2 come back."""
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1}, persistent_bytes={"a": 7, "b": 5, "c": 5, "d": 3})
    simulator = Simulator(graph, cluster_of(2, memory_bytes=10))
    fixed = repair(simulator, try_orders(simulator, (0, 0, 1, 1), [None]), seed=0)
    assert fixed.valid


def test_bytes_held_at_the_peak() -> None:
    """While b runs, device 0 holds a's tensor (4), b's temporary bytes (3) and persistent bytes; device 1 the copy, for c."""
    graph = graph_of({"a": 1, "b": 5, "c": 2}, ("a", "b", 4), ("a", "c", 4), persistent_bytes={"b": 2}, temporary_bytes={"b": 3})
    timeline = simulate(graph, cluster_of(2), (0, 0, 1))
    assert held_at_peak(timeline, 0) == {0: 4, 1: 5}
    assert held_at_peak(timeline, 1) == {2: 4}


def test_trials_by_bytes_keep_groups() -> None:
    found = [t.placement for t in trials_by_bytes(Simulator(TWO_GROUPS, cluster_of(2, memory_bytes=11)))]
    assert len(found) == 4
    assert all(placement[0] == placement[1] for placement in found)
    assert found[3] == (0, 0, 1, 1)


@pytest.mark.parametrize("share", [0.45, 0.35])
@pytest.mark.parametrize("method", [m for m in RUNNABLE if m not in ("single", "expert")])
def test_tight_memory_is_met_by_every_method_that_spreads(method: str, share: float) -> None:
    graph = branchy_blocks(6, 4, 1, parameter_bytes=1_000_000)
    peak = place("single", graph, Cluster.uniform(1)).plan.peak_memory_bytes[0]
    cluster = Cluster.uniform(4, memory_bytes=share * peak, link=Link(1e-4, 30))
    plan = place(method, graph, cluster, PlaceOptions(time_limit_seconds=0.7)).plan
    assert oracle.violations(graph, cluster, plan.placement, plan.priority) == []


INFEASIBLE = {
    "op": (
        graph_of({"a": 1, "b": 1}, ("a", "b", 5), persistent_bytes={"b": 4}, temporary_bytes={"b": 2}),
        r"op 'b' needs at least 11 bytes, the largest device has 10",
    ),
    "group": (
        graph_of({"a": 1, "b": 1}, persistent_bytes={"a": 6, "b": 6}, colocation={"a": "g", "b": "g"}),
        r"colocation group 'g' needs at least 12 bytes, the largest device has 10",
    ),
    "total": (
        graph_of({f"o{i}": 1 for i in range(3)}, persistent_bytes={f"o{i}": 7 for i in range(3)}),
        r"all persistent bytes together need at least 21 bytes, the 2 devices together have 20",
    ),
}


@pytest.mark.parametrize("method", RUNNABLE)
@pytest.mark.parametrize("case", INFEASIBLE)
def test_proven_infeasible(method: str, case: str) -> None:
    graph, message = INFEASIBLE[case]
    expected = f"no plan can exist: {message}[,;].*use more devices.*--device_memory.*smaller batch"
    with pytest.raises(InfeasibleError, match=expected) as e:
        place(method, graph, cluster_of(2, memory_bytes=10))
    assert e.value.status == "infeasible"


def test_one_device_must_hold_the_whole_graph() -> None:
    graph = graph_of({"a": 1, "b": 1}, persistent_bytes={"a": 6, "b": 6})
    with pytest.raises(InfeasibleError, match="the graph needs at least 12 bytes, its one device 'device:0' has 10"):
        require_feasible(graph, cluster_of(1, memory_bytes=10))


def test_no_proof_where_a_device_is_unlimited_or_an_op_takes_no_time() -> None:
    graph = INFEASIBLE["op"][0]
    require_feasible(graph, Cluster((Device("0", 10), Device("1"))))
    instant = graph_of({"a": 0}, temporary_bytes={"a": 99})
    assert minimal_bytes(instant, (0,), instant.columns.charged_bytes()) == 0
    assert place("single", instant, cluster_of(1, memory_bytes=10)).plan.peak_memory_bytes == (0,)


@pytest.mark.parametrize("method", RUNNABLE)
def test_bad_packing_is_proven(method: str) -> None:
    """Three ops of 6 bytes into two devices of 10: the sum fits, the ops do not."""
    graph = graph_of({f"o{i}": 1 for i in range(3)}, persistent_bytes={f"o{i}": 6 for i in range(3)}, expert={"o0": 0, "o1": 1, "o2": 2})
    with pytest.raises(InfeasibleError, match=r"'o0' \(6 bytes\).* do not fit on them together; any one of them left out") as e:
        place(method, graph, cluster_of(2, memory_bytes=10))
    assert (e.value.status, e.value.conflict) == ("infeasible", ("o0", "o1", "o2"))


def test_what_is_not_proven_is_said_to_be_unknown() -> None:
    """a's tensor of 6 bytes waits for r while m needs 8; each op alone fits."""
    graph = graph_of(
        {"a": 1, "m": 1, "r": 1},
        ("a", "r", 6, "x"), ("a", "m", 1, "y"), ("m", "r", 1, "z"),
        temporary_bytes={"m": 6}, colocation=dict.fromkeys("amr", "g"),
    )  # fmt: skip
    with pytest.raises(InfeasibleError, match="found no plan that fits, not proven impossible") as e:
        place("m_etf", graph, cluster_of(2, memory_bytes=10))
    assert (e.value.status, e.value.conflict) == ("unknown", ())


def test_unknown_method_lists_the_known() -> None:
    with pytest.raises(OptionError, match=f"'best'; choose one of {', '.join(METHODS)}$"):
        place("best", TWO_GROUPS, cluster_of(1))


@pytest.mark.parametrize(
    ("compute_us", "link", "message"),
    [
        (1e14, Link(), "all ops on the slowest device would take 2e\\+14 us, and 1e\\+14 us is the most"),
        (1.0, Link(1e308, 1e308), "moving every tensor over the worst link would take inf us"),
        (1.0, Link(1e14, 0), "give smaller link coefficients or bytes"),
    ],
)
@pytest.mark.parametrize("method", RUNNABLE)
def test_costs_beyond_all_bounds_are_refused(method: str, compute_us: float, link: Link, message: str) -> None:
    graph = OpGraph.from_edges([Op("a", compute_us=compute_us), Op("b", compute_us=compute_us)], [("a", "b", 8, "a:0")])
    with pytest.raises(GraphError, match=message):
        place(method, graph, Cluster.uniform(2, link=link))
