"""The annealing against optima known by hand or by exhaustive search, and in a process of its own."""

from pathlib import Path

import pytest

from baechi_ext.ir.plan import placement_violations
from baechi_ext.simulate import lower_bound_us, simulate
from benchmarks.anneal import anneal, annealed
from benchmarks.families import TUNING, Case
from benchmarks.runner import in_fresh_process
from tests.place.instances import HAND_MADE, Instance

TRIED = 4000
SMALL = [case for case in TUNING if case.ops <= 20]


@pytest.mark.parametrize("instance", [i for i in HAND_MADE if i.optimum_us is not None], ids=lambda i: i.name)
def test_known_optima(instance: Instance) -> None:
    found = anneal(instance.graph, instance.cluster, evaluations=TRIED)
    assert found.valid
    assert found.timeline.makespan_us == pytest.approx(instance.optimum_us)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_valid_and_what_the_simulator_says(case: Case) -> None:
    found = anneal(case.graph, case.cluster, evaluations=TRIED)
    placement = found.timeline.placement
    assert found.valid
    assert placement_violations(case.graph, case.cluster, placement) == []
    assert simulate(case.graph, case.cluster, placement, found.priority).makespan_us == found.timeline.makespan_us
    assert found.timeline.makespan_us >= lower_bound_us(case.graph, case.cluster)


def test_the_same_again() -> None:
    case = SMALL[0]
    first, again, other = (anneal(case.graph, case.cluster, seed=seed, evaluations=500) for seed in (1, 1, 2))
    assert (first.timeline.placement, first.priority) == (again.timeline.placement, again.priority)
    assert first.priority != other.priority
    assert first.evaluations == pytest.approx(500, abs=110)


def test_a_process_of_its_own(tmp_path: Path) -> None:
    case, files = SMALL[0], (tmp_path / "graph.json", tmp_path / "cluster.json")
    case.graph.save(files[0])
    case.cluster.save(files[1])
    found = in_fresh_process(annealed, *map(str, files), 0.2)
    assert found["status"] == "feasible" and found["evaluations"] > 0
    assert found["placement_seconds"] > 0
    assert found["makespan_us"] >= lower_bound_us(case.graph, case.cluster)
