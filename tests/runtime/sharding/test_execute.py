"""Steps run split by processes give the losses, gradients, buffers and new weights of the step run whole."""

import json
from pathlib import Path

import pytest

from runtime.processes.launch import run_workers
from runtime.sharding.strategies import NAMES
from tests.runtime.sharding.small_models import CASES as SMALL
from tests.runtime.sharding.steps import CASES
from tests.runtime.sharding.worker import WAYS


def differences(what: str, processes: int, folder: Path) -> dict[str, str]:
    path = folder / "differences.json"
    assert run_workers([what, str(path)], processes, 120.0, "tests.runtime.sharding.worker") == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("processes", [2, 4])
def test_split_steps_equal_whole_ones(processes: int, tmp_path: Path) -> None:
    found = differences("by_hand", processes, tmp_path)
    assert len(found) == len(CASES) * (2 if processes == 2 else 3)
    assert {name: difference for name, difference in found.items() if difference} == {}


@pytest.mark.parametrize("processes", [2, 4])
def test_captured_models_split_by_all_strategies_equal_whole_ones(processes: int, tmp_path: Path) -> None:
    found = differences("captured", processes, tmp_path)
    assert len(found) == (len(SMALL) + 3) * (len(NAMES) + 1) + (2 if processes == 2 else 0)
    assert {name: difference for name, difference in found.items() if difference} == {}


@pytest.mark.parametrize(("processes", "count"), [(2, 16), (4, WAYS)])
def test_planned_moves_are_those_of_dtensor(processes: int, count: int, tmp_path: Path) -> None:
    found = differences("moved", processes, tmp_path)
    assert len(found) == count
    assert {name: difference for name, difference in found.items() if difference} == {}


def test_inception_split_over_four_processes_equals_the_whole_one(tmp_path: Path) -> None:
    found = differences("inception", 4, tmp_path)
    assert found == {"inception_v3, pase": ""}


def test_torch_runs_an_exported_strategy(tmp_path: Path) -> None:
    found = differences("exported", 2, tmp_path)
    assert json.loads(found["styles"]) == {"first": "colwise", "second": "rowwise"}
    assert found["sharded"] == "first.weight first.bias second.weight second.bias"
    assert found["difference"] == ""
