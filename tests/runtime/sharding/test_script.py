"""`baechi pase SCRIPT`: the module that a script trains, up to its first training call and no further."""

import json
from math import prod
from pathlib import Path

import pytest

from baechi_runtime.cli.main import main

SCRIPT = """
import sys

import torch
from torch import nn
from torch.nn.utils import parametrizations

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.project = nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 64)

    def forward(self, words, *, scale):
        return {"logits": self.project(self.norm(self.embed(words)) * scale), "words": words}

model = Words()
small = nn.Linear(2, 2)
small(torch.randn(3, 2))
spare = parametrizations.orthogonal(nn.Linear(40, 40))
spare.weight.sum()
model.eval()
words = torch.randint(64, (int(sys.argv[1]), 8))
with torch.no_grad():
    model(words, scale=1.0)
sys.stderr.write("warmed up\\n")
model.train()
loss = nn.functional.cross_entropy(model(words, scale=2.0)["logits"].flatten(0, 1), words.flatten())
sys.stderr.write("trained\\n")
"""


def test_a_scripts_module_is_sharded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train_words.py"
    script.write_text(SCRIPT)
    assert main(["pase", str(script), "-p", "4", "--flops", "0.001", "--json", "--", "16"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert "warmed up" in err
    assert "trained" not in err
    assert (found["graph"], found["batch"], found["devices"]) == ("train_words", 16, 4)
    assert found["captured"]["unknown"] == {}
    assert found["shard"]["linear"]["sizes"] == {"batch": 16, "sequence": 8, "units": 64, "in_features": 32}
    assert prod(found["shard"]["linear"]["splits"].values()) == 4
    assert main(["pase", str(script), "-p", "32", "--flops", "0.001", "--json", "--", "16"]) == 0
    assert json.loads(capfd.readouterr().out)["devices"] == 32  # more than examples: other loops can be split


def test_examples_stand_in_the_first_input_that_has_a_dimension_for_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A diffusion model is given its time step first."""
    script = tmp_path / "train.py"
    body = "import torch\nfrom torch import nn\nclass Noisy(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    body += "        self.layer = nn.Linear(40, 40)\n    def forward(self, time, x):\n"
    body += "        return (self.layer(x) * time).square().mean()\n"
    script.write_text(f"{body}Noisy()(torch.tensor(3.0), torch.randn(8, 40)).backward()\n")
    assert main(["pase", str(script), "-p", "2", "--flops", "0.001", "--json"]) == 0, capfd.readouterr().err
    assert json.loads(capfd.readouterr().out)["batch"] == 8


def test_a_script_that_trains_nothing_is_told_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "eval.py"
    script.write_text("import torch\ntorch.nn.Linear(100, 100).eval()(torch.randn(2, 100))\nraise ValueError('no data')\n")
    assert main(["pase", str(script), "-p", "2"]) == 1
    err = capfd.readouterr().err
    assert "ValueError: no data" in err
    assert "ended (exit code 1) and had called no module of 1000 parameters or more in training mode" in err
