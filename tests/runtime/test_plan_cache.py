"""Kept plans are found by the same call alone, are what was kept, and are none where anything about them is wrong."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from baechi_ext.errors import OptionError
from baechi_ext.ir import Link
from baechi_ext.ir.files import read_json, write_json
from baechi_ext.ir.hints import Pin
from baechi_ext.ir.plan import PlanFile
from baechi_ext.place.common import PlaceOptions
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.cache_folder import MOST_SECONDS, cache_folder, trim
from baechi_runtime.models.training_step import TrainingStep, optimizer_spec
from baechi_runtime.torch import backend
from baechi_runtime.torch.calls import experience, placing
from baechi_runtime.torch.calls.experience import Verdict, keep_verdict, load_verdict, op_signatures, plan_key, verdict_key
from baechi_runtime.torch.calls.placing import place_call
from baechi_runtime.torch.calls.plan_cache import find_plan, keep_plan
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.threads.executor import ThreadExecutor
from tests.torch_steps import capture, make_step

KEPT = "plan and costs are from an earlier run"


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadExecutor]:
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as found:
        yield found


@pytest.fixture(scope="module")
def step() -> TrainingStep:
    return make_step("branches")


@pytest.fixture(scope="module")
def captured(step: TrainingStep) -> Any:
    graph, binding = capture(step)
    return SimpleNamespace(graph=graph, binding=binding)


def request_of(folder: Path | None, method: str = "random", **options: Any) -> TrainRequest:
    """A plan at random splits the graph, and needs no time. The link is given, which saves the tests the probe."""
    return TrainRequest("", PlanRequest(method=method, options=PlaceOptions(**options)), link=Link(1e-4, 10.0), cache=folder)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each profile and each search that was made."""
    made: list[str] = []
    profile, plan = backend.profile_step, placing.pipeline.plan
    monkeypatch.setattr(backend, "profile_step", lambda *args: made.append("profile") or profile(*args))
    monkeypatch.setattr(placing.pipeline, "plan", lambda *args: made.append("search") or plan(*args))
    return made


def is_kept(placement: Placement) -> bool:
    return any(KEPT in note for note in placement.result.notes)


def test_the_same_call_is_neither_profiled_nor_searched_for_again(tmp_path, executor, captured, step, measured) -> None:
    first = place_call(request_of(tmp_path), executor, captured, step)
    assert not is_kept(first)
    assert measured == ["profile", "search"]
    second = place_call(request_of(tmp_path), executor, captured, step)
    assert is_kept(second)
    assert f"kept in {tmp_path}" in second.result.notes[-1]
    assert measured == ["profile", "search"]
    assert second.result.plan == first.result.plan
    assert second.graph == first.graph
    assert (second.profile, second.single.makespan_us) == (first.profile, first.single.makespan_us)
    assert second.result.timeline.started == first.result.timeline.started
    assert second.result.notes[:-1] == first.result.notes


def test_a_plan_that_leaves_all_on_one_device_is_kept_with_the_costs_of_one(tmp_path, executor, captured, step) -> None:
    first = place_call(request_of(tmp_path, "single"), executor, captured, step)
    second = place_call(request_of(tmp_path, "single"), executor, captured, step)
    assert is_kept(second)
    assert not second.result.splits
    assert second.graph == first.graph == second.single.graph
    assert second.result.plan == first.result.plan


def test_a_probed_link_is_kept_with_the_plan(tmp_path, executor, captured, step, monkeypatch) -> None:
    asked = replace(request_of(tmp_path), link=None, comm_cost_factor=2.0)
    first = place_call(asked, executor, captured, step)
    assert first.probe is not None
    monkeypatch.setattr(type(executor), "probe_link", None)
    second = place_call(asked, executor, captured, step)
    assert is_kept(second)
    assert second.probe is None
    assert second.result.plan == first.result.plan


def test_pins_hold_in_kept_plans(tmp_path, executor, captured, step) -> None:
    asked = request_of(tmp_path)
    asked = replace(asked, plan=replace(asked.plan, pins=(Pin.parse("*left*=1"),)))
    first, second = (place_call(asked, executor, captured, step) for _ in range(2))
    assert is_kept(second)
    assert second.result.plan == first.result.plan
    assert second.result.plan.graph.pins == first.result.plan.graph.pins != {}
    wrong = replace(asked, plan=replace(asked.plan, pins=(Pin.parse("nothing=1"),)))
    with pytest.raises(OptionError, match="matches nothing"):
        place_call(wrong, executor, captured, step)


def test_without_a_folder_nothing_is_kept(tmp_path, executor, captured, step, measured) -> None:
    for _ in range(2):
        assert not is_kept(place_call(request_of(None), executor, captured, step))
    assert measured == ["profile", "search"] * 2
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_kept_is_said_and_does_not_fail(tmp_path, executor, captured, step) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        placement = place_call(request_of(tmp_path / "file"), executor, captured, step)
        assert placement.result.notes[-1].startswith(f"plan and costs can't be kept in {tmp_path / 'file'}: ")


def test_keys_tell_apart_what_changes_costs_or_plans(tmp_path, executor, captured, step) -> None:
    graph, binding = captured.graph, captured.binding
    asked = request_of(tmp_path)
    fewer = executor.devices[:1]
    others = [
        replace(asked, plan=replace(asked.plan, method="m_etf")),
        request_of(tmp_path, seed=1),
        request_of(tmp_path, time_limit_seconds=1.0),
        replace(asked, plan=replace(asked.plan, pins=(Pin.parse("*left*=1"),))),
        replace(asked, device_memory=10**9),
        replace(asked, memory_fraction=0.5),
        replace(asked, comm_cost_factor=2.0),
        replace(asked, link=None),
        replace(asked, relaxed_random=True),
    ]
    adam, adam_binding = capture(make_step("branches", "adam"))
    wider, wider_binding = capture(make_step("tied"))
    keys = [
        plan_key(asked.choices(), executor.devices, graph, binding),
        plan_key(asked.choices(), fewer, graph, binding),
        *(plan_key(other.choices(), executor.devices, graph, binding) for other in others),
        plan_key(asked.choices(), executor.devices, adam, adam_binding),
        plan_key(asked.choices(), executor.devices, wider, wider_binding),
    ]
    assert len(set(keys)) == len(keys)
    again = capture(make_step("branches"))
    assert plan_key(request_of(tmp_path / "elsewhere").choices(), executor.devices, *again) == keys[0]


def test_another_machine_or_version_is_another_key(tmp_path, executor, captured, monkeypatch) -> None:
    def key() -> str:
        return plan_key(request_of(tmp_path).choices(), executor.devices, captured.graph, captured.binding)

    keys = {key()}
    for name, value in (("processor", lambda: "another"), ("usable_bytes", lambda: 1), ("versions", lambda: {"torch": "0"})):
        with monkeypatch.context() as patch:
            patch.setattr(experience, name, value)
            keys.add(key())
    assert len(keys) == 4
    assert key() in keys


def test_with_costs_of_a_file_nothing_is_kept(tmp_path, executor, captured, step) -> None:
    """The file may hold something else by the next run."""
    first = place_call(request_of(None), executor, captured, step)
    assert first.profile is not None
    first.profile.save(tmp_path / "costs.json")
    asked = replace(request_of(tmp_path / "cache"), cost_path=str(tmp_path / "costs.json"))
    for _ in range(2):
        assert not is_kept(place_call(asked, executor, captured, step))
    assert not (tmp_path / "cache").exists()
    assert replace(asked, cost_path=None, plan=replace(asked.plan, method="refine", initial_plan=PlanFile("plan.json", {}))).reads_files


def test_shapes_of_the_same_bytes_have_other_signatures() -> None:
    """A matrix and its transpose have the same bytes, and the graphs the same fingerprint."""

    def signed(rows: int, columns: int) -> tuple[str, list[str]]:
        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x * self.scale).softmax(-1).sum()

        taken = TrainingStep("scale", Scale(), (torch.ones(rows, columns),), optimizer_spec("sgd", 0.1), seed=0)
        graph, binding = capture(taken)
        return graph.fingerprint, op_signatures(graph, binding)

    wide, high = signed(4, 16), signed(16, 4)
    assert wide[0] == high[0]
    assert wide[1] != high[1]
    assert signed(4, 16) == wide


def test_ops_that_do_the_same_have_one_signature(captured) -> None:
    found = dict(zip(captured.graph.index, op_signatures(captured.graph, captured.binding), strict=True))
    assert found["relu"] == found["relu_1"]
    assert found["relu"] != found["convolution"]
    assert found["convolution"] != found["convolution_1"]  # one has a bias


def entry(folder: Path) -> Path:
    """The file of the only entry."""
    (file,) = (folder / "plans").iterdir()
    return file


@pytest.mark.parametrize("damage", ["cut", "emptied", "nonsense", "gone", "folder"])
def test_a_damaged_entry_is_none_and_is_replaced(tmp_path, executor, captured, step, damage: str) -> None:
    place_call(request_of(tmp_path), executor, captured, step)
    file = entry(tmp_path)
    content = file.read_bytes()
    if damage in ("gone", "folder"):
        file.unlink()
    else:
        file.write_bytes({"cut": content[: len(content) // 2], "emptied": b"", "nonsense": b"[1, 2]"}[damage])
    if damage == "folder":
        file.mkdir()
        assert not is_kept(place_call(request_of(tmp_path), executor, captured, step))
        return
    assert not is_kept(place_call(request_of(tmp_path), executor, captured, step))
    assert is_kept(place_call(request_of(tmp_path), executor, captured, step))


@pytest.mark.parametrize(
    "wrong",
    [{"kept_seconds": 0}, {"kept_seconds": 10**400}, {"kept_seconds": "now"}, {"key": "x"}, {"plan": None}, {"notes": 3}, {"notes": [1]}]
    + [{"profile": {}}, {"schema_version": 99}],
)  # fmt: skip
def test_a_record_that_is_not_as_written_is_none(tmp_path, executor, captured, step, wrong: dict[str, Any]) -> None:
    place_call(request_of(tmp_path), executor, captured, step)
    file = entry(tmp_path)
    write_json(file, read_json(file, "entry") | wrong)
    assert not is_kept(place_call(request_of(tmp_path), executor, captured, step))


def test_a_plan_whose_step_is_not_what_it_says_is_none(tmp_path, executor, captured, step) -> None:
    """As where costs of one run and the plan of another came together, or the simulator has changed since."""
    first = place_call(request_of(tmp_path), executor, captured, step)
    asked = request_of(tmp_path)
    key = plan_key(asked.choices(), executor.devices, captured.graph, captured.binding)
    kept = find_plan(tmp_path, key, captured.graph)
    assert kept is not None
    assert kept.plan.placement == first.result.plan.placement
    faster = replace(kept.plan, predicted_step_us=kept.plan.predicted_step_us * 0.99)
    for plan in (faster, kept.plan.on(replace(kept.plan.cluster, default=Link()))):
        assert keep_plan(tmp_path, key, replace(kept, plan=plan), asked.made_by) == ""
        assert not is_kept(place_call(asked, executor, captured, step))
    assert is_kept(place_call(asked, executor, captured, step))


def test_an_interrupted_search_is_not_kept(tmp_path, executor, captured, step, monkeypatch) -> None:
    plan = placing.pipeline.plan
    monkeypatch.setattr(placing.pipeline, "plan", lambda *args: replace(plan(*args), interrupted=True))
    assert place_call(request_of(tmp_path), executor, captured, step).result.interrupted
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_used_for_longest_goes_first(tmp_path) -> None:
    for i, name in enumerate("abcd"):
        file = tmp_path / f"{name}.json"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 + i, 1000 + i))
    os.utime(tmp_path / "a.json", (2000, 2000))  # used since
    for name, age in ((".old.tmp", 2 * 3600), (".new.tmp", 0)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    trim(tmp_path, most_bytes=200)
    assert {file.name.split(".")[0] for file in tmp_path.iterdir() if file.name[0] != "."} == {"a", "d"}
    assert {file.name for file in tmp_path.iterdir() if file.name[0] == "."} == {".new.tmp"}
    trim(tmp_path / "nowhere")


def test_where_the_folder_is(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BAECHI_CACHE", tmp_path.name)
    assert cache_folder() == tmp_path / tmp_path.name
    monkeypatch.chdir("/")  # as a script may do
    assert cache_folder() == tmp_path / tmp_path.name
    monkeypatch.setenv("BAECHI_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "baechi"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for nothing in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert cache_folder() == tmp_path / "home" / ".cache" / "baechi"


VERDICT = Verdict(False, "a step placed takes 12 ms, plain 10 ms", 10_000.0, 12_000.0, 3.5, 200)


def test_verdicts_are_kept_by_what_they_are_of(tmp_path, executor) -> None:
    asked = request_of(tmp_path)
    key = verdict_key(asked.choices(), executor.devices, ["train.py", "Net", [(8, 20)]])
    assert load_verdict(tmp_path, key) is None
    assert keep_verdict(tmp_path, key, VERDICT) == ""
    assert load_verdict(tmp_path, key) == VERDICT
    assert keep_verdict(tmp_path, key, Verdict(True, "")) == ""
    assert load_verdict(tmp_path, key) == Verdict(True, "")
    assert load_verdict(tmp_path, verdict_key(asked.choices(), executor.devices, ["train.py", "Net", [(8, 21)]])) is None
    assert load_verdict(tmp_path, verdict_key(asked.choices(), executor.devices[:1], ["train.py", "Net", [(8, 20)]])) is None
    (tmp_path / "file").write_text("")
    assert keep_verdict(tmp_path / "file", key, VERDICT) != ""
    assert "JSON" in keep_verdict(tmp_path, key, replace(VERDICT, plain_us=float("nan")))


@pytest.mark.parametrize(
    "wrong",
    [{"placed": 1}, {"reason": None}, {"plain_us": "x"}, {"placed_us": -1}, {"steps": None}, {"setup_seconds": "x"}, {"key": "x"}]
    + [{"kept_seconds": time.time() - MOST_SECONDS - 60}],
)  # fmt: skip
def test_a_verdict_that_is_not_as_written_is_none(tmp_path, wrong: dict[str, Any]) -> None:
    assert keep_verdict(tmp_path, "k", VERDICT) == ""
    file = tmp_path / "verdicts" / "k.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    assert load_verdict(tmp_path, "k") is None
