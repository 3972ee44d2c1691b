"""The favourite-child LP: known answers, the matching, solver statuses, and that its docstring names its functions."""

import random
import re
import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import MissingBackendError, SolverError, SolverTimeoutError
from baechi_ext.ir import Cluster, Link
from baechi_ext.place import sct_lp
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of
from tests.place.training import branchy_blocks


def solved(graph, cluster):  # type: ignore[no-untyped-def]
    (part,) = sct_lp.slices(graph, cluster, sct_lp.pair_costs_us(graph, cluster))
    lp = sct_lp.model(part)
    return sct_lp.solve(lp, 10), lp.problem


def test_chain_saves_every_transfer() -> None:
    graph = graph_of({"a": 2, "b": 3, "c": 4}, ("a", "b", 5), ("b", "c", 5))
    values, problem = solved(graph, cluster_of(2))
    assert values == pytest.approx({(0, 1): 0, (1, 2): 0})
    assert problem.variablesDict()["w"].varValue == pytest.approx(9)
    assert sct_lp.favourite_children(graph, cluster_of(2), 0.1, 10).child == (1, 2, None)


def test_fork_prefers_the_child_with_the_longer_path() -> None:
    """a-b-d is the longer path: with b as favourite w = 1 + 8 + 0 = 9, and c, paying 4, ends at 1 + 4 + 3 = 8."""
    graph = graph_of({"a": 1, "b": 8, "c": 3}, ("a", "b", 4), ("a", "c", 4))
    values, problem = solved(graph, cluster_of(2))
    assert values == pytest.approx({(0, 1): 0, (0, 2): 1})
    assert problem.variablesDict()["w"].varValue == pytest.approx(9)


def test_join_has_one_favourite_parent() -> None:
    graph = graph_of({"a": 8, "b": 1, "c": 1}, ("a", "c", 4), ("b", "c", 4))
    assert solved(graph, cluster_of(2))[0] == pytest.approx({(0, 2): 0, (1, 2): 1})
    assert sct_lp.favourite_children(graph, cluster_of(2), 0.1, 10).child == (2, None, None)


def test_equal_children_share_the_saving() -> None:
    """Both children cannot be the favourite: x = 1/2 each is the relaxed optimum, and a threshold below it takes neither."""
    graph = graph_of({"a": 1, "b": 5, "c": 5}, ("a", "b", 4), ("a", "c", 4))
    values, problem = solved(graph, cluster_of(2))
    assert values == pytest.approx({(0, 1): 0.5, (0, 2): 0.5})
    assert problem.variablesDict()["w"].varValue == pytest.approx(8)
    assert sct_lp.favourite_children(graph, cluster_of(2), 0.1, 10).child == (None, None, None)
    assert sct_lp.favourite_children(graph, cluster_of(2), 0.5, 10).child == (1, None, None)


def test_off_the_critical_path_the_dear_transfer_is_saved() -> None:
    """The second part of the objective decides: w is the same whether c or d follows b."""
    graph = graph_of({"a": 100, "b": 1, "c": 1, "d": 1}, ("b", "c", 2, "x"), ("b", "d", 9, "y"))
    assert sct_lp.favourite_children(graph, cluster_of(2), 0.0, 10).child == (None, 3, None, None)


@pytest.mark.parametrize("unit", [1e-12, 1e-9, 1.0, 1e9, 1e15, 1e30])
def test_the_unit_of_time_does_not_matter(unit: float) -> None:
    """The fork above, and a chain that matters to nobody."""
    times = {"a": unit, "b": 8 * unit, "c": 3 * unit, "d": 1e-7 * unit, "e": 0.0}
    graph = graph_of(times, ("a", "b", 4), ("a", "c", 4), ("d", "e", 1))
    assert sct_lp.favourite_children(graph, cluster_of(2, us_per_byte=unit), 0.1, 10).child == (1, None, None, 4, None)


def test_costs_of_many_orders_of_magnitude() -> None:
    """HiGHS called such programs infeasible, did not know, or did not take them."""
    draw = random.Random(0)

    def cost() -> float:
        return draw.choice([0.0, 10 ** draw.uniform(-9, 15)])

    for _ in range(50):
        times = {name: cost() for name in "abcdefgh"}
        edges = [(a, b, int(cost()), b) for a, b in combinations(times, 2) if draw.random() < 0.5]
        graph = graph_of(times, *edges)
        child = sct_lp.favourite_children(graph, cluster_of(3, us_per_byte=10 ** draw.uniform(-12, 2)), 0.1, 10).child
        assert all(c is None or c in graph.successors[v] for v, c in enumerate(child))


def test_costs_of_pairs() -> None:
    """Tensors of one pair are added up, links averaged; a colocation group pays nothing."""
    graph = graph_of(
        {"a": 1, "b": 1, "c": 1},
        ("a", "b", 10, "x"),
        ("a", "b", 20, "y"),
        ("a", "c", 10, "x"),
        colocation={"a": "g", "c": "g"},
    )
    cluster = Cluster(Cluster.uniform(2).devices, Link(1, 2), {("device:0", "device:1"): Link(3, 4)})
    assert sct_lp.pair_costs_us(graph, cluster) == {(0, 1): 30 * 2 + 2 * 3, (0, 2): 0}


def test_free_transfers_need_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sct_lp, "model", None)
    graph = graph_of({"a": 1, "b": 1}, ("a", "b", 0))
    assert sct_lp.favourite_children(graph, cluster_of(2), 0.1, 10).child == (None, None)


def test_slices_keep_what_is_critical_in_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forks, one after the other; in each the child on the longer path is the favourite, and c's path is longer only for e."""
    graph = graph_of(
        {"a": 1, "b": 6, "c": 5, "d": 1, "e": 9},
        *(("a", "b", 4), ("a", "c", 4), ("b", "d", 4), ("c", "e", 4)),
    )
    whole = sct_lp.favourite_children(graph, cluster_of(2), 0.1, 10).child
    monkeypatch.setattr(sct_lp, "WHOLE_OPS", 0)
    monkeypatch.setattr(sct_lp, "SLICE_OPS", 3)
    costs = sct_lp.pair_costs_us(graph, cluster_of(2))
    parts = sct_lp.slices(graph, cluster_of(2), costs)
    assert [list(part.times) for part in parts] == [[0, 1, 2], [3, 4]]
    assert parts[0].tails == {1: 1, 2: 9}
    assert parts[1].heads == {3: 7, 4: 6}
    assert [sorted(part.costs) for part in parts] == [[(0, 1), (0, 2)], []]
    assert whole[0] == 2
    assert sct_lp.favourite_children(graph, cluster_of(2), 0.1, 10).child == (2, None, None, None, None)


def test_every_pair_within_a_slice_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = branchy_blocks(6, 4, 0), Cluster.uniform(2, link=Link(1e-4, 30))
    monkeypatch.setattr(sct_lp, "WHOLE_OPS", 0)
    monkeypatch.setattr(sct_lp, "SLICE_OPS", 30)
    child = sct_lp.favourite_children(graph, cluster, 0.5, 60).child
    assert len(sct_lp.slices(graph, cluster, sct_lp.pair_costs_us(graph, cluster))) > 2
    assert all(c is None or c in graph.successors[v] for v, c in enumerate(child))
    assert sum(c is not None for c in child) > len(graph) / 4


VALUES = st.dictionaries(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1]),
    st.sampled_from([0.0, 1e-9, 0.1, 0.3, 0.5, 1.0]),
)


@given(values=VALUES, threshold=st.sampled_from([0.0, 0.1, 0.5, 1.0]), data=st.data())
def test_matching_is_a_maximal_matching(values: dict[sct_lp.Pair, float], threshold: float, data: st.DataObject) -> None:
    costs = {pair: data.draw(st.integers(1, 3), label=str(pair)) for pair in values}
    child = sct_lp.matching(8, values, costs, threshold)
    chosen = {(i, j) for i, j in enumerate(child) if j is not None}
    assert len({j for _, j in chosen}) == len(chosen)
    assert all(values[pair] <= threshold + 1e-6 for pair in chosen)
    parents, children = {i for i, _ in chosen}, {j for _, j in chosen}
    for (i, j), value in values.items():
        assert value > threshold + 1e-6 or i in parents or j in children


def test_matching_takes_the_smallest_value_then_the_dearest_transfer() -> None:
    values = {(0, 2): 0.1, (1, 2): 0.0, (3, 4): 0.0, (3, 5): 0.0}
    costs = {(0, 2): 9, (1, 2): 1, (3, 4): 1, (3, 5): 2}
    assert sct_lp.matching(6, values, costs, 0.1) == (None, 2, None, 5, None, None)


def test_without_pulp_one_method_is_missing_and_auto_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulp", None)
    graph = graph_of({"a": 1, "b": 8, "c": 3}, ("a", "b", 4), ("a", "c", 4))
    with pytest.raises(MissingBackendError, match="m_sct needs pulp .*; pip install .* or choose another method"):
        place("m_sct", graph, cluster_of(2), PlaceOptions())
    assert place("auto", graph, cluster_of(2), PlaceOptions()).plan.predicted_step_us == 9.0


@pytest.mark.parametrize("has_highs", [True, False])
def test_both_solvers_find_the_same_optimum(monkeypatch: pytest.MonkeyPatch, has_highs: bool) -> None:
    import pulp

    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: has_highs)
    graph = graph_of({"a": 1, "b": 8, "c": 3}, ("a", "b", 4), ("a", "c", 4))
    assert solved(graph, cluster_of(2))[0] == pytest.approx({(0, 1): 0, (0, 2): 1})


@pytest.mark.parametrize("has_highs", [True, False])
def test_a_time_limit_is_not_taken_for_an_optimum(monkeypatch: pytest.MonkeyPatch, has_highs: bool) -> None:
    """PuLP's own `status` says Optimal here."""
    import pulp

    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: has_highs)
    graph, cluster = branchy_blocks(20, 4, 0), Cluster.uniform(2, link=Link(1e-4, 30))
    (part,) = sct_lp.slices(graph, cluster, sct_lp.pair_costs_us(graph, cluster))
    lp = sct_lp.model(part)
    try:
        sct_lp.solve(lp, 1e-9)
    except SolverError as e:
        assert re.search(r"did not solve .* within 1e-09 s .* use m_etf", str(e))  # noqa: PT017 - CBC may be done before it looks
    else:
        assert not has_highs
        found = pulp.value(lp.problem.objective)
        again = sct_lp.model(part)
        sct_lp.solve(again, 60)
        assert found == pytest.approx(pulp.value(again.problem.objective))


@pytest.mark.parametrize("status", ["LpSolutionInfeasible", "LpSolutionUnbounded", "LpSolutionNoSolutionFound"])
def test_every_other_status_is_an_error(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    import pulp

    def stop(self: pulp.LpProblem, solver: object) -> None:
        self.sol_status = getattr(pulp, status)

    monkeypatch.setattr(pulp.LpProblem, "solve", stop)
    graph, cluster = graph_of({"a": 1, "b": 1}, ("a", "b", 1)), cluster_of(2)
    said = pulp.LpSolution[getattr(pulp, status)]
    with pytest.raises(SolverError, match=rf"did not solve .* stopped after .* of 60 s \(it says '{said}'\); use m_etf") as raised:
        sct_lp.favourite_children(graph, cluster, 0.1, 60)
    assert not isinstance(raised.value, SolverTimeoutError)


def test_a_program_far_too_large_for_its_time_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [[f"{side}{i}" for i in range(80)] for side in "ab"]
    graph = graph_of({name: 1 for side in sides for name in side}, *((a, b, 1) for a in sides[0] for b in sides[1]))
    monkeypatch.setattr(sct_lp, "model", lambda part: pytest.fail(f"{len(part.costs)} pairs"))
    found = sct_lp.favourite_children(graph, cluster_of(2), 0.1, time_limit_seconds=1.0)
    assert (found.child, found.unsolved_ops) == ((None,) * 160, 160)


def test_a_solver_that_stops_by_itself_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS, kept from doing a single iteration."""
    import pulp

    lazy = pulp.HiGHS(msg=False, presolve="off", simplex_iteration_limit=0)
    monkeypatch.setattr(sct_lp, "lp_solver", lambda seconds: lazy)
    with pytest.raises(SolverError, match="stopped after .* of [0-9.]+ s .it says 'Iteration limit reached'."):
        sct_lp.favourite_children(branchy_blocks(4, 3, 0), Cluster.uniform(2, link=Link(1e-4, 30)), 0.1, 60)


def test_a_failing_solver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import pulp

    def fail(self: pulp.LpProblem, solver: object) -> None:
        raise pulp.PulpSolverError("no licence")

    monkeypatch.setattr(pulp.LpProblem, "solve", fail)
    with pytest.raises(SolverError, match="failed on the favourite-child LP .*no licence"):
        solved(graph_of({"a": 1, "b": 1}, ("a", "b", 1)), cluster_of(2))


def test_every_function_the_docstring_names_exists() -> None:
    names = re.findall(r"-> (\w+)$", sct_lp.__doc__ or "", re.MULTILINE)
    assert len(names) == 7
    assert all(callable(getattr(sct_lp, name)) for name in names)


HELD = """
import gc, weakref
from baechi_ext.place.sct_lp import loaded_pulp
class Tensor:
    pass
def step():
    tensor = Tensor()
    loaded_pulp()
    return weakref.ref(tensor)
reference = step()
gc.collect()
raise SystemExit(reference() is not None)
"""


def test_the_first_import_of_pulp_holds_nothing_that_stood_around_it() -> None:
    """In a new process, in which it has not been imported."""
    assert subprocess.run([sys.executable, "-c", HELD], timeout=120, check=False).returncode == 0
