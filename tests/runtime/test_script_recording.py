"""The run folder of a user's own script: what is recorded of its ordinary calls, which compute what they compute unrecorded."""

import contextlib
import io
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.place.common import PlaceOptions
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.measure import turns
from baechi_runtime.measure.recording import RUNS
from baechi_runtime.torch.calls.recording import WARM_UP
from baechi_runtime.torch.calls.script import ModulesRun, ScriptRequest, run_script
from tests.runtime.forked_workers import ForkedWorkers

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("one_thread"),
]
"""TorchDynamo reads it of what one fragment hands to the next one."""
SCRIPTS = Path(__file__).parent / "scripts"
VERIFIED_OF_11 = 4
"""Calls 1, 2, 4 and 8."""
LOOP = """
import torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3))
        self.right = nn.Sequential(nn.Linear(20, 40), nn.Tanh())
        self.head = nn.Linear(40, 10)
    def forward(self, x):
        return self.head(self.left(x) + self.right(x))
model = Net()
seen = []
model.head.weight.register_hook(lambda g: seen.append(g.double().sum().item()))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(STEPS):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(8, 20)), torch.randint(10, (8,)))
    BACKWARD
    optimizer.step()
    print(repr(loss.item()), repr(torch.rand(1).item()))
print(seen, [repr(v.double().sum().item()) for v in model.state_dict().values()])
print(len(seen), model.left[1].num_batches_tracked.item())
"""


def loop(folder: Path, steps: int, backward: str = "loss.backward()") -> Path:
    path = folder / "train.py"
    path.write_text(LOOP.replace("STEPS", str(steps)).replace("BACKWARD", backward))
    return path


def printed_alone(path: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def placed(
    path: Path, out: Path | None, seed: int = 0, verify_steps: int = 2, keep_placed: bool = True
) -> tuple[str, ModulesRun]:
    """The script's output on two devices, each op on any of them; all steps but the first are placed ones, unless they take turns."""
    options = PlaceOptions(seed=seed)
    request = TrainRequest("", PlanRequest(method="random", options=options), out=None if out is None else str(out), command=("baechi",))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run = run_script(ScriptRequest(str(path), (), request, verify_steps, strict=True, keep_placed=keep_placed))
    return printed.getvalue(), run


def require_possible(run: RunFolder) -> None:
    """Every op ran once, where the plan has it, when what it reads was there; a tensor that moves was seen to."""
    measured, graph, placement = run.measured, run.graph, run.plan.placement
    ops = {op.id: op for op in measured.ops}
    assert {op: at.device for op, at in ops.items()} == {op.id: d for op, d in zip(graph.ops, placement, strict=True)}
    assert max(op.end_us for op in measured.ops) <= measured.wall_us
    sent = {(t.op, t.tensor, t.target): t for t in measured.transfers}
    assert len(sent) == len(measured.transfers)
    moved = set()
    for v, op in enumerate(graph.ops):
        for t in graph.inputs[v]:
            tensor = graph.tensors[t]
            producer = graph.ops[tensor.producer]
            if placement[tensor.producer] == placement[v]:
                assert ops[producer.id].end_us <= ops[op.id].start_us
            elif tensor.bytes:
                moved.add((producer.id, tensor.name, placement[v]))
                assert sent[producer.id, tensor.name, placement[v]].end_us <= ops[op.id].start_us
    assert set(sent) == moved


def test_a_recorded_script_computes_what_it_computes_by_itself(tmp_path: Path) -> None:
    path = loop(tmp_path, 12)
    printed, run = placed(path, tmp_path / "run")
    assert printed == printed_alone(path)
    recorder = run.placed[0].groups[0].first.loaded.recorder
    assert len(recorder.noted) == RUNS
    assert run.placed[0].groups[0].calls == 11
    assert len(run.placed[0].groups[0].first.loaded.times) == 11 - VERIFIED_OF_11 - RUNS - 1
    found = RunFolder.load(tmp_path / "run")
    require_possible(found)
    measured = found.measured
    assert (measured.executor, measured.clock, measured.graph_fingerprint) == ("thread", "monotonic", found.graph.fingerprint)
    walls = [(a.wall_us + b.wall_us) for a, b in recorder.noted]
    assert measured.wall_us == pytest.approx(sorted(walls)[1], abs=1)
    assert "what the script does between a call and its backward pass" in measured.notes[0]
    persistent = [sum(op.persistent_bytes for op, d in zip(found.graph.ops, found.plan.placement, strict=True) if d == i) for i in range(2)]
    for held, resident in zip(measured.memory, persistent, strict=True):
        assert held[0].bytes == resident  # parameters, gradients, AdamW's two moments, buffers
        assert max(h.bytes for h in held) > resident
        assert held[-1].bytes < max(h.bytes for h in held)  # what a call keeps for its backward pass is gone behind it


def test_without_a_folder_nothing_is_recorded(tmp_path: Path) -> None:
    _, run = placed(loop(tmp_path, 12), None)
    call = run.placed[0].groups[0].first
    assert (call.loaded.recorder, len(call.loaded.times)) == (None, 11 - VERIFIED_OF_11)


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps take turns, and all that can decide are waited for."""
    monkeypatch.setattr(turns, "_PLAINLY", ())
    path = loop(tmp_path, 61)
    text = re.sub(r"\b40\b", "600", re.sub(r"\b20\b", "400", path.read_text()))  # large enough for turns to be taken
    path.write_text(text.replace("randn(8", "randn(128").replace("(8,)", "(128,)"))
    expected = printed_alone(path)
    torch.compiler.reset()
    printed, run = placed(path, tmp_path / "run", verify_steps=8, keep_placed=False)
    assert printed == expected
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    found = RunFolder.load(tmp_path / "run")
    assert (report["schema_version"], report["model"], report["executor"]) == (1, "Net of train.py", "thread")
    assert (report["method"], report["num_devices"], report["status"]) == ("random", 2, "feasible")
    verification = run.placed[0].groups[0].first.verification
    assert 8 <= verification.steps <= 12
    compared = report["parity"]["compared"]
    assert report["parity"] == {
        "steps": verification.steps, "compared": compared, "max_rel_diff": 0.0, "last": verification.last, "passed": True,
            "tolerance": verification.tolerance,
    }  # fmt: skip
    assert compared >= 8 * (1 + 8 + 3)  # output, gradients of parameters, buffers
    assert report["predicted_step_us"]["placed"] == found.timeline.makespan_us
    eager, taken = (report["measured_step_us"][name]["samples"] for name in ("eager", "placed"))
    decision = run.placed[0].groups[0].turns
    assert (eager, taken) == (decision.plain_us, decision.placed_us)
    assert turns.PER_BLOCK * turns.BLOCKS <= len(eager) <= turns.PER_BLOCK * turns.LAST_BLOCK
    assert abs(len(eager) - len(taken)) <= 1  # where it was not clear how much is gained, the script may end within a block
    assert decision.decided in (turns.PLACED, turns.PLAIN) or len(eager) >= turns.PER_BLOCK * turns.MOST_BLOCKS
    gain = report["speedup_over_eager"]
    assert min(eager) / max(taken) <= gain["low"] <= gain["high"] <= max(eager) / min(taken)
    assert not any("fewer than" in doubt for doubt in report["doubts"])
    assert report["conclusive"] == (not report["doubts"])
    assert report["load_of_others"] >= 0
    assert report["peak_memory_bytes"]["measured"] == [max(h.bytes for h in held) for held in found.measured.memory]
    assert len(report["busy_us"]["measured"]) == 2
    (module,) = report["modules"]
    assert (module["folder"], module["placed_steps"]) == (".", run.placed[0].groups[0].calls)
    assert module["placed_steps"] + module["unplaced_steps"] == 61
    assert module["unplaced_calls"]["the first call of its kind"] == 1
    assert report["command"] == ["baechi"]


@pytest.mark.parametrize(("calls", "noted", "counted"), [(3, 0, False), (5, 1, False), (9, RUNS, True)])
def test_of_few_calls_few_are_recorded(tmp_path: Path, calls: int, noted: int, counted: bool) -> None:
    """Placed calls 1, 2, 4 and 8 are verified, and 3 is to warm up."""
    assert WARM_UP == 1
    _, run = placed(loop(tmp_path, 1 + calls), tmp_path / "run")
    recorder = run.placed[0].groups[0].first.loaded.recorder
    assert (len(recorder.noted), recorder.held is not None) == (noted, counted)
    found = RunFolder.load(tmp_path / "run")
    assert (found.measured is not None) == (noted > 0)
    assert found.report["speedup_over_eager"] is None  # where all stay placed no step is timed against one that is not
    assert not found.report["conclusive"]
    if noted:
        assert (found.measured.memory is not None) == counted
        assert any("was not counted" in note for note in found.measured.notes) != counted
    else:
        assert any(note.startswith("no measured.json: 3 calls of the first shape ran placed") for note in found.report["notes"])


def test_two_backward_passes_of_one_call(tmp_path: Path) -> None:
    path = loop(tmp_path, 10, "loss.backward(retain_graph=True); loss.backward()")
    printed, run = placed(path, tmp_path / "run")
    assert printed == printed_alone(path)
    assert len(run.placed[0].groups[0].first.loaded.recorder.noted) == RUNS
    found = RunFolder.load(tmp_path / "run")
    require_possible(found)
    assert found.measured.memory is not None


def test_calls_without_a_backward_pass_are_no_recorded_steps(tmp_path: Path) -> None:
    path = loop(tmp_path, 12, "loss.backward() if step % 2 else model(torch.ones(8, 20))")
    printed, run = placed(path, tmp_path / "run")
    assert printed == printed_alone(path)
    call = run.placed[0].groups[0].first
    assert call.count == 17
    assert 0 < len(call.loaded.recorder.noted) <= RUNS
    require_possible(RunFolder.load(tmp_path / "run"))


def test_each_placed_module_has_a_folder(tmp_path: Path) -> None:
    """The judge is called three times a step, twice of which before a backward pass of both models; files of an earlier run are gone."""
    earlier = tmp_path / "run" / "placed_3"
    earlier.mkdir(parents=True)
    (earlier / "plan.json").write_text("{}")
    path = tmp_path / "gan.py"
    path.write_text((SCRIPTS / "gan.py").read_text().replace("range(5)", "range(8)"))
    printed, run = placed(path, tmp_path / "run")
    assert printed == printed_alone(path)
    assert [session.name for session in run.placed] == ["Maker", "Judge"]
    assert not earlier.exists()
    for folder, model in (("run", "Maker"), ("run/placed_2", "Judge")):
        found = RunFolder.load(tmp_path / folder)
        assert found.report["model"] == f"{model} of gan.py"
        require_possible(found)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(module["module"], module["folder"]) for module in report["modules"]] == [("Maker", "."), ("Judge", "placed_2")]


def test_what_runs_in_fragments_has_one_plan_and_says_why_nothing_is_measured(tmp_path: Path) -> None:
    path = loop(tmp_path, 6)
    path.write_text(path.read_text().replace("self.left(x) + ", "self.left(x) * (1 if x.sum() > -1e9 else 2) + "))
    printed, run = placed(path, tmp_path / "run", seed=1)
    assert printed == printed_alone(path)
    found = RunFolder.load(tmp_path / "run")
    assert len(run.placed[0].groups[0].members) == 2
    assert {op.id.split(".")[0] for op in found.graph.ops if op.op.startswith("aten.addmm")} == {"0", "1"}
    assert set(found.plan.placement) == {0, 1}
    assert found.measured is None
    assert any(note.startswith("no measured.json: its call is of several fragments") for note in found.report["notes"])


def test_interrupted_it_keeps_what_there_is(tmp_path: Path) -> None:
    path = loop(tmp_path, 12, "loss.backward()\n    if step == 8: raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        placed(path, tmp_path / "run")
    require_possible(RunFolder.load(tmp_path / "run"))


def test_worker_processes(tmp_path: Path, workers: ForkedWorkers) -> None:
    flags = ("--placement_method=random", "--keep_placed", "--strict", "--workers=process", "--num_devices=2")
    flags += ("--comm_cost_coeffs=0.001,50", "--timeout=120")
    path = loop(tmp_path, 12)
    out = workers.run("baechi_on_processes", 2, "train", *flags, f"--out={tmp_path / 'run'}", str(path))
    assert out == printed_alone(path)
    found = RunFolder.load(tmp_path / "run")
    require_possible(found)
    assert (found.measured.executor, found.report["executor"]) == ("process", "process")
    assert found.report["unplaced"] == "the script unplaced, on one core"
    assert found.report["parity"]["passed"]
    held = [device[0].bytes for device in found.measured.memory]
    assert held[0] == held[1] == sum(op.persistent_bytes for op in found.graph.ops)  # all workers hold all parameters
    assert MeasuredStep.load(tmp_path / "run" / "measured.json", found.graph) == found.measured
