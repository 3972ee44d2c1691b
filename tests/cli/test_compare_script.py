"""`baechi compare SCRIPT` as a user calls it: a script's first training call, really measured by several plans, and nothing after it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_ext.capture import torch_private
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.measure.timing import WARMUP

Run = Callable[..., tuple[int, str, str]]
TRAINS = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 10))
print("begins", *sys.argv[1:])
x, before = torch.randn(8, 20), torch.get_rng_state()
try:
    model(x).sum().backward()
    print("called")
except Exception:
    print("taken for its own")
finally:
    same = torch.equal(before, torch.get_rng_state()) and model[1].num_batches_tracked.item() == 0
    print("as before", same and all(p.grad is None for p in model.parameters()))
print("goes on")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return path


def test_the_first_training_call_is_compared_and_ends_the_script(run: Run, script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    flags = ["--placement_methods=m_etf,expert", "--num_steps=3", f"--out={folder}", "--json"]
    code, out, err = run("compare", *flags, script, "--", "--epochs", "1")
    assert code == 0, err
    said, found = out[: out.index("{")], json.loads(out[out.index("{") :])
    assert said.splitlines() == ["begins --epochs 1", "as before True"]
    assert json.loads((folder / "compare.json").read_text()) == found
    rows = {row["method"]: row for row in found["methods"]}
    assert (found["model"], list(rows)) == ("Sequential of train.py", ["single", "m_etf", "expert"])
    for method in ("single", "m_etf"):
        assert len(rows[method]["measured_step_us"]["samples"]) == 3
        assert (rows[method]["parity"]["passed"], rows[method]["parity"]["max_rel_diff"]) == (True, 0)
        assert rows[method]["parity"]["compared"] == 1 + 6 + 3  # output, gradients of parameters, buffers
        assert (folder / rows[method]["plan"]).exists()
    assert (rows["expert"]["measured_step_us"], rows["expert"]["note"] != "") == (None, True)  # the module gives no hint
    assert found["unplaced"]["name"] == "eager, one device"
    assert "there the script was ended" in found["notes"][0]
    kept = RunFolder.load(folder)
    assert kept.plan.method == found["recommended"]
    assert {op.id for op in kept.measured.ops} >= {op.id for op in kept.graph.ops if op.compute_us > 0}
    assert (folder / "profile.json").exists()


INTERPOLATES = """
import torch
from torch import nn
from torch.nn import functional
torch.manual_seed(1)

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.fuse, self.norm = nn.Linear(8, 32), nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.drop, self.last = nn.Dropout(0.1), nn.Conv2d(32, 3, 1)

    def forward(self, x):
        maps = self.first(x).permute(0, 2, 1).reshape(-1, 32, 4, 4)
        larger = functional.interpolate(maps, size=(16, 16), mode="bilinear")
        return self.last(self.drop(torch.relu(self.norm(self.fuse(larger)))))

functional.cross_entropy(Head()(torch.randn(2, 16, 8)), torch.randint(0, 3, (2, 16, 16))).backward()
"""


def test_what_rounding_alone_makes_of_a_gradient_is_held_against_double_precision(
    run: Run, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verified calls are: such a bias' gradient is rounding alone, and interpolation that is written out rounds otherwise."""
    monkeypatch.setattr(torch_private, "_WHOLE", "multi_margin_loss")
    script.write_text(INTERPOLATES)
    code, out, err = run("compare", "--placement_methods=random", "--num_steps=1", "--json", script)
    assert code == 0, err
    parities = [row["parity"] for row in json.loads(out[out.index("{") :])["methods"]]
    assert [parity["passed"] for parity in parities] == [True, True]
    assert all(parity["tolerance"] > 1e-5 for parity in parities)


def test_paths_are_of_where_the_command_runs_and_an_earlier_comparison_goes(
    run: Run, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script.write_text(f"import os\nos.chdir({str(elsewhere)!r})\n{TRAINS}")
    for flags in (["--placement_methods=m_topo,m_etf"], ["--placement_methods=m_etf", "--cost_path=c/profile.json"]):
        monkeypatch.chdir(tmp_path)
        code, _, err = run("compare", *flags, "--num_steps=2", "--comm_cost_coeffs=0.001,50", "--out=c", script)
        assert code == 0, err
    assert not list(elsewhere.iterdir())
    kept = {"graph.json", "graph_split.json", "profile.json", "plan.json", "plan_single.json", "plan_m_etf.json"}
    kept |= {"compare.json", "config.toml", "measured.json"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == kept


def test_parts_of_a_scripts_batch_are_compared_beside_the_whole(run: Run, script: Path, tmp_path: Path) -> None:
    """With BatchNorm where it may normalise each part by itself; otherwise the row says why not."""
    flags = ["--placement_methods=auto", "--time_limit=0.2", "--num_steps=3", "--comm_cost_coeffs=0.001,50", "--microbatches=2", "--json"]
    code, out, err = run("compare", *flags, "--batch_norm=per_part", f"--out={tmp_path / 'c'}", script)
    assert code == 0, err
    rows = {row["method"]: row for row in json.loads(out[out.index("{") :])["methods"]}
    assert list(rows) == ["single", "auto", "auto_2_parts"]
    parted = rows["auto_2_parts"]
    assert len(parted["measured_step_us"]["samples"]) == 3
    assert parted["parity"]["passed"]
    assert parted["parity"]["compared"] == 1 + 6 + 3
    assert parted["parity"]["max_rel_diff"] < parted["parity"]["tolerance"] == 1e-4
    assert "normalises each part of the batch by itself" in parted["note"]
    assert rows["auto"]["parity"]["max_rel_diff"] == 0
    code, out, err = run("compare", *flags, script)
    assert code == 0, err
    refused = json.loads(out[out.index("{") :])["methods"][-1]
    assert (refused["method"], refused["measured_step_us"]) == ("auto_2_parts", None)
    assert "the batch can't be split: aten._native_batch_norm" in refused["note"]


def test_a_script_that_never_trains(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text("import torch\ntorch.nn.Linear(4, 2)(torch.ones(1, 4)).sum().backward()\nprint('done')\n")
    code, out, err = run("compare", path)
    assert (code, out) == (1, "done\n")
    assert err.splitlines()[-1].startswith(f"error: {path} ended (exit code 0) and had called no module of 1000 parameters or more")


def test_eager_runs_on_one_core_as_a_device_does(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "cores.py"
    path.write_text(
        "import os, torch\ncores = []\n"
        "@torch.library.custom_op('cores::seen', mutates_args=())\n"
        "def seen(x: torch.Tensor) -> torch.Tensor:\n    cores.append(os.sched_getaffinity(0))\n    return x.clone()\n"
        "seen.register_fake(torch.empty_like)\nseen.register_autograd(lambda ctx, g: g)\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n        return seen(super().forward(x))\n"
        "before = os.sched_getaffinity(0)\n"
        "try:\n    Net(40, 40)(torch.ones(1, 40))\n"
        "finally:\n    print(sum(c == {min(before)} for c in cores), os.sched_getaffinity(0) == before)\n"
    )
    code, out, err = run("compare", "--placement_methods=single", "--comm_cost_coeffs=0.001,50", "--num_steps=3", path)
    assert code == 0, err
    on_one, same_after = out.splitlines()[0].split()
    assert (int(on_one) >= 3 + WARMUP, same_after) == (True, "True")


@pytest.mark.parametrize("way", ["y.sum() > 0", "y.sum() < 0", "random.random() > 2"])
def test_a_call_of_several_fragments_is_compared(run: Run, tmp_path: Path, way: str) -> None:
    """Whatever Python runs between them; each plan is one of all fragments."""
    path = tmp_path / "branches.py"
    path.write_text(
        "import random, torch\ntorch.manual_seed(0)\nrandom.seed(0)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.a, self.b = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)\n"
        f"    def forward(self, module):\n        y = self.a(module)\n        return self.b(y) if {way} else self.b(y * 2)\n"
        "Net()(module=torch.ones(3, 40)).sum().backward()\nprint('goes on')\n"
    )
    flags = ["--placement_methods=m_topo", "--num_steps=3", "--comm_cost_coeffs=0.001,50", "--json"]
    code, out, err = run("compare", *flags, path)
    assert code == 0, err
    found = json.loads(out)
    rows = {row["method"]: row for row in found["methods"]}
    assert all((row["parity"]["passed"], row["parity"]["max_rel_diff"]) == (True, 0) for row in rows.values())
    assert rows["m_topo"]["parity"]["compared"] >= 1 + 4


def test_a_call_without_ops_is_an_error(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "sparse.py"
    path.write_text(
        "import torch\ntry:\n    torch.nn.Linear(40, 40)(torch.eye(40).to_sparse())\nexcept BaseException:\n    print('goes on')\n"
    )
    code, out, err = run("compare", path)
    assert (code, out) == (1, "goes on\n")
    assert err.splitlines()[-1].startswith("error: a call of Linear can't be ")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["SCRIPT", "--num_gpus=2"], 2, "drop the GPUs, or run baechi train SCRIPT once a method"),
        (["SCRIPT", "--fallback"], 2, "--fallback"),
        (["nowhere.py"], 1, "cannot read script 'nowhere.py'"),
        (["--", "--epochs"], 2, "name the script before it: baechi compare SCRIPT"),
    ],
)
def test_bad_input(run: Run, script: Path, flags: list[str], code: int, message: str) -> None:
    found, out, err = run("compare", *(script if f == "SCRIPT" else f for f in flags))
    assert (found, out) == (code, "")
    assert message in err.splitlines()[-1]
