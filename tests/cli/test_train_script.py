"""`baechi train SCRIPT -- ARGUMENTS` as a user calls it: exit codes, exceptions and Ctrl-C are the script's own."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baechi_ext.errors import FileError
from baechi_ext.place.common import Worth
from baechi_runtime.cli.flags.compare import compare_request
from baechi_runtime.cli.flags.train import script_request
from baechi_runtime.cli.main import main, make_parser, parsed
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.torch.calls.placing import ANEW
from tests.runtime.forked import run, start
from tests.runtime.workers import finish, only_error, wait_for_line

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


GOES_ON = """
import atexit, pickle, threading, time
class Kept:
    pass
def keep(when):
    print(when, type(pickle.loads(pickle.dumps(Kept()))).__name__)
threading.Thread(target=lambda: (time.sleep(0.5), keep("later"))).start()
atexit.register(keep, "at exit")
"""
PLACED = ("train", "--placement_method=random", "--num_devices=2", "--keep_placed")


def test_a_script_with_arguments_and_an_exit_code(tmp_path: Path) -> None:
    script, helper = tmp_path / "train.py", tmp_path / "beside_it.py"
    helper.write_text("CODE = 3\n")
    script.write_text(f"{TRAINS}{GOES_ON}from beside_it import CODE\nprint(sys.argv, __name__)\nsys.exit(CODE)\n")
    out = tmp_path / "run"
    line = (*PLACED, f"--out={out}", str(script), "--", "--epochs", "1", "--verify-steps=x", "--", "-v")
    done = subprocess.run([sys.executable, "-m", "baechi_ext", *line], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[4] == f"{[str(script), '--epochs', '1', '--verify-steps=x', '--', '-v']} __main__"
    assert done.stdout.splitlines()[5:] == ["later Kept", "at exit Kept"]  # as in Python, when the script has ended
    assert "baechi: Sequential: random" in done.stderr
    assert "3 steps placed, verified 2 of 3, last at call 2 (largest relative difference 0)" in done.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["modules"][0]["predicted_step_us"]["placed"] > 0
    for name in ("graph", "profile", "plan"):
        assert (out / f"{name}.json").exists()


def test_what_was_placed_is_said_where_a_file_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(f"{TRAINS}import os\nos.mkdir({str(out / 'report.json')!r})\n")
    assert main([*PLACED, f"--out={out}", str(script)]) == 1
    said = capsys.readouterr().err
    assert "3 steps placed, verified 2 of 3" in said
    assert only_error(said)


FORKS = """
import os
sys.stdout.flush()
child = os.fork()
print("forked", flush=True)
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_process_that_a_script_forks_ends_as_it_would_without_us(tmp_path: Path, workers: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{TRAINS}{FORKS}sys.exit(0 if child else 5)\n")
    done = run(*PLACED, f"--workers={workers}", "--json", f"--out={tmp_path / 'run'}", str(script))
    assert done.returncode == 0, done.stderr
    begin = done.stdout.index("{")
    assert done.stdout[:begin].splitlines()[-2:] == ["forked", "forked"]
    assert json.loads(done.stdout[begin:])["summary"]
    assert done.stderr.count("baechi: Sequential") == 1
    assert RunFolder.load(tmp_path / "run").plan.method == "random"


def test_paths_are_of_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, script = tmp_path / "elsewhere", tmp_path / "train.py"
    elsewhere.mkdir()
    script.write_text(f"import os\nos.chdir({str(elsewhere)!r})\n{TRAINS}")
    for flags in (["--placement_method=m_etf"], ["--placement_method=refine", "--time_limit=1", "--initial_plan=run/plan.json"]):
        monkeypatch.chdir(tmp_path)
        assert main(["train", *flags, "--comm_cost_coeffs=0.001,50", "--out=run", str(script)]) == 0
    assert not list(elsewhere.iterdir())
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["method"] == "refine"


def test_an_exception_of_the_script_is_shown_as_python_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def f():\n    raise ValueError('mine')\nf()\n")
    assert main(["train", str(script)]) == 1
    said = capsys.readouterr()
    traceback, _, rest = said.err.partition("ValueError: mine\n")
    assert "Traceback (most recent call last):\n  File " in traceback
    assert traceback.count("File ") == 2
    assert "runtime/baechi_runtime/torch/calls/script.py" not in traceback
    assert rest == "baechi: nothing was placed: no module was called in training mode (model.train()) while gradients were recorded\n"
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print("hooked", error))  # as of rich, or Weights & Biases
    assert main(["train", str(script)]) == 1
    assert capsys.readouterr().out == "hooked mine\n"


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


def test_where_each_op_is_is_said_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    done = run(*PLACED, "--log_device_placement", f"--out={tmp_path / 'run'}", str(script))
    assert done.returncode == 0, done.stderr
    plan = RunFolder.load(tmp_path / "run").plan
    devices = [plan.cluster.devices[d].name for d in plan.placement]
    lines = [line for line in done.stderr.splitlines() if " -> " in line]
    assert lines == [f"{op.id} -> {device}" for op, device in zip(plan.graph.ops, devices, strict=True)]


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
    assert f"error: {flag.partition('=')[0]} is for built-in models; drop it, or give what {script} takes after --" in said.err


def test_a_seed_is_of_methods_that_use_one_too() -> None:
    for command, request_of in (("train", script_request), ("compare", compare_request)):
        with contextlib.suppress(FileError):  # there is no such script
            request_of(parsed([command, "--seed=3", "nowhere.py"]))
    assert script_request(parsed(["train", "--placement_method=random", "--seed=3", "train.py"])).request.plan.options.seed == 3


THREADS = """
import threading
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
began = threading.Barrier(3)
def train():
    began.wait()
    for step in range(8):
        model(torch.ones(16, 64)).square().mean().backward()
threads = [threading.Thread(target=train) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for step in range(3):
    model(torch.ones(16, 64)).square().mean().backward()
"""


def test_threads_that_call_one_module_for_the_first_time(tmp_path: Path) -> None:
    """They place it once."""
    script = tmp_path / "train.py"
    script.write_text(THREADS)
    done = run(*PLACED, str(script))
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("baechi: Sequential"))
    assert re.search(r"; [1-9]\d* steps placed", said)


def test_ctrl_c(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS.replace("range(4)", "range(10**9)").replace("print(step, loss.item())", "print(step, flush=True)"))
    process = start(*PLACED, str(script))
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
    (line,) = (line for line in errors.splitlines() if line.startswith("baechi: Sequential: "))
    assert re.search(r"random, .*; [1-9]\d* steps placed, verified [1-9]", line)


SLOW = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
for step in range(40):
    model(torch.randn(200, 300)).square().mean().backward()
print(model[0].weight.grad.sum().item())
"""


def test_steps_take_turns_and_what_is_said_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever is kept; a plan of one device is none that could gain."""
    script = tmp_path / "train.py"
    script.write_text(SLOW)
    # An earlier run of the same may have seen that placing saves too little for its set-up.
    flags = ["--num_devices=2", "--no_cache", "--comm_cost_coeffs=0.0001,10", f"--out={tmp_path / 'run'}"]
    seen = {}
    for method in ("round_robin", "single"):
        torch.compiler.reset()
        assert main(["train", f"--placement_method={method}", *flags, str(script)]) == 0
        said = capsys.readouterr()
        seen[method] = said.out
        (module,) = json.loads((tmp_path / "run" / "report.json").read_text())["modules"]
        assert module["placed_steps"] + module["unplaced_steps"] == 40
        (line,) = [line for line in said.err.splitlines() if line.startswith("baechi: Sequential: ")]
        times = module["measured_step_us"]
        if method == "single":
            assert module["placed_steps"] <= 1
            assert "runs as it is: " in said.err
        else:
            assert times["placed"] is not None, said.err
            placed, plain = (len(times[name]["samples"]) for name in ("placed", "eager"))
            assert placed >= 2
            assert abs(placed - plain) <= 1  # the script may end in the middle of a turn
            assert re.search(rf"(placed for {module['placed_steps']} steps|; {module['placed_steps']} steps placed)", line)
    assert seen["single"] == seen["round_robin"]


@pytest.mark.parametrize("flag", ["--strict", "--fallback", None])
def test_what_cannot_be_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str | None) -> None:
    """Without --strict the script runs to its end; --fallback, which said so, is still taken."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    flags = ["--placement_method=m_etf", "--device_memory=100", "--comm_cost_coeffs=0.001,50", "--num_devices=2", "--keep_placed"]
    torch.compiler.reset()
    code = main(["train", *([flag] if flag else []), *flags, str(script)])
    said = capsys.readouterr()
    if flag == "--strict":
        assert (code, len(said.out.splitlines())) == (1, 1)
        assert said.err.splitlines()[-1].startswith("error: ")
    else:
        assert (code, len(said.out.splitlines())) == (0, 4)
        assert said.err.count("baechi: Sequential runs as it is: ") == 1
        assert "baechi: Sequential: not placed; " in said.err


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
BREAKS = TOWERS.replace("return sum(", "return (1 if x.sum() != 0 else 2) * sum(")
"""In two fragments, of which the second one trains."""


@pytest.mark.parametrize(
    ("text", "workers"), [pytest.param(TOWERS, "thread", marks=pytest.mark.slow), (TOWERS, "process"), (BREAKS, "thread")]
)
def test_ctrl_c_in_a_search_keeps_its_best_plan(tmp_path: Path, text: str, workers: str) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "run"
    script.write_text(text)
    search = ["--num_devices=3", "--keep_placed", "--placement_method=refine", "--time_limit=3600", "--comm_cost_coeffs=0.0001,10"]
    process = start("train", *search, f"--workers={workers}", f"--out={kept}", str(script), OMP_NUM_THREADS="1")
    wait_for_line(process, "  best ")
    process.send_signal(signal.SIGINT)
    code, out, errors = finish(process)
    assert (code, out.split()) == (130, ["0"])  # the first call runs as it is
    assert only_error(errors) == f"error: interrupted; the best plan found until then is {kept / 'plan.json'}"
    assert "baechi: Towers: no" in errors
    found = RunFolder.load(kept)
    assert (found.plan.method, found.plan.status, found.measured) == ("refine", "feasible", None)
    assert found.timeline.makespan_us == pytest.approx(found.plan.predicted_step_us)
    assert found.report["model"] == "Towers of train.py"
    assert any("the search for its plan was interrupted" in said for said in found.report["summary"])
    assert found.profile is not None
    assert main(["report", str(kept)]) == 0


def test_the_next_run_neither_profiles_nor_searches(tmp_path: Path) -> None:
    """Unless it is told to; a folder of its own holds what is kept, for another process with the same settings of threads."""
    script, cache = tmp_path / "train.py", tmp_path / "cache"
    script.write_text(TRAINS)
    notes = {}
    for name, flags in {"first": [], "next": [], "anew": ["--no_cache"]}.items():
        where = [] if "--no_cache" in flags else [f"--cache_dir={cache}"]
        out = tmp_path / name
        line = (*PLACED, *flags, *where, f"--out={out}", str(script))
        if name != "anew":
            done = run(*line)
            assert done.returncode == 0, done.stderr
        else:
            torch.compiler.reset()
            assert main(line) == 0
        report = json.loads((out / "report.json").read_text())
        notes[name] = [note for note in report["notes"] if "earlier run" in note]
        assert report["parity"]["passed"]
    assert notes == {"first": [], "next": [f"plan and costs are from an earlier run, kept in {cache}; {ANEW}"], "anew": []}
    assert len(list((cache / "plans").iterdir())) == 1
    first, kept = (json.loads((tmp_path / name / "plan.json").read_text()) for name in ("first", "next"))
    assert (kept["placement"], kept["predicted_step_us"]) == (first["placement"], first["predicted_step_us"])


def test_a_folder_for_what_is_kept_and_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    assert main(["train", "--no_cache", f"--cache_dir={tmp_path}", str(tmp_path / "train.py")]) == 2
    assert "cannot be used together" in capsys.readouterr().err


def test_a_search_for_a_script_ends_where_it_does_not_pay_unless_its_time_is_given() -> None:
    def worth(*flags: str) -> object:
        args = make_parser().parse_args(["train", *flags, "train.py"])
        return script_request(args).request.plan.options.worth

    assert worth() == Worth()
    assert worth("--time_limit=10") is None


def test_a_scripts_own_modules_are_not_taken_for_ours(tmp_path: Path) -> None:
    """Nothing but baechi_ext and baechi_runtime is ours: a user may well have a runtime.py, and folders called benchmarks and tests."""
    for name in ("runtime.py", "benchmarks/__init__.py", "tests/__init__.py", "drivers.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"NAME = {name!r}\n")
    script = tmp_path / "train.py"
    script.write_text("import benchmarks, drivers, runtime, tests\nprint(*(m.NAME for m in (runtime, benchmarks, tests, drivers)))\n")
    for way in ([], ["-m", "baechi_ext", "train"]):
        done = subprocess.run([sys.executable, *way, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert (done.returncode, done.stdout) == (0, "runtime.py benchmarks/__init__.py tests/__init__.py drivers.py\n"), done.stderr
