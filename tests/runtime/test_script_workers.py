"""A user's training on worker processes, each of which runs the whole script: `--workers=process`, and `parallelize` under torchrun."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.report.trace import write_trace
from tests.runtime.forked import Forked, start
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.workers import finish, only_error, workers_of

BAECHI = "baechi_on_processes"
SCRIPTS = Path(__file__).parent / "scripts"
PLACED = ("train", "--placement_method=random", "--keep_placed", "--workers=process", "--num_devices=2", "--comm_cost_coeffs=0.001,50")
PLACED += ("--timeout=120",)
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
LOOP = """
import torch
from torch import nn
import baechi_ext

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 30))

    def forward(self, words):
        return self.layers(self.embedding(words).mean(1))

torch.manual_seed(3)
model = PLACE(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(6):
    words, wanted = torch.randint(30, (12, 5)), torch.randint(30, (12,))
    for half in (slice(0, 6), slice(6, 12)):  # gradients of two calls are added up
        loss = nn.functional.cross_entropy(model(words[half]), wanted[half])
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    SAY(f"{step} {loss.item():.17g} {norm.item():.17g} {torch.rand(1).item():.17g}")
model.eval()
with torch.no_grad():
    SAY(f"{model(words).sum().item():.17g} {model.layers[1].running_mean.sum().item():.17g}")
"""
ALONE = "PLACE, SAY = lambda net: net, print\n"
TOGETHER = """
import os, sys
OPTIONS = {"devices": 2, "method": "random", "seed": 1, "timeout_seconds": 60, "strict": True, "keep_placed": True}
PLACE = lambda net: baechi_ext.parallelize(net, **OPTIONS)
SAY = print if os.environ["RANK"] == "1" else lambda text: None
"""


def printed(script: Path, *arguments: str) -> str:
    """The script's output by itself, on one thread."""
    code, out, err = finish(Forked([str(script), *arguments], ONE_THREAD))
    assert code == 0, err
    return out


@pytest.mark.parametrize(("name", "arguments"), [("mnist", ["--epochs", "2"]), ("gan", []), ("word_language_model", ["--epochs", "1"])])
def test_a_script_prints_the_same_on_worker_processes(workers: ForkedWorkers, name: str, arguments: list[str]) -> None:
    path = SCRIPTS / f"{name}.py"
    codes, out, err = workers.finish(BAECHI, 2, *PLACED, str(path), "--", *arguments)
    assert codes == [0, 0], err
    assert out == printed(path, *arguments)
    assert "largest relative difference 0)" in err
    assert "cpu:0, cpu:1" in err


OTHER_MODULES = """
import torch
from torch import nn

class Logged(nn.Module):  # the norm of what it returns beside has no derivative at 0
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        h = torch.tanh(torch.cat([self.left(x), self.right(x)], 1))
        return self.head(h), h.square().sum(1).sqrt()

class Turned(nn.Module):  # what it returns has other strides than the same contiguous
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 48, bias=False), nn.Linear(16, 48, bias=False)

    def forward(self, x):
        h = torch.stack([self.left(x), self.right(x)], 1)
        return h.transpose(1, 2), x

class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(30, 40, sparse=True), nn.Linear(40, 8)

    def forward(self, x):
        return self.head(self.words(x.abs().mul(9).long().clamp(max=29)).mean(1)), x

torch.manual_seed(3)
model = MODEL()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x = torch.randn(12, 16)
    x[0] = 0.0 if step == 4 else x[0]
    values, other = model(x)
    loss = values.square().mean().sqrt()
    loss.backward()
    print(step, f"{loss.item():.17g}", *(f"{p.grad.to_dense().abs().sum().item():.17g}" for p in model.parameters()))
    print(values.stride(), *(p.grad.layout for p in model.parameters()))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("model", ["Logged", "Turned", "Sparse"])
def test_other_modules_compute_the_same_on_worker_processes(tmp_path: Path, workers: ForkedWorkers, model: str) -> None:
    script = tmp_path / "other.py"
    script.write_text(OTHER_MODULES.replace("MODEL()", f"{model}()"))
    codes, out, err = workers.finish(BAECHI, 2, *PLACED, str(script))
    assert codes == [0, 0], err
    assert out == printed(script)
    assert "nan" not in out
    assert "cpu:0, cpu:1" in err


COUNTED = """
import os
import threading
import time
import torch
import torch.distributed as dist

examples, groups = torch.zeros(()), set()

def watch():
    while True:
        groups.add(dist.is_initialized())
        time.sleep(0.001)

threading.Thread(target=watch, daemon=True).start()
while not groups:
    time.sleep(0.001)

def total(value):  # as libraries of metrics do
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
    return int(value)

def counted(net, args, output):
    examples.add_(len(args[0]))
    print(total(examples.clone()), *(os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")), *groups)
"""


def test_a_script_on_worker_processes_is_told_of_no_others(tmp_path: Path, workers: ForkedWorkers) -> None:
    """Code that adds up over all processes, or gives each a part of the data, finds one, at any time."""
    script = tmp_path / "counts.py"
    text = LOOP.replace("import baechi_ext\n", f"{ALONE}{COUNTED}")
    script.write_text(text.replace("optimizer =", "model.register_forward_hook(counted)\noptimizer ="))
    codes, out, err = workers.finish(BAECHI, 2, *PLACED, str(script))
    assert codes == [0, 0], err
    assert out == printed(script)
    assert out.startswith("6 None None None False\n12 None None None False\n")
    assert "11 steps placed" in err


def test_autocast_around_a_call_does_not_reach_into_what_it_leaves_alone(tmp_path: Path, workers: ForkedWorkers) -> None:
    script = tmp_path / "casts.py"
    text = LOOP.replace("import baechi_ext\n", ALONE)
    text = text.replace("return self.layers(", "with torch.autocast('cpu', enabled=False):\n            return self.layers(")
    script.write_text(text.replace("loss = ", "with torch.autocast('cpu', torch.bfloat16):\n            loss = "))
    codes, out, err = workers.finish(BAECHI, 2, *PLACED, "--verify_steps=0", str(script))
    assert codes == [0, 0], err
    assert out == printed(script)
    assert "11 steps placed" in err


def test_exit_codes_and_exceptions_are_the_scripts_own(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text("import sys\nprint('once')\nsys.exit(7)\n")
    code, out, err = finish(start(*PLACED, str(script)))
    assert (code, out) == (7, "once\n"), err
    script.write_text("raise ValueError('mine')\n")
    code, out, err = finish(start(*PLACED, str(script)))
    assert code == 1
    assert err.count("ValueError: mine") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_script_raises_on_one_worker_is_shown(tmp_path: Path, rank: int) -> None:
    """The other one, which waits for it, only echoes it; nobody waits for its goodbye until a time is out, which torch would warn of."""
    script = tmp_path / "raises.py"
    raises = f"if os.environ['RANK'] == '{rank}' and step == 3:\n        raise ValueError('mine')"
    script.write_text("import os\n" + LOOP.replace("import baechi_ext\n", ALONE).replace("norm =", f"{raises}\n    norm ="))
    code, _, err = finish(start(*PLACED, str(script)))
    assert code == 1
    assert (err.count("Traceback"), err.count("ValueError: mine\n")) == (1, 1)
    said = f"error: the worker of device {rank} ended with exit code 1 and its last words are above; the worker of device {1 - rank} said: "
    assert err.splitlines()[-1].startswith(said)
    assert err.endswith("where one alone does what takes longer than 120 s, raise --timeout\n")
    assert ("timed out" in err, "GLHF" in err) == (False, False)


def test_a_script_says_error_itself(tmp_path: Path) -> None:
    """Lines of its own are shown, and its exit code stays."""
    script = tmp_path / "says.py"
    script.write_text("import sys\nprint('error: skipped a batch', file=sys.stderr)\nsys.exit(7)\n")
    code, _, err = finish(start(*PLACED, str(script)))
    assert (code, err.splitlines()[0]) == (7, "error: skipped a batch")


COMPARED = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 10))
x, before = torch.randn(8, 20), torch.get_rng_state()
try:
    model(x).sum().backward()
except Exception:
    print("taken for its own")
finally:
    print("as before", torch.equal(before, torch.get_rng_state()) and model[1].num_batches_tracked.item() == 0)
print("goes on")
"""


def test_the_methods_of_a_script_are_compared_on_worker_processes(tmp_path: Path, workers: ForkedWorkers) -> None:
    """Those that fail have their reason; whatever ran computed what the script's own call does."""
    script, folder = tmp_path / "train.py", tmp_path / "c"
    script.write_text(COMPARED)
    flags = ["--workers=process", "--placement_methods=m_topo,random,expert,auto", "--num_steps=3", "--comm_cost_coeffs=0.001,50", "--json"]
    flags += ["--time_limit=0.2", "--microbatches=2", "--batch_norm=per_part"]
    out = workers.run(BAECHI, 2, "compare", *flags, "--timeout=120", f"--out={folder}", str(script))
    said, found = out[: out.index("{")], json.loads(out[out.index("{") :])
    assert said == "as before True\n"
    assert json.loads((folder / "compare.json").read_text()) == found
    kept = RunFolder.load(folder)
    assert {op.id for op in kept.measured.ops} >= {op.id for op in kept.graph.ops if op.compute_us > 0}
    assert len(kept.measured.memory) == len(kept.plan.cluster) == 2  # a plan that leaves one idle, too, has the memory of both
    assert write_trace(str(folder), None, None).exists()
    rows = {row["method"]: row for row in found["methods"]}
    assert (found["executor"], list(rows)) == ("process", ["single", "m_topo", "random", "expert", "auto", "auto_2_parts"])
    assert (rows["auto_2_parts"]["parity"]["passed"], len(rows["auto_2_parts"]["measured_step_us"]["samples"])) == (True, 3)
    for method in ("single", "m_topo", "random"):
        assert len(rows[method]["measured_step_us"]["samples"]) == 3
        assert (rows[method]["parity"]["passed"], rows[method]["parity"]["max_rel_diff"]) == (True, 0)
        assert (folder / rows[method]["plan"]).exists()
    assert (rows["m_topo"]["splits"], rows["expert"]["measured_step_us"], rows["expert"]["note"] != "") == (True, None, True)
    assert len(found["unplaced"]["measured_step_us"]["samples"]) == 3
    assert any("hands outputs, gradients and buffers to every worker" in note for note in found["notes"])
    assert found["load_of_others"] is not None


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_step_of_a_split_that_is_recommended_is_recorded_on_all_devices(tmp_path: Path, workers: ForkedWorkers, kind: str) -> None:
    """One device has no room for all parameters."""
    script, folder = tmp_path / "train.py", tmp_path / "c"
    script.write_text(COMPARED)
    flags = [f"--workers={kind}", "--placement_methods=m_etf", "--num_steps=2", "--comm_cost_coeffs=0.001,50", "--device_memory=14KB"]
    line = ["compare", *flags, "--timeout=120", f"--out={folder}", str(script)]
    if kind == "process":
        workers.run(BAECHI, 2, *line)
    else:
        code, out, err = finish(start(*line))
        assert code == 0, err + out
    kept = RunFolder.load(folder)
    measured = kept.measured
    assert (kept.plan.method, measured.executor) == ("m_etf", kind)
    assert {op.device for op in measured.ops} == {0, 1}
    sent = {(t.op, t.source, t.target) for t in measured.transfers}
    producers = [kept.graph.ops[kept.graph.tensors[t.tensor].producer].id for t in kept.timeline.transfers]
    assert sent == {(op, t.source, t.target) for op, t in zip(producers, kept.timeline.transfers, strict=True)}
    assert len(measured.memory or ()) == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("20, 40)", "20, 4)"), "had called no module of 1000 parameters or more"),
        (("model(x)", "model(x + int(__import__('os').environ['RANK']))"), "the arguments of a placed call are not the same on worker 0"),
    ],
)
def test_a_script_that_can_not_be_compared_on_worker_processes_ends_on_all(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPARED.replace(*change))
    flags = ["--workers=process", "--placement_methods=m_topo", "--num_steps=3", "--comm_cost_coeffs=0.001,50", "--timeout=60"]
    code, _, err = finish(start("compare", *flags, str(script)))
    assert code == 1
    assert told in only_error(err)


def torchrun(script: Path) -> Forked:
    return start("--standalone", "--nproc-per-node=2", str(script), module="torch.distributed.run")


def test_parallelize_under_torchrun_trains_as_one_process_does(tmp_path: Path) -> None:
    """Worker 1 prints, so every number came over from where it was computed."""
    alone, together = tmp_path / "alone.py", tmp_path / "together.py"
    alone.write_text(LOOP.replace("import baechi_ext\n", ALONE))
    together.write_text(LOOP.replace("import baechi_ext\n", f"import baechi_ext\n{TOGETHER}"))
    code, out, err = finish(torchrun(together))
    assert code == 0, err
    assert out == printed(alone)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("words = words.roll(int(os.environ['RANK']), 0)", "the arguments of a placed call are not the same on worker 0 and worker 1"),
        ("model.embedding.weight.data += int(os.environ['RANK'])", "the parameters and buffers of a placed module are not the same"),
    ],
)
def test_workers_that_do_not_see_the_same_say_so(tmp_path: Path, change: str, told: str) -> None:
    script = tmp_path / "differs.py"
    text = LOOP.replace("import baechi_ext\n", f"import baechi_ext\n{TOGETHER}")
    script.write_text(text.replace("    for half in", f"    {change}\n    for half in"))
    code, _, err = finish(torchrun(script))
    assert code != 0
    assert told in err


def test_a_worker_that_dies_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    text = LOOP.replace("import baechi_ext\n", f"import baechi_ext\n{ALONE}").replace("range(6)", "range(100000)")
    script.write_text(text.replace("    SAY(", "    print(step, flush=True)\n    SAY("))
    process = start(*PLACED, str(script))
    while process.stdout.readline().strip() != "4":
        assert process.poll() is None, process.stderr.read()
    victim = workers_of(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    code, _, err = finish(process, timeout=100)
    assert code == 1
    assert "the worker of device 1 was killed by SIGKILL" in only_error(err)
    assert time.monotonic() - begin < 90
    assert not workers_of(process.pid)
