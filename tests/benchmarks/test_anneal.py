"""The annealing against optima known by hand or by exhaustive search, and as a program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baechi_ext.ir.check import placement_violations
from baechi_ext.simulate import lower_bound_us, simulate
from benchmarks.anneal import anneal
from benchmarks.families import TUNING, Case
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


def test_the_program_keeps_to_its_time(tmp_path: Path) -> None:
    case = SMALL[0]
    case.graph.save(tmp_path / "graph.json")
    case.cluster.save(tmp_path / "cluster.json")
    command = [sys.executable, "-m", "benchmarks.anneal", "graph.json", "--cluster=cluster.json", "--time_limit=0.2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[2])}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["valid"] and value["evaluations"] > 0
    assert lower_bound_us(case.graph, case.cluster) == value["lower_bound_us"] <= value["makespan_us"]
