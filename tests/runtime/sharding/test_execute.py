"""Steps run split by processes give the losses, gradients, buffers and new weights of the step run whole."""

import json
from collections.abc import Callable

import pytest

from baechi_runtime.sharding.strategies import DATA_PARALLEL, NAMES, PASE
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.sharding.small_models import CASES as SMALL
from tests.runtime.sharding.steps import CASES
from tests.runtime.sharding.worker import CHANCE, WAYS, sampled

Differences = Callable[[str, int], dict[str, str]]


@pytest.fixture(scope="module")
def differences(workers: ForkedWorkers) -> Differences:
    """The result of a worker's task on so many processes."""
    return lambda task, processes: json.loads(workers.run("sharding.worker", processes, task))


@pytest.mark.parametrize("processes", [2, 4])
def test_split_steps_equal_whole_ones(processes: int, differences: Differences) -> None:
    found = differences("by_hand", processes)
    assert len(found) == len(CASES) * (2 if processes == 2 else 3)
    assert {name: difference for name, difference in found.items() if difference} == {}


@pytest.mark.parametrize("task", ["captured", pytest.param("the rest", marks=pytest.mark.slow)])
@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_captured_models_split_by_all_strategies_equal_whole_ones(processes: int, task: str, differences: Differences) -> None:
    found = differences(task, processes)
    tried = len(sampled(processes))
    assert len(found) == (tried if task == "captured" else (len(SMALL) + 3) * (len(NAMES) + 1) - tried)
    assert {name: difference for name, difference in found.items() if difference} == {}


@pytest.mark.parametrize(("processes", "count"), [(2, 16), (4, WAYS)])
def test_planned_moves_are_those_of_dtensor(processes: int, count: int, differences: Differences) -> None:
    found = differences("moved", processes)
    assert len(found) == count
    assert {name: difference for name, difference in found.items() if difference} == {}


@pytest.mark.parametrize(("processes", "names"), [pytest.param(2, (DATA_PARALLEL, CHANCE), marks=pytest.mark.slow), (4, (PASE,))])
def test_split_inception_equals_the_whole_one(processes: int, names: tuple[str, ...], differences: Differences) -> None:
    found = differences("inception", processes)
    assert found == {f"inception_v3, {name}": "" for name in names}


def test_torch_runs_an_exported_strategy(differences: Differences) -> None:
    found = differences("exported", 2)
    assert json.loads(found["styles"]) == {"places": "rowwise_rep", "up": "colwise", "down": "rowwise"}
    assert found["sharded"] == "places.weight up.weight up.bias down.weight down.bias"
    assert found["difference"] == ""
