"""Steps run split by processes give the losses, gradients, buffers and new weights of the step run whole."""

import json
from pathlib import Path

import pytest

from runtime.processes.launch import run_workers
from tests.runtime.sharding.steps import CASES


@pytest.mark.parametrize("processes", [2, 4])
def test_split_steps_equal_whole_ones(processes: int, tmp_path: Path) -> None:
    path = tmp_path / "differences.json"
    assert run_workers([str(path)], processes, 60.0, "tests.runtime.sharding.worker") == 0
    found = json.loads(path.read_text())
    assert len(found) == len(CASES) * (2 if processes == 2 else 3)
    assert {name: difference for name, difference in found.items() if difference} == {}
