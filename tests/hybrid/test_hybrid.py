"""Placement and sharding together: known optima, never worse than either alone, and plans that simulate to what they predict."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.errors import InfeasibleError, PlanError, ShardError
from baechi_ext.hybrid.groups import group_cluster, group_sizes, groups_of, inner_link
from baechi_ext.hybrid.placer import HybridResult, Placer, hybrid
from baechi_ext.hybrid.plan import HybridPlan, load_plan
from baechi_ext.hybrid.sharding import Sharding, machine_of
from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph, Plan
from baechi_ext.place.common import PlaceOptions, PlanResult
from baechi_ext.place.registry import place
from baechi_ext.shard.graph import Axis, Node, ShardGraph, Tensor
from baechi_ext.shard.prune import restricted
from baechi_ext.shard.search import search
from baechi_ext.shard.terms import AllReduce, Compute
from baechi_ext.simulate import simulate
from tests.hybrid.steps import WORDS, layer, step
from tests.shard.problems import graphs

FAST = Link(0.0, 0.0)
m_etf: Placer = partial(place, "m_etf")
auto: Placer = partial(place, "auto", options=PlaceOptions(time_limit_seconds=0.2))


def devices(count: int, link: Link = FAST, memory_bytes: float | None = None) -> Cluster:
    return Cluster.uniform(count, link=link, memory_bytes=memory_bytes)


def simulated_again(result: HybridResult, folder: Path) -> float:
    """The step that the saved plan is predicted to take, by the file alone."""
    result.plan.save(folder / "plan.json")
    plan = load_plan(folder / "plan.json", result.plan.graph)
    assert plan == result.plan
    judged = plan.of_groups if isinstance(plan, HybridPlan) else plan
    timeline = simulate(judged.graph, judged.cluster, judged.placement, judged.priority)
    peaks = timeline.peak_memory_bytes
    size = len(result.plan.cluster) // len(peaks)
    assert [peak for peak in peaks for _ in range(size)] == pytest.approx(list(result.plan.peak_memory_bytes))
    return timeline.makespan_us


@pytest.mark.parametrize(
    ("layers", "count", "size", "us"),
    [
        pytest.param([layer("a", 1), layer("b", 1)], 2, 1, 100.0, id="two branches that can't be split"),
        pytest.param([layer("huge", 12)], 4, 4, 25.0, id="one huge layer"),
        pytest.param([layer("huge", 12)], 6, 6, 100 / 6, id="one huge layer in six"),
        pytest.param([layer("a", 2), layer("b", 2)], 4, 2, 50.0, id="two branches that can be halved"),
        pytest.param([layer("huge", 7)], 7, 7, 100 / 7, id="a prime number of devices"),
        pytest.param([layer("a", 12)], 1, 1, 100.0, id="one device"),
    ],
)
def test_known_optima(layers: list[Node], count: int, size: int, us: float, tmp_path: Path) -> None:
    graph, sharding = step(layers)
    result = hybrid(graph, devices(count), sharding, auto)
    assert (result.group_size, result.predicted_step_us) == (size, pytest.approx(us))
    assert simulated_again(result, tmp_path) == pytest.approx(us)
    assert [n for n, _ in result.steps_us] == group_sizes(devices(count))
    assert result.lower_bound_us == pytest.approx(100.0 * len(layers) / count)
    assert result.status == ("optimal" if us == pytest.approx(result.lower_bound_us) else "feasible")


def test_messages_in_a_group_are_waited_for() -> None:
    link = Link(us_per_byte=0.01, latency_us=3.0, send_us=1.0, receive_us=0.5, send_us_per_byte=0.002)
    graph, sharding = step([layer("a", 2, sums=100.0), layer("b", 2, sums=100.0)])
    result = hybrid(graph, devices(4, link), sharding, auto)
    ring = 2 * (3.0 + 1.0 + 0.5) + 2 * 100 * 4 / 2 * (0.01 + 0.002)
    assert (result.group_size, result.predicted_step_us) == (2, pytest.approx(50.0 + ring))
    split = result.plan.shard[0]
    assert (split.node, dict(split.splits), split.compute_share) == ("a", {"rows": 2}, 0.5)
    assert split.communication_us == pytest.approx(ring)


def test_tensors_go_between_groups_in_their_parts() -> None:
    link = Link(us_per_byte=0.01, latency_us=3.0)
    graph, sharding = step([layer("a", 2), layer("b", 2), layer("join", 2, reads=2)], [(0, 2), (1, 2)], us=100.0)
    result = hybrid(graph, devices(4, link), sharding, auto)
    assert result.group_size == 2
    assert result.predicted_step_us == pytest.approx(50.0 + 3.0 + 4 * WORDS / 2 * 0.01 + 50.0)


def test_where_nothing_pays_it_says_so() -> None:
    graph, sharding = step([layer("a", 4, sums=10.0), layer("b", 4, sums=10.0, reads=1)], [(0, 1)], us=1.0)
    result = hybrid(graph, devices(4, Link(0.0, 1000.0)), sharding, auto)
    assert not result.splits
    assert result.predicted_step_us == 2.0
    assert type(result.plan) is Plan
    assert any("neither placing nor sharding pays" in note for note in result.notes)
    paying = hybrid(*with_cluster(step([layer("a", 2)]), devices(2)), auto)
    assert paying.splits
    assert not any("pays" in note for note in paying.notes)


def on_pairs(graph: OpGraph, cluster: Cluster) -> PlanResult:
    """A placer for two groups alone."""
    if len(cluster) != 2:
        raise InfeasibleError("only for two", status="unknown")
    return auto(graph, cluster)


def with_cluster(made: tuple[OpGraph, Sharding], cluster: Cluster) -> tuple[OpGraph, Cluster, Sharding]:
    return made[0], cluster, made[1]


def weighted(messages: float) -> tuple[OpGraph, Sharding]:
    """A layer with parameters, which is split by examples for nothing, or by features for a sum."""
    data, weights = Tensor((8, 16), ((0,), (1,))), Tensor((16,), ((1,),))
    terms = (Compute(1.0, (0, 1)), AllReduce(messages, (), (1,), "output sum"))
    node = Node("linear", "linear", (Axis("batch", 8), Axis("features", 16)), (), (data,), terms, (weights,))
    ops = [
        Op("forward", compute_us=100.0, persistent_bytes=1000, output_bytes=512),
        Op("backward", phase="backward", compute_us=200.0, forward_op="forward", colocation=None),
        Op("update", phase="update", compute_us=10.0, persistent_bytes=600, forward_op="forward"),
    ]
    graph = OpGraph.from_edges(ops, [("forward", "backward", 512, "y"), ("backward", "update", 64, "gradient")])
    return graph, Sharding(ShardGraph("weighted", (node,), ()), (0, 0, 0))


def test_memory_decides_how_layers_are_split(tmp_path: Path) -> None:
    link = Link(us_per_byte=0.1)
    free = hybrid(*with_cluster(weighted(1000.0), devices(2, link)), m_etf)
    assert dict(free.plan.shard[0].splits) == {"batch": 2}
    assert free.predicted_step_us == pytest.approx(50.0 + 100.0 + 10.0)
    assert free.plan.peak_memory_bytes[0] == pytest.approx(1600 + 256 + 64)
    tight = hybrid(*with_cluster(weighted(1000.0), devices(2, link, memory_bytes=1200)), m_etf)
    assert dict(tight.plan.shard[0].splits) == {"features": 2}
    assert tight.predicted_step_us == pytest.approx(50.0 + 100.0 + 5.0 + 1000 * 4 * 0.1)
    assert tight.plan.peak_memory_bytes == pytest.approx((800 + 256 + 32,) * 2)
    assert simulated_again(tight, tmp_path) == pytest.approx(tight.predicted_step_us)
    with pytest.raises(InfeasibleError, match="groups of 1: .*groups of 2: "):
        hybrid(*with_cluster(weighted(1000.0), devices(2, link, memory_bytes=1000)), m_etf)


def test_ties_are_split_alike() -> None:
    graph, sharding = weighted(40.0)
    node = sharding.graph.nodes[0]
    again = replace(node, name="again", weights=(), terms=(Compute(1.0, (0, 1)), AllReduce(100.0, (), (0,), "output sum")))
    edges = [("forward", "backward", 512, "y"), ("backward", "update", 64, "gradient")]
    graph = OpGraph.from_edges([*graph.ops, Op("again", compute_us=50.0)], edges)
    for ties, splits in ((), ({"batch": 2}, {"features": 2})), (((0, 1),), ({"features": 2}, {"features": 2})):
        sharded = Sharding(ShardGraph("tied", (node, again), (), ties), (0, 0, 0, 1))
        plan = hybrid(graph, devices(2, Link(us_per_byte=0.1)), sharded, m_etf).plan
        assert isinstance(plan, HybridPlan)
        assert (dict(plan.shard[0].splits), dict(plan.shard[3].splits)) == splits


def test_a_call_stays_in_one_group() -> None:
    """Forward ops of 100 us and backward ops of 1 us that could go anywhere: a call's ops do not part, and so not all groups have work."""
    graph, sharding = step([layer("a", 2), layer("b", 2)])
    backward = [Op(f"{name}'", phase="backward", compute_us=50.0) for name in "aaab"]
    backward = [replace(op, id=f"{op.id}{i}") for i, op in enumerate(backward)]
    graph = OpGraph.from_edges([*graph.ops, *backward], [])
    result = hybrid(graph, devices(4), Sharding(sharding.graph, (0, 1, 0, 0, 0, 1)), on_pairs)
    assert isinstance(result.plan, HybridPlan)
    group = result.plan.placement
    assert (len({group[v] for v in (0, 2, 3, 4)}), group[1]) == (1, group[5])
    assert result.predicted_step_us == pytest.approx((100.0 + 3 * 50.0) / 2)


def test_only_what_can_be_run_is_split() -> None:
    graph, sharding = step([layer("a", 4), layer("b", 4)])
    whole_b = replace(sharding, runnable=lambda tables: restricted(tables, [np.arange(tables.sizes[0]), np.zeros(1, np.int64)]))
    graph = replace(graph, ops=(graph.ops[0], replace(graph.ops[1], compute_us=10.0)))
    result = hybrid(graph, devices(4), whole_b, m_etf)
    assert isinstance(result.plan, HybridPlan)
    assert [dict(split.splits) for split in result.plan.shard] == [{"rows": 4}, {}]
    assert result.predicted_step_us == pytest.approx(100.0 / 4 + 10.0)


def test_pinned_ops_stay_on_their_device() -> None:
    graph, sharding = step([layer("huge", 4), layer("b", 4)])
    pinned = replace(graph, ops=(replace(graph.ops[0], pin=3), graph.ops[1]))
    result = hybrid(pinned, devices(4), sharding, auto)
    assert (result.group_size, result.plan.placement[0]) == (1, 3)
    assert result.plan.lower_bound_us == place("auto", pinned, devices(4)).plan.lower_bound_us
    assert any("pinned" in note for note in result.notes)


def test_one_group_takes_what_the_search_says() -> None:
    """All arithmetic and all messages of the strategy are in the ops' times, those of nodes without ops, too."""
    link = Link(us_per_byte=0.05, latency_us=2.0)
    tensor = Tensor((8, 8), ((0,), (1,)))
    axes = (Axis("rows", 8), Axis("columns", 8))
    first = Node("first", "layer", axes, (), (tensor,), (Compute(1.0, (0, 1)), AllReduce(4.0, (0,), (1,), "output sum")))
    view = Node("view", "view", (Axis("columns", 8), Axis("rows", 8)), (Tensor((8, 8), ((1,), (0,))),), (tensor,))
    turned = Tensor((8, 8), ((1,), ()))
    last = Node("last", "layer", axes, (turned,), (turned,), (Compute(1.0, (0, 1)), AllReduce(9.0, (1,), (0,), "weight gradient")))
    base, sharding = step([first, view, last], [(0, 1), (1, 2)])
    graph = OpGraph.from_edges([base.ops[0], base.ops[2]], [("first", "last", 256, "out")])
    sharding = Sharding(sharding.graph, (0, 2))
    timed = sharding.timed(graph)
    for count in (2, 3, 4, 8):
        cluster = devices(count, link)
        searched = search(timed, machine_of(count, inner_link(cluster, tuple(range(count))), 1.0))
        result = hybrid(graph, cluster, sharding, m_etf)
        assert dict(result.steps_us)[count] == pytest.approx(searched.cost)


@st.composite
def problems(draw: st.DrawFn) -> tuple[OpGraph, Cluster, Sharding]:
    """A random shard graph, up to two ops for each node and one without; links that may be slow."""
    sharded = draw(graphs())
    ops, node_of, edges = [], [], []
    for n, node in enumerate(sharded.nodes):
        for phase in ("forward", "backward")[: draw(st.integers(0, 2))]:
            ops.append(Op(f"{node.name}.{phase}", phase=phase, compute_us=draw(st.sampled_from((0.0, 5.0, 80.0)))))
            node_of.append(n)
    ops.append(Op("whole", compute_us=7.0))
    node_of.append(None)
    for v in range(1, len(ops)):
        for u in draw(st.lists(st.integers(0, v - 1), max_size=2, unique=True)):
            edges.append((ops[u].id, ops[v].id, 100 + u, "out"))
    link = Link(draw(st.sampled_from((0.0, 0.01, 1.0))), draw(st.sampled_from((0.0, 2.0))))
    speed = draw(st.sampled_from((1.0, 2.0)))
    cluster = Cluster(tuple(Device(f"d{i}", speed=speed) for i in range(draw(st.sampled_from((1, 2, 3, 4))))), link)
    return OpGraph.from_edges(ops, edges), cluster, Sharding(sharded, tuple(node_of))


@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_never_worse_than_either_alone(problem: tuple[OpGraph, Cluster, Sharding], tmp_path_factory: pytest.TempPathFactory) -> None:
    graph, cluster, sharding = problem
    result = hybrid(graph, cluster, sharding, m_etf)
    alone = place("m_etf", graph, cluster)
    assert result.predicted_step_us <= alone.predicted_step_us * (1 + 1e-9)
    speed, count = cluster.devices[0].speed, len(cluster)
    if count > 1:
        machine = machine_of(count, inner_link(cluster, tuple(range(count))), speed)
        unsplit = sum(op.compute_us for op, n in zip(graph.ops, sharding.node_of, strict=True) if n is None)
        sharded = (search(sharding.timed(graph), machine).cost + unsplit) / speed
        assert result.predicted_step_us <= sharded * (1 + 1e-6) + 1e-6
    assert result.predicted_step_us >= result.lower_bound_us * (1 - 1e-9)
    assert simulated_again(result, tmp_path_factory.mktemp("plan")) == pytest.approx(result.predicted_step_us)


def test_groups_as_devices() -> None:
    near, far = Link(0.1, 1.0), Link(0.5, 9.0)
    given = (Device("a", 100, 2.0), Device("b", 60, 1.0), Device("c", None, 3.0), Device("d", None, 3.0))
    cluster = Cluster(given, near, {("a", "b"): far, ("b", "d"): far}, parallel_transfers=True)
    groups = groups_of(cluster, 2)
    assert groups == ((0, 1), (2, 3))
    made = group_cluster(cluster, groups)
    assert made.devices == (Device("a+b", 60, 1.0), Device("c+d", None, 3.0))
    assert (made.link(0, 1), made.link(1, 0), made.parallel_transfers) == (far, near, True)
    assert inner_link(cluster, (0, 1)) == far
    assert group_cluster(cluster, groups_of(cluster, 1)).link_table()[0][1] == far


def plan_of_pairs() -> tuple[OpGraph, HybridPlan]:
    graph, sharding = step([layer("a", 2), layer("b", 2)])
    plan = hybrid(graph, devices(4), sharding, m_etf).plan
    assert isinstance(plan, HybridPlan)
    return graph, plan


def test_readers_of_plain_plans_refuse_groups(tmp_path: Path) -> None:
    graph, plan = plan_of_pairs()
    plan.save(tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    assert value["device_groups"] == [[0, 1], [2, 3]]
    assert sorted(value["placement"].values()) == [0, 2]
    assert value["shard"]["a"]["splits"] == {"rows": 2}
    with pytest.raises(PlanError, match=r"plan.json: the plan splits ops over groups of devices"):
        Plan.load(tmp_path / "plan.json", graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_groups": [[0, 1], [2]]}, "each device has to be in one, all of one size"),
        ({"device_groups": [[0, 1], [1, 2]]}, "each device has to be in one"),
        ({"device_groups": "all"}, "expected lists of device indices"),
        ({"device_groups": [[1, 0], [2, 3]]}, "placed on device 0, which is not the first of its group"),
        ({"shard": None}, 'no object "shard"'),
        ({"shard": {}}, "the shard of op 'a' is broken: Expected `object`, got `null`"),
        ({"shard": {"a": {"compute_share": 2.0}, "b": {}}}, r"shard of op 'a' is broken: Expected `float` <= 1.0 - at `\$.compute_share`"),
        ({"shard": {"a": {"communication_us": "long"}, "b": {}}}, r"Expected `float`, got `str` - at `\$.communication_us`"),
        ({"shard": {"a": {"tensor_shares": [1]}, "b": {}}}, r"Expected `object`, got `array` - at `\$.tensor_shares`"),
    ],
)
def test_broken_plans(change: dict, message: str) -> None:
    graph, plan = plan_of_pairs()
    with pytest.raises(PlanError, match=message):
        HybridPlan.from_json({**plan.to_json(), **change}, graph)


def test_a_plan_of_groups_keeps_to_its_links() -> None:
    graph, plan = plan_of_pairs()
    limited = plan.on(devices(4, memory_bytes=10))
    assert limited.group_cluster.devices[0].memory_bytes == 10
    assert HybridPlan.from_json(plan.to_json(), graph, devices(4, memory_bytes=10)) == limited
    for other in (devices(4, Link(1.0, 1.0)), devices(2)):
        with pytest.raises(PlanError, match="not on other devices or links"):
            plan.on(other)


def test_a_sharding_of_another_graph() -> None:
    graph, sharding = step([layer("a", 2), layer("b", 2)])
    with pytest.raises(ShardError, match="of 1 ops and the graph has 2"):
        hybrid(graph, devices(2), Sharding(sharding.graph, (0,)), m_etf)
    with pytest.raises(ShardError, match="node 5 of 2"):
        Sharding(sharding.graph, (0, 5))


def test_interrupted_searches_end_it() -> None:
    graph, sharding = step([layer("huge", 4)])

    def stopped(graph: OpGraph, cluster: Cluster) -> PlanResult:
        return replace(m_etf(graph, cluster), interrupted=True)

    result = hybrid(graph, devices(4), sharding, stopped)
    assert (result.interrupted, result.group_size, len(result.steps_us)) == (True, 1, 1)
    apart, sharding = step([layer("a", 1), layer("b", 1)])
    result = hybrid(apart, devices(4), sharding, m_etf, stopped)
    assert (result.interrupted, result.group_size, len(result.steps_us)) == (True, 1, 2)
