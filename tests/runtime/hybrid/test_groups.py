"""Steps on groups of processes give the losses, gradients, buffers and new weights of the step run whole, and can be recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.ir import OpGraph
from baechi_ext.ir.measured import MeasuredStep
from runtime.processes.launch import run_workers
from tests.runtime.hybrid.worker import BY_CHANCE, BY_PLACER, RECORDED


def test_steps_on_two_groups_of_two_equal_whole_ones(tmp_path: Path) -> None:
    path = tmp_path / "differences.json"
    assert run_workers([str(path)], 4, 300.0, "tests.runtime.hybrid.worker") == 0
    found = json.loads(path.read_text())
    recorded = found.pop(RECORDED)
    assert list(found) == [*(f"{name} by chance" for name in BY_CHANCE), *(f"{name} by the placer" for name in BY_PLACER)]
    assert {name: run["difference"] for name, run in found.items() if run["difference"]} == {}
    for run in found.values():
        assert run["groups"] == [0, 1]
        assert run["split"] > 0
    assert found["wide_towers by the placer"]["split"] > found["wide_towers by the placer"]["calls"] / 2
    _require_recorded(recorded)


def _require_recorded(found: dict[str, Any]) -> None:
    """Every op but inputs ran in its group, one at a time, and what was sent is what the simulator sends."""
    graph = OpGraph.from_json(found["graph"])
    measured = MeasuredStep.from_json(found["measured"], graph)  # ops of a device do not overlap
    assert {op.id for op in measured.ops} == set(graph.index) - set(found["inputs"])
    assert all(op.device == found["groups"][op.id] for op in measured.ops)
    assert all(0 <= op.start_us < op.end_us for op in measured.ops)
    ran = measured.by_id()
    for op in graph.ops:
        if op.phase == "backward" and op.forward_op in ran and op.id in ran:
            assert ran[op.forward_op].end_us <= ran[op.id].start_us
    assert len(found["predicted"]) > 2
    assert sorted([t.op, t.tensor, t.source, t.target] for t in measured.transfers) == found["predicted"]
    assert all(t.start_us < t.end_us <= 2 * measured.wall_us for t in measured.transfers)
    assert any("calls are run and timed, not the plan's ops" in note for note in measured.notes)
    losses, wanted = found["losses"]
    assert losses == pytest.approx(wanted, rel=1e-9)  # recording changes nothing
    assert found["nodes_left"] == [0] * 4  # of what autograd made in the recorded step, once recording has ended
