"""`baechi train SCRIPT -- ARGUMENTS` as a user calls it: exit codes, exceptions and Ctrl-C are the script's own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.cli import main
from runtime.run_folder import RunFolder
from tests.runtime.workers import finish, only_error, start, wait_for_line

ROOT = Path(__file__).parents[2]
TRAINS = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 20)), torch.randint(10, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""


def command(*arguments: str) -> dict:
    flags = ["--placement_method=random", "--num_devices=2"]
    return {"args": [sys.executable, "-m", "runtime", "train", *flags, *arguments], "cwd": ROOT, "text": True}


def test_a_script_with_arguments_and_an_exit_code(tmp_path: Path) -> None:
    script, helper = tmp_path / "train.py", tmp_path / "beside_it.py"
    helper.write_text("CODE = 3\n")
    script.write_text(f"{TRAINS}\nfrom beside_it import CODE\nprint(sys.argv, __name__)\nsys.exit(CODE)\n")
    out = tmp_path / "run"
    line = command(f"--out={out}", str(script), "--", "--epochs", "1", "--verify-steps=x", "--", "-v")
    done = subprocess.run(**line, capture_output=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[-1] == f"{[str(script), '--epochs', '1', '--verify-steps=x', '--', '-v']} __main__"
    assert len(done.stdout.splitlines()) == 5
    assert "baechi: Sequential: random" in done.stderr
    assert "4 steps placed, 2 verified (largest relative difference 0)" in done.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["modules"][0]["predicted_step_us"]["placed"] > 0
    for name in ("graph", "profile", "plan"):
        assert (out / f"{name}.json").exists()


def test_paths_are_of_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, script = tmp_path / "elsewhere", tmp_path / "train.py"
    elsewhere.mkdir()
    script.write_text(f"import os\nos.chdir({str(elsewhere)!r})\n{TRAINS}")
    for flags in (["--placement_method=m_etf"], ["--placement_method=refine", "--time_limit=1", "--initial_plan=run/plan.json"]):
        monkeypatch.chdir(tmp_path)
        assert main(["train", *flags, "--comm_cost_coeffs=0.001,50", "--out=run", str(script)]) == 0
    assert not list(elsewhere.iterdir())
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["method"] == "refine"


def test_an_exception_of_the_script_is_shown_as_python_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("def f():\n    raise ValueError('mine')\nf()\n")
    assert main(["train", str(script)]) == 1
    said = capsys.readouterr()
    traceback, _, rest = said.err.partition("ValueError: mine\n")
    assert "Traceback (most recent call last):\n  File " in traceback
    assert traceback.count("File ") == 2
    assert "runtime/calls/script.py" not in traceback
    assert rest == "baechi: nothing was placed: no module was called in training mode (model.train()) while gradients were recorded\n"


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["nowhere.py"], 1, "cannot read script 'nowhere.py'"),
        (["--", "--epochs"], 2, "name the script before it"),
        (["SCRIPT", "--epochs=1"], 2, "--epochs=1"),
        (["SCRIPT", "--workers=process", "--num_gpus=2"], 2, "drop --workers=process"),
        (["SCRIPT", "--sharding=pase"], 2, "--sharding splits a built-in model; baechi pase "),
        (["SCRIPT", "--costgen"], 2, "--costgen profiles a built-in model"),
        (["SCRIPT", "--verify_steps=-1"], 2, "whole number"),
    ],
)
def test_bad_input(flags: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('never')\n")
    assert main(["train", *(str(script) if f == "SCRIPT" else f for f in flags)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]


def test_sys_exit_with_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit('enough')\n")
    assert main(["train", str(script)]) == 1
    assert "enough\n" in capsys.readouterr().err


def test_a_small_module_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.nn.Linear(4, 2)(torch.ones(1, 4)).sum().backward()\nprint('done')\n")
    assert main(["train", "--json", str(script)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("done\n")
    assert json.loads(said.out.removeprefix("done\n"))["modules"] == []
    assert "the largest module that trained has 10 parameters, fewer than 1000" in said.err


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("train", "--batch_size=4"),
        ("train", "--model_name=alexnet"),
        ("train", "--learning_rate=0.1"),
        ("train", "--num_steps=4"),
        ("train", "--train_steps=4"),
        ("compare", "--image_size=64"),
    ],
)
def test_flags_of_built_in_models_are_none_of_a_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, flag: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('runs')\n")
    assert main([command, flag, str(script)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"error: {flag.partition('=')[0]} is for built-in models; drop it, or give what {script} takes behind --" in said.err


def test_ctrl_c(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS.replace("range(4)", "range(10**9)").replace("print(step, loss.item())", "print(step, flush=True)"))
    process = subprocess.Popen(**command(str(script)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})
    try:
        for line in process.stdout:
            if int(line) > 5:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "error: interrupted"
    (line,) = (line for line in errors.splitlines() if "Sequential: random" in line)
    told = line.partition("unplaced on one thread")[2]
    assert "; inconclusive: " in told
    assert "fewer than 7 unplaced calls were timed (1; --verify_steps=8 makes it 7)" in told


TOWERS = """
import torch
from torch import nn
torch.manual_seed(0)
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(*(nn.Linear(n, n) for _ in range(2))) for n in range(50, 120, 3))
    def forward(self, x):
        return sum(tower(x[:, :tower[0].in_features]).mean() for tower in self.towers)
model = Towers()
for step in range(4):
    model(torch.randn(64, 120)).backward()
    print(step)
"""
IN_BLOCKS = TOWERS.replace("return sum(", "return (1 if x.sum().item() else 2) * sum(")


@pytest.mark.parametrize(("text", "workers"), [(TOWERS, "thread"), (TOWERS, "process"), (IN_BLOCKS, "thread")])
def test_ctrl_c_in_a_search_keeps_its_best_plan(tmp_path: Path, text: str, workers: str) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "run"
    script.write_text(text)
    search = ["--num_devices=3", "--placement_method=refine", "--time_limit=3600", "--comm_cost_coeffs=0.0001,10"]
    process = start("train", *search, f"--workers={workers}", f"--out={kept}", str(script), OMP_NUM_THREADS="1")
    wait_for_line(process, "  best ")
    process.send_signal(signal.SIGINT)
    code, out, errors = finish(process)
    assert (code, "0" in out.split()) == (130, text is IN_BLOCKS)  # the first call runs as it is where it can't be captured
    assert only_error(errors) == f"error: interrupted; the best plan found until then is {kept / 'plan.json'}"
    assert "baechi: Towers: no" in errors
    found = RunFolder.load(kept)
    assert (found.plan.method, found.plan.status, found.measured) == ("refine", "feasible", None)
    assert found.timeline.makespan_us == pytest.approx(found.plan.predicted_step_us)
    assert found.report["model"] == "Towers of train.py"
    assert any("the search for its plan was interrupted" in said for said in found.report["summary"])
    assert (found.profile is None) == (text is IN_BLOCKS)
    assert main(["report", str(kept)]) == 0
