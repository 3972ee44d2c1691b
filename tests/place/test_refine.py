"""refine and auto: what the search does with a start, with memory, with colocation, with seeds, and when it ends."""

import random
import signal
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.errors import InfeasibleError, PlanError
from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.place import common, refine_kernel
from baechi_ext.place.annealing import _Chain, anneal
from baechi_ext.place.blocks import block_levels
from baechi_ext.place.common import PlaceOptions, Proposal, SearchProgress, Task, Worth, begin
from baechi_ext.place.effort import clock_seconds
from baechi_ext.place.fitting import run_together
from baechi_ext.place.registry import METHODS, place
from baechi_ext.place.trial import Trial, try_orders
from baechi_ext.simulate import Simulator, simulate
from baechi_ext.simulate.arrays import make_problem, make_state
from tests import oracle
from tests.build import cluster_of, graph_of
from tests.simulate.strategies import cases


def random_graph(n: int, seed: int, *, groups: bool = False) -> OpGraph:
    """Costs with a heavy tail, two or three inputs an op, some ops bound in groups of up to four."""
    rng = random.Random(seed)
    ops = [
        Op(
            f"o{v}",
            compute_us=rng.paretovariate(1.3) * 10,
            persistent_bytes=rng.randrange(100),
            temporary_bytes=rng.randrange(20),
            colocation=f"g{v // 8}" if groups and v % 2 else None,
        )
        for v in range(n)
    ]
    edges = {(max(0, v - 1 - int(rng.expovariate(8 / n))), v) for v in range(1, n) for _ in range(2)}
    return OpGraph.from_edges(ops, [(f"o{u}", f"o{v}", 10 + u % 7, "") for u, v in sorted(edges)])


def refined(graph: OpGraph, cluster: Cluster, initial: Proposal | None = None, **options: object):  # type: ignore[no-untyped-def]
    return place("refine", graph, cluster, PlaceOptions(initial=initial, **options))  # type: ignore[arg-type]


# Starts


def test_a_better_order_is_found_for_a_placement_that_cannot_change() -> None:
    """z is on its own device and waits for y, which is to run before x. The devices' limits leave no other placement."""
    graph = graph_of(
        {"x": 9, "y": 2, "z": 6}, ("y", "z", 4), persistent_bytes={"x": 5, "y": 5, "z": 9}, colocation={"x": "xy", "y": "xy"}
    )
    cluster = Cluster((Device("0", 14), Device("1", 13)), Link(1))
    worst = Proposal((0, 0, 1), ((0.0, 1.0, 2.0),))
    assert simulate(graph, cluster, worst.placement, worst.priorities[0]).makespan_us == 21
    result = refined(graph, cluster, worst)
    assert (result.plan.placement, result.predicted_step_us) == ((0, 0, 1), 12)


def test_it_is_never_worse_than_its_start() -> None:
    graph, cluster = random_graph(60, 1), cluster_of(3, 20.0)
    for method in ("single", "m_topo", "m_etf"):
        start = place(method, graph, cluster)
        result = refined(graph, cluster, Proposal(start.plan.placement, (start.plan.priority,)), time_limit_seconds=1e-9)
        assert result.predicted_step_us <= start.predicted_step_us
    assert refined(graph, cluster, time_limit_seconds=2).predicted_step_us < 0.97 * place("m_etf", graph, cluster).predicted_step_us


def test_without_a_plan_to_start_from_it_starts_from_that_of_m_etf() -> None:
    graph, cluster = random_graph(60, 12), cluster_of(3, 20.0)
    result, known = refined(graph, cluster, time_limit_seconds=1e-9), place("m_etf", graph, cluster)
    assert (result.plan.placement, result.plan.priority) == (known.plan.placement, known.plan.priority)


def test_a_start_that_splits_a_group_is_refused() -> None:
    graph = graph_of({"a": 1, "b": 1}, colocation={"a": "g", "b": "g"})
    for method in ("refine", "auto"):
        with pytest.raises(PlanError, match="the initial plan: colocation group 'g' is split"):
            place(method, graph, cluster_of(2), PlaceOptions(initial=Proposal((0, 1))))


def test_auto_takes_up_a_given_plan_that_is_better_than_its_own() -> None:
    graph, cluster = random_graph(40, 2), cluster_of(3, 20.0)
    known = refined(graph, cluster, time_limit_seconds=0.5)
    initial = Proposal(known.plan.placement, (known.plan.priority,))
    found = place("auto", graph, cluster, PlaceOptions(initial=initial, time_limit_seconds=1e-9))
    assert found.predicted_step_us <= known.predicted_step_us
    assert found.plan.method == "auto"


# Memory and groups


def test_a_start_that_does_not_fit_is_repaired() -> None:
    graph, cluster = random_graph(40, 3, groups=True), cluster_of(4, memory_bytes=900)
    result = refined(graph, cluster, Proposal((0,) * 40), time_limit_seconds=0.7)
    assert oracle.violations(graph, cluster, result.plan.placement, result.plan.priority) == []


def test_devices_that_hold_barely_their_share() -> None:
    """The sizes come from four full devices that were cut into pieces at random; each must be filled but for one byte in 500."""
    rng = random.Random(7)
    sizes = []
    for _ in range(4):
        cuts = sorted(rng.sample(range(1, 1000), 5))
        sizes += [b - a for a, b in zip([0, *cuts], [*cuts, 1000], strict=True)]
    rng.shuffle(sizes)
    graph = OpGraph.from_edges([Op(f"o{i}", compute_us=10, persistent_bytes=size) for i, size in enumerate(sizes)], [])
    result = refined(graph, cluster_of(4, memory_bytes=1002), Proposal((0,) * len(sizes)))
    assert max(result.plan.peak_memory_bytes) <= 1002


def test_an_order_that_fits_is_found() -> None:
    """Each source's large tensor has to be read before the next source runs; longest path first runs all sources first."""
    ops = [Op(f"s{i}", compute_us=10) for i in range(6)] + [Op(f"r{i}", compute_us=1) for i in range(6)]
    edges = [(f"s{i}", f"r{i}", 100, "") for i in range(6)]
    graph, cluster = OpGraph.from_edges(ops, edges), cluster_of(1, memory_bytes=100)
    first = Proposal((0,) * 12, (tuple(map(float, range(12))),))
    assert simulate(graph, cluster, first.placement, first.priorities[0]).peak_memory_bytes == (600,)
    assert refined(graph, cluster, first).plan.peak_memory_bytes == (100,)


def test_what_fits_nowhere_is_reported() -> None:
    ops = [Op(f"o{i}", compute_us=1, persistent_bytes=6) for i in range(3)]
    graph = OpGraph.from_edges(ops, [])
    with pytest.raises(InfeasibleError, match="no plan can exist: the devices hold 10, 10 bytes") as refused:
        refined(graph, Cluster((Device("0", 10), Device("1", 10))))
    assert refused.value.status == "infeasible"


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 3), st.integers(5, 40))
def test_whatever_it_finds_is_worth_what_it_says(case: tuple[OpGraph, Cluster], seed: int, limit: int) -> None:
    graph, cluster = case
    cluster = replace(cluster, devices=tuple(replace(d, memory_bytes=limit) for d in cluster.devices))
    task = Task("refine", PlaceOptions(seed=seed), Simulator(graph, cluster), clock_seconds())
    start = try_orders(task.simulator, (0,) * len(graph), [None])
    best, interrupted = anneal(task, start, clock_seconds() + 0.1)
    assert best.key <= start.key
    assert not interrupted
    for members in graph.groups.values():
        assert len({best.placement[v] for v in members}) == 1
    expected = oracle.simulate(graph, cluster, best.placement, best.priority)
    assert best.makespan_us == pytest.approx(expected.makespan_us)


def test_a_search_keeps_to_the_plans_that_it_may_simulate() -> None:
    """However far the clock's limit is; and nearly all of them are simulated. The last news say how many."""
    graph, cluster = random_graph(50, 5, groups=True), cluster_of(3, 15.0)
    found = []
    for evaluations in (1000, 1000, 4000):
        news: list[SearchProgress] = []
        task = begin("refine", graph, cluster, PlaceOptions(watch=news.append))
        best, _ = anneal(task, try_orders(task.simulator, (0,) * len(graph), [None]), clock_seconds() + 1e6, evaluations)
        assert 0.5 * evaluations < news[-1].evaluations <= evaluations
        found.append(best.makespan_us)
    assert found[0] == found[1] >= found[2]


def test_the_kernel_keeps_account_of_its_best_plan() -> None:
    graph, cluster = random_graph(50, 5, groups=True), cluster_of(3, 15.0, memory_bytes=1500)
    problem = make_problem(graph, cluster)
    state, search = make_state(problem), refine_kernel.make_search(problem, block_levels(graph, cluster))
    chain = search.settings[0]
    chain["random"], chain["steps"] = 1, 5000
    chain["from_temperature"], chain["to_temperature"], chain["weight"], chain["heaviest"] = 10.0, 0.1, 1.0, 9.0
    chain["path_share"], chain["order_share"] = 0.3, 0.3
    chain["best_excess_bytes"] = chain["best_makespan_us"] = float("inf")
    refine_kernel.anneal(problem, state, search)
    trial = Trial(tuple(search.placement.tolist()), tuple(search.priority.tolist()), Simulator(graph, cluster))
    assert trial.key == (chain["best_excess_bytes"], chain["best_makespan_us"])
    assert 2000 < chain["done"] <= 5001
    assert {trial.placement[v] for v in graph.groups["g1"]} == {trial.placement[graph.groups["g1"][0]]}


def test_a_chain_becomes_cooler_where_it_ends_worse_and_warmer_where_nothing_changes() -> None:
    graph, cluster = random_graph(50, 5), cluster_of(3, 15.0)
    chain = _Chain(make_problem(graph, cluster), block_levels(graph, cluster), seed=0)
    first = chain.temperature
    ends = [(0, 99.0, 1.0), (0, 101.0, 0.5), (8, 99.0, 0.25), (0, 100.0, 0.5), (0, 100.0, 1.0)]
    for chain.settings["excess_bytes"], chain.settings["makespan_us"], ratio in ends:
        chain.adapt((0.0, 100.0))
        assert chain.temperature == pytest.approx(ratio * first)


def test_levels_of_blocks_hold_every_op_once() -> None:
    graph = random_graph(300, 6, groups=True)
    levels = block_levels(graph, cluster_of(4))
    assert len(levels) > 3
    for finer, coarser in zip(levels, levels[1:], strict=False):
        assert len(coarser) < len(finer)
        assert sorted(v for block in coarser for v in block) == list(range(300))
        whole = {v: set(block) for block in coarser for v in block}
        assert all(set(block) <= whole[block[0]] for block in finer)


# Seeds, ends and interruptions


def test_no_chain_runs_after_an_interrupt() -> None:
    """A plan is read only from chains that have ended."""
    graph, cluster = random_graph(50, 5), cluster_of(3, 15.0)
    problem = make_problem(graph, cluster)
    chain = _Chain(problem, block_levels(graph, cluster), seed=0)
    chain.run()  # compiles it
    chain.settings["steps"] = 2**50
    chain.settings["from_temperature"] = chain.settings["to_temperature"] = 1.0
    chain.settings["best_excess_bytes"] = chain.settings["best_makespan_us"] = float("inf")

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    threads, before = threading.active_count(), signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_together([chain], lambda: False)
        assert threading.active_count() == threads
        assert chain.evaluations > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        chain.settings["stop"] = True


def test_the_same_seed_gives_the_same_plan() -> None:
    graph, cluster = random_graph(9, 4), cluster_of(2, 20.0, memory_bytes=450)
    plans = [refined(graph, cluster, seed=1).plan for _ in range(2)]
    assert (plans[0].placement, plans[0].priority) == (plans[1].placement, plans[1].priority)


def test_it_ends_when_the_bound_is_met() -> None:
    """Eight equal ops on four devices, from all on one: nothing beats two on each."""
    graph = OpGraph.from_edges([Op(f"o{v}", compute_us=10) for v in range(8)], [])
    result = refined(graph, cluster_of(4), Proposal((0,) * 8), time_limit_seconds=3600)
    assert (result.status, result.predicted_step_us) == ("optimal", 20)


def test_it_weighs_what_transfers_take_the_host() -> None:
    """For the devices four would be best; each takes the host a transfer more."""
    readers = dict.fromkeys("abcd", 10.0)
    graph = graph_of({"all": 0.0, **readers}, *(("all", name, 4) for name in readers), issue_us=dict.fromkeys("abcd", 4.0))
    cluster = Cluster.uniform(4, link=Link(issue_us=8))
    result = refined(graph, cluster, Proposal((0,) * 5))
    assert (len(set(result.plan.placement)), result.predicted_step_us) == (2, 16 + 8)
    assert oracle.optimum(graph, cluster).makespan_us == 24


# When more time is not worth it


def test_what_is_left_to_gain_is_worth_as_much_time_as_it_saves() -> None:
    worth = Worth(steps=500, gap=0.01)
    assert worth.seconds(3000, 1000) == 1.0
    assert worth.seconds(1011, 1000) == pytest.approx(0.0055)
    assert worth.seconds(1009, 1000) == worth.seconds(1000, 1000) == 0.0
    assert worth.seconds(10, 0) > 0


@pytest.mark.parametrize("method", ["refine", "auto"])
def test_a_search_ends_within_the_gap_of_the_bound(method: str) -> None:
    """By far the most of the graph is one op, which no plan shortens; the small ones behind it can't be all hidden."""
    small = {f"s{v}": 1.0 + v % 3 for v in range(60)}
    graph = graph_of({"large": 1e5, **small}, *(("large", name, 8) for name in small))
    cluster = cluster_of(3, 2.0)
    result = place(method, graph, cluster, PlaceOptions(time_limit_seconds=3600, worth=Worth(steps=1e12, gap=0.01)))
    assert result.status == "feasible"
    assert result.predicted_step_us <= 1.01 * result.lower_bound_us
    assert "by the graph and the costs that it had, its plan was within 0.01 of the proven bound" in result.notes[-1]


@pytest.mark.parametrize("method", ["refine", "auto"])
def test_a_search_takes_no_longer_than_it_can_pay(method: str) -> None:
    """Steps of some milliseconds, ten of them: less than a tenth of a second in all."""
    graph, cluster = random_graph(200, 8), cluster_of(4, 20.0)
    worth = Worth(steps=10, gap=0.0)
    result = place(method, graph, cluster, PlaceOptions(time_limit_seconds=3600, worth=worth))
    left_us = result.predicted_step_us - result.lower_bound_us
    assert left_us > 0
    assert worth.seconds(result.predicted_step_us, result.lower_bound_us) <= result.placement_seconds
    assert "by the graph and the costs that it had, at most " in result.notes[-1]
    assert f"would not pay more of it in {worth.steps:g} steps" in result.notes[-1]
    assert result.plan.options["worth"] == {"steps": 10, "gap": 0.0}


def test_many_steps_are_worth_a_longer_search() -> None:
    """The same search ends by itself where it may take all its time and where the steps are worth more than that."""
    graph, cluster = random_graph(9, 4), cluster_of(2, 20.0, memory_bytes=450)
    plain = refined(graph, cluster, seed=1)
    worth = refined(graph, cluster, seed=1, worth=Worth(steps=1e15, gap=0.0))
    assert (worth.plan.placement, worth.plan.priority) == (plain.plan.placement, plain.plan.priority)
    assert worth.notes == plain.notes == ()
    assert "worth" not in plain.plan.options


def test_a_plan_that_does_not_fit_is_never_enough() -> None:
    graph, cluster = random_graph(9, 4), cluster_of(2, 20.0, memory_bytes=450)
    task = begin("refine", graph, cluster, PlaceOptions(worth=Worth(steps=0.0, gap=1e9)))
    assert not task.is_enough(try_orders(task.simulator, (0,) * len(graph), (None,)))
    result = refined(graph, cluster, Proposal((0,) * len(graph)), worth=Worth(steps=0.0, gap=1e9))
    assert all(peak <= 450 for peak in result.plan.peak_memory_bytes)


def test_it_says_how_it_goes() -> None:
    graph, cluster = random_graph(200, 8), cluster_of(4, 20.0)
    seen: list[SearchProgress] = []

    def watch(search: SearchProgress) -> None:
        seen.append(search)
        if len(seen) == 5:
            raise KeyboardInterrupt

    result = refined(graph, cluster, time_limit_seconds=600, watch=watch)
    assert len(seen) == 5
    assert all(a.evaluations <= b.evaluations and a.best_us >= b.best_us for a, b in zip(seen, seen[1:], strict=False))
    assert seen[-1].best_us >= result.predicted_step_us > result.lower_bound_us == seen[0].bound_us
    assert "watch" not in result.plan.options


@pytest.mark.parametrize("method", ["refine", "auto"])
def test_an_interrupted_search_gives_the_best_plan_so_far(method: str) -> None:
    graph, cluster = random_graph(200, 9), cluster_of(4, 20.0)

    def interrupt(search: SearchProgress) -> None:
        if search.evaluations > 2000:
            raise KeyboardInterrupt

    result = place(method, graph, cluster, PlaceOptions(time_limit_seconds=600, watch=interrupt))
    assert result.interrupted
    assert result.predicted_step_us < place("m_etf", graph, cluster).predicted_step_us


def test_an_interrupted_method_leaves_the_plans_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = random_graph(20, 10), cluster_of(2, 20.0)
    absent = METHODS["m_etf"]._replace(function="tests.place.test_refine:interrupted_method")
    monkeypatch.setitem(METHODS, "m_etf", absent)
    result = place("auto", graph, cluster)
    assert result.interrupted
    assert result.predicted_step_us <= place("single", graph, cluster).predicted_step_us
    monkeypatch.setitem(METHODS, "single", absent)
    with pytest.raises(KeyboardInterrupt):
        place("auto", graph, cluster)


def interrupted_method(task: Task) -> None:
    raise KeyboardInterrupt


# When splitting does not pay


def test_where_transfers_are_dear_auto_says_that_splitting_does_not_pay() -> None:
    graph = graph_of({"a": 5, "b": 5, "c": 5}, ("a", "b", 100), ("a", "c", 100))
    result = place("auto", graph, cluster_of(2))
    assert (result.splits, result.predicted_step_us) == (False, 15)
    assert place("auto", graph, cluster_of(2, us_per_byte=0.01)).splits


@pytest.mark.parametrize(("ops", "untried"), [(300, set()), (1500, {"heft", "metis", "m_sct"})])
def test_however_short_its_time_auto_is_no_worse_than_the_quickest_methods(ops: int, untried: set[str]) -> None:
    """In a small graph than any quick method in so short a time; in a larger one it says what it left out."""
    graph, cluster, hurried = random_graph(ops, 3), cluster_of(2, us_per_byte=0.01), PlaceOptions(time_limit_seconds=1e-9)
    result = place("auto", graph, cluster, hurried)
    assert result.splits
    assert {*result.untried} - {"schedules of m_etf"} == untried  # those of m_etf take about the tenth of a second that it may
    for name, method in METHODS.items():
        if method.cheap and name not in untried:
            assert result.predicted_step_us <= place(name, graph, cluster, hurried).predicted_step_us


def test_the_bound_is_proven_once_for_all_methods_that_auto_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    proven = []
    monkeypatch.setattr(common, "lower_bound_us", lambda graph, cluster: proven.append(graph) or 1.0)
    place("auto", graph := random_graph(60, 3, groups=True), cluster_of(2), PlaceOptions(time_limit_seconds=0.1))
    assert proven == [graph]


def test_what_is_proven_optimal_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "m_etf", METHODS["m_etf"]._replace(function="tests.place.test_refine:interrupted_method"))
    result = place("auto", graph_of({"a": 0.1, "b": 0.2}, ("a", "b", 1)), cluster_of(2))
    assert (result.status, result.splits, result.interrupted, result.untried) == ("optimal", False, False, ())
