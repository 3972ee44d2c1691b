"""The run folder of a user's own script: what is recorded of its ordinary calls, which compute what they compute unrecorded."""

import contextlib
import io
import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.place.common import PlaceOptions
from runtime.calls.recording import WARM_UP
from runtime.calls.script import ScriptRequest, ScriptRun, run_script
from runtime.pipeline import PlanRequest
from runtime.run_folder import RunFolder
from runtime.step_recorder import RUNS
from runtime.train_request import TrainRequest
from tests.runtime.workers import finish, start

SCRIPTS = Path(__file__).parent / "scripts"
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are added up in one order everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loop(folder: Path, steps: int, backward: str = "loss.backward()") -> Path:
    path = folder / "train.py"
    path.write_text(LOOP.replace("STEPS", str(steps)).replace("BACKWARD", backward))
    return path


def printed_alone(path: Path) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def placed(path: Path, out: Path | None, seed: int = 0, verify_steps: int = 2) -> tuple[str, ScriptRun]:
    """What the script prints on two devices, each op on any of them."""
    options = PlaceOptions(seed=seed)
    request = TrainRequest("", PlanRequest(method="random", options=options), out=None if out is None else str(out), command=("baechi",))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run = run_script(ScriptRequest(str(path), (), request, verify_steps))
    return printed.getvalue(), run


def require_possible(run: RunFolder) -> None:
    """Every op ran once, where the plan has it, when what it reads was there; a tensor that moves was seen to."""
    measured, graph, placement = run.require_measured(), run.graph, run.plan.placement
    ops = measured.by_id()
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
    recorder = run.placed[0].calls[0].loaded.recorder
    assert len(recorder.noted) == RUNS
    assert run.placed[0].calls[0].count == 12
    assert len(run.placed[0].calls[0].loaded.times) == 12 - 2 - RUNS - 1
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
    call = run.placed[0].calls[0]
    assert (call.loaded.recorder, len(call.loaded.times)) == (None, 10)


def test_the_report(tmp_path: Path) -> None:
    _, run = placed(loop(tmp_path, 22), tmp_path / "run", verify_steps=8)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    found = RunFolder.load(tmp_path / "run")
    assert (report["schema_version"], report["model"], report["executor"]) == (1, "Net of train.py", "thread")
    assert (report["method"], report["num_devices"], report["status"]) == ("random", 2, "feasible")
    assert report["parity"] == {"steps": 8, "compared": report["parity"]["compared"], "max_rel_diff": 0.0, "passed": True}
    assert report["predicted_step_us"]["placed"] == found.timeline.makespan_us
    eager, taken = (report["measured_step_us"][name]["samples"] for name in ("eager", "placed"))
    assert len(eager) == 7  # the first call finds nothing in any cache
    assert taken == [times.wall_us for times in run.placed[0].calls[0].loaded.times]
    assert len(taken) == 22 - 8 - RUNS - 1
    gain = report["speedup_over_eager"]
    assert gain["low"] == pytest.approx(min(eager) / sorted(taken)[-2])
    assert gain["high"] == pytest.approx(max(eager) / sorted(taken)[1])
    assert not any("fewer than" in doubt for doubt in report["doubts"])
    assert report["conclusive"] == (not report["doubts"])
    assert report["load_of_others"] >= 0
    assert report["peak_memory_bytes"]["measured"] == [max(h.bytes for h in held) for held in found.measured.memory]
    assert len(report["busy_us"]["measured"]) == 2
    assert [module["folder"] for module in report["modules"]] == ["."]
    assert report["command"] == ["baechi"]


@pytest.mark.parametrize(("recorded", "noted", "counted"), [(0, 0, False), (1, 1, False), (RUNS + 1, RUNS, True)])
def test_of_few_calls_few_are_recorded(tmp_path: Path, recorded: int, noted: int, counted: bool) -> None:
    _, run = placed(loop(tmp_path, 2 + WARM_UP + recorded), tmp_path / "run")
    recorder = run.placed[0].calls[0].loaded.recorder
    assert (len(recorder.noted), recorder.held is not None) == (noted, counted)
    found = RunFolder.load(tmp_path / "run")
    assert (found.measured is not None) == (noted > 0)
    assert found.report["speedup_over_eager"] is None  # of so few calls no interval holds
    assert [d.split("(")[1][0] for d in found.report["doubts"] if "fewer than 7" in d] == ["1", "1"]
    assert not found.report["conclusive"]
    if noted:
        assert (found.measured.memory is not None) == counted
        assert any("was not counted" in note for note in found.measured.notes) != counted
    else:
        assert any(note.startswith("no measured.json: 3 calls of the first shape ran placed") for note in found.report["notes"])


def test_two_backward_passes_of_one_call(tmp_path: Path) -> None:
    path = loop(tmp_path, 9, "loss.backward(retain_graph=True); loss.backward()")
    printed, run = placed(path, tmp_path / "run")
    assert printed == printed_alone(path)
    assert len(run.placed[0].calls[0].loaded.recorder.noted) == RUNS
    found = RunFolder.load(tmp_path / "run")
    require_possible(found)
    assert found.measured.memory is not None


def test_calls_without_a_backward_pass_are_no_recorded_steps(tmp_path: Path) -> None:
    path = loop(tmp_path, 12, "loss.backward() if step % 2 else model(torch.ones(8, 20))")
    printed, run = placed(path, tmp_path / "run")
    assert printed == printed_alone(path)
    call = run.placed[0].calls[0]
    assert call.count == 18
    assert 0 < len(call.loaded.recorder.noted) <= RUNS
    require_possible(RunFolder.load(tmp_path / "run"))


def test_each_placed_module_has_a_folder(tmp_path: Path) -> None:
    """The judge is called three times a step, twice of which before a backward pass of both models; files of an earlier run are gone."""
    earlier = tmp_path / "run" / "placed_3"
    earlier.mkdir(parents=True)
    (earlier / "plan.json").write_text("{}")
    printed, run = placed(SCRIPTS / "gan.py", tmp_path / "run")
    assert printed == printed_alone(SCRIPTS / "gan.py")
    assert not earlier.exists()
    for folder, model in (("run", "Maker"), ("run/placed_2", "Judge")):
        found = RunFolder.load(tmp_path / folder)
        assert found.report["model"] == f"{model} of gan.py"
        require_possible(found)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [(module["module"], module["folder"]) for module in report["modules"]] == [("Maker", "."), ("Judge", "placed_2")]


def test_what_runs_in_blocks_has_a_plan_and_says_why_nothing_is_measured(tmp_path: Path) -> None:
    path = loop(tmp_path, 6)
    path.write_text(path.read_text().replace("self.left(x) + ", "self.left(x) * (1 if x.sum().item() else 2) + "))
    _, run = placed(path, tmp_path / "run", seed=1)
    found = RunFolder.load(tmp_path / "run")
    assert {op.op for op in found.graph.ops} >= {"Linear", "Linear.backward"}
    assert found.measured is None
    assert len(found.report["measured_step_us"]["placed"]["samples"]) == len(run.placed[0].other_way.times[1]) > 0
    assert any(note.startswith("no measured.json: blocks run the module's own code") for note in found.report["notes"])


def test_interrupted_it_keeps_what_there_is(tmp_path: Path) -> None:
    path = loop(tmp_path, 12, "loss.backward()\n    if step == 8: raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        placed(path, tmp_path / "run")
    require_possible(RunFolder.load(tmp_path / "run"))


def test_worker_processes(tmp_path: Path) -> None:
    flags = ("--placement_method=random", "--workers=process", "--num_devices=2", "--comm_cost_coeffs=0.001,50", "--timeout=120")
    path = loop(tmp_path, 12)
    code, out, err = finish(start("train", *flags, f"--out={tmp_path / 'run'}", str(path), OMP_NUM_THREADS="1"))
    assert code == 0, err
    assert out == printed_alone(path)
    found = RunFolder.load(tmp_path / "run")
    require_possible(found)
    assert (found.measured.executor, found.report["executor"]) == ("process", "process")
    assert len(found.report["measured_step_us"]["placed"]["samples"]) == 12 - 2 - RUNS - 1
    held = [device[0].bytes for device in found.measured.memory]
    assert held[0] == held[1] == sum(op.persistent_bytes for op in found.graph.ops)  # all workers hold all parameters
    assert MeasuredStep.load(tmp_path / "run" / "measured.json", found.graph) == found.measured
