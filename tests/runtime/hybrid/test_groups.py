"""Steps on groups of processes give the losses, gradients, buffers and new weights of the step run whole."""

import json
from pathlib import Path

from runtime.processes.launch import run_workers
from tests.runtime.hybrid.worker import BY_CHANCE, BY_PLACER


def test_steps_on_two_groups_of_two_equal_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "differences.json"
    assert run_workers([str(path)], 4, 300.0, "tests.runtime.hybrid.worker") == 0
    found = json.loads(path.read_text())
    assert list(found) == [*(f"{name} by chance" for name in BY_CHANCE), *(f"{name} by the placer" for name in BY_PLACER)]
    assert {name: run["difference"] for name, run in found.items() if run["difference"]} == {}
    for run in found.values():
        assert run["groups"] == [0, 1]
        assert run["split"] > 0
    assert found["wide_towers by the placer"]["split"] > found["wide_towers by the placer"]["calls"] / 2
