"""RunFolder: what a run left is read back; what is missing or of another run is said."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from baechi_ext.errors import FileError, MismatchError
from baechi_ext.ir import OpGraph, Plan
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.ir.measured import MeasuredOp, MeasuredStep, MeasuredTransfer
from baechi_ext.simulate import simulate
from baechi_runtime.files.run_folder import RunFolder, begin_run, is_sharded_run
from tests.build import cluster_of, graph_of

GRAPH = OpGraph.from_json(graph_of({"a": 1, "b": 2, "c": 3}, ("a", "b", 8), ("a", "c", 8)).to_json())
CLUSTER = cluster_of(2)
MADE_BY = MadeBy(("baechi", "place"), {"baechi": "0"})
PLAN = Plan(GRAPH, "m_etf", "feasible", CLUSTER, (0, 1, 0), (0.0, 1.0, 2.0), 11.0, 4.0, (8, 8), 0.1, made_by=MADE_BY)
STEP = MeasuredStep(GRAPH.fingerprint, "thread", "monotonic", 9.0, (MeasuredOp("a", 0, 0, 1), MeasuredOp("b", 1, 2, 9)))


def kept(folder: Path, plan: Plan = PLAN, step: MeasuredStep | None = STEP) -> Path:
    plan.graph.save(folder / "graph.json")
    plan.save(folder / "plan.json")
    if step is not None:
        step.save(folder / "measured.json")
    return folder


def test_everything_is_read_back(tmp_path: Path) -> None:
    command = ["baechi", "train", "--model_name=wide towers"]
    (tmp_path / "report.json").write_text(json.dumps({"command": command, "versions": {"torch": "2"}}))
    run = RunFolder.load(kept(tmp_path))
    assert (run.graph, run.plan, run.measured, run.profile) == (GRAPH, PLAN, STEP, None)
    assert run.timeline == simulate(GRAPH, CLUSTER, PLAN.placement, PLAN.priority)
    assert run.made_by == MadeBy(tuple(command), {"torch": "2"})
    assert run.made_by.command_line == "baechi train '--model_name=wide towers'"


def test_what_was_pinned_for_the_plan_is_pinned(tmp_path: Path) -> None:
    run = RunFolder.load(kept(tmp_path, replace(PLAN, options={"pins": ["b=1"]})))
    assert (run.graph.pins, run.plan.graph, run.measured) == ({1: 1}, run.graph, STEP)


def test_a_plan_alone_will_do(tmp_path: Path) -> None:
    run = RunFolder.load(kept(tmp_path, step=None))
    assert (run.measured, run.report, run.made_by) == (None, None, PLAN.made_by)


@pytest.mark.parametrize("name", ["graph.json", "plan.json"])
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    (kept(tmp_path) / name).unlink()
    with pytest.raises(FileError, match=f"has no {name}; name a folder that baechi train .* --out=DIR has written"):
        RunFolder.load(tmp_path)


def test_the_memory_of_another_number_of_devices_is_refused(tmp_path: Path) -> None:
    run = kept(tmp_path)
    replace(STEP, memory=((),)).save(run / "measured.json")
    with pytest.raises(MismatchError, match=r"has the memory of 1 devices, and plan.json has 2: they are of two runs; run baechi train"):
        RunFolder.load(run)


def test_a_measured_step_of_another_plan_is_refused(tmp_path: Path) -> None:
    kept(tmp_path, replace(PLAN, placement=(0, 0, 0)))
    with pytest.raises(MismatchError, match="op 'b' ran on device 1, and plan.json says 0: they are of two runs"):
        RunFolder.load(tmp_path)


@pytest.mark.parametrize(("source", "target"), [(1, 0), (0, 2), (7, 1)])
def test_a_transfer_from_elsewhere_than_its_op_or_to_no_device_is_refused(tmp_path: Path, source: int, target: int) -> None:
    moved = MeasuredTransfer("a", GRAPH.tensors[0].name, source, target, 1, 2)
    with pytest.raises(MismatchError, match=f"went from device {source} to {target}, and plan.json has the op on device 0 of 2: they"):
        RunFolder.load(kept(tmp_path, step=replace(STEP, transfers=(moved,))))
    fine = replace(STEP, transfers=(replace(moved, source=0, target=1),))
    assert RunFolder.load(kept(tmp_path, step=fine)).measured == fine


@pytest.mark.parametrize(("key", "value"), [("command", 3), ("versions", ["torch"])])
def test_a_damaged_report_is_refused(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "report.json").write_text(json.dumps({key: value}))
    with pytest.raises(FileError, match=rf'report.json: "{key}" is .*; expected .*; write it again with baechi train'):
        RunFolder.load(kept(tmp_path))


def test_a_report_may_leave_out_its_command(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"command": None, "versions": None}))
    assert RunFolder.load(kept(tmp_path)).made_by == PLAN.made_by


def test_what_an_earlier_run_left_goes_and_nothing_else(tmp_path: Path) -> None:
    ours = ["report.json", "compare.json", "compare.png", "report.html", "profile.json", "plan_m_sct.json", "plan_single.json"]
    ours += ["graph_split.json", "graph_single.json", ".plan.json.0123abcd.tmp", ".plan_auto_2_parts.json.x_y_z_12.tmp"]
    own = ["plan_mine.json", "graph_2.json", "config.toml", "compare.pdf", "placed_4", "placed_3/notes.txt", "placed_1/plan.json"]
    own += [".mine.json.0123abcd.tmp"]
    for folder in ("placed_1", "placed_2", "placed_3", "placed_14"):
        (tmp_path / folder).mkdir()
        kept(tmp_path / folder)
    for name in [*ours, *own]:
        (kept(tmp_path) / name).write_text("{}")
    (tmp_path / "placed_5").symlink_to(tmp_path / "placed_1")
    begin_run(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {*own, "placed_1", "placed_3", "placed_5", *(f"placed_1/{name}.json" for name in ("graph", "measured"))}


def test_what_an_earlier_run_left_and_can_not_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(path: Path, **_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    kept(tmp_path)
    monkeypatch.setattr(Path, "unlink", busy)
    with pytest.raises(FileError, match=r"cannot remove .*\.json', which .* left: Device or resource busy; choose another --out"):
        begin_run(tmp_path)


def test_a_folder_is_of_its_last_run(tmp_path: Path) -> None:
    for name in ("report.json", "shard_plan.json", "shard_plan_pase.json", "shard_plan_file_2.json", "tp_plan.json"):
        (kept(tmp_path) / name).write_text("{}")
    (tmp_path / "shard_plan_mine.json").write_text("{}")
    assert not is_sharded_run(tmp_path)
    begin_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shard_plan_mine.json"]
    (tmp_path / "shard_plan.json").write_text("{}")
    assert is_sharded_run(tmp_path)
    (tmp_path / "shard_plan.json").unlink()
    (tmp_path / "report.json").write_text(json.dumps({"kind": "baechi sharding report"}))  # torch's own data parallelism has no plan
    assert is_sharded_run(tmp_path)
