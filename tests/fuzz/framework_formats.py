"""Formats of files that are read with PyTorch: policies of the learned placer, shards of checkpoints, entries of a cache."""

import hashlib
import json
from pathlib import Path

import torch

from baechi_ext.ir.files import encode_json
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.placeto.checkpoint import load_policy, save_policy
from baechi_ext.place.placeto.policy import Policy, PolicyConfig
from baechi_runtime.torch.calls.experience import Verdict, keep_verdict, load_verdict
from baechi_runtime.torch.lowering.checkpoint import read_shards, write_shard
from tests.fuzz.formats import Format
from tests.fuzz.mutations import JSON_KINDS

_KEY = "0" * 64
_OTHER = tuple(kind for kind in JSON_KINDS if kind != "gzip")
"""Edits of safetensors: compressed they would only ever be damaged."""


def _write_policy(folder: Path) -> None:
    save_policy(folder / "p", Policy.fresh(PolicyConfig(width=2, rounds=1, hidden=2), seed=7), {"updates": 3}, MadeBy(("baechi",)))


def _read_policy(folder: Path) -> None:
    encode_json({"config": load_policy(folder / "p").config.to_json()})


def _read_sealed_policy(folder: Path) -> None:
    """Reads parameters as if they had been written with the JSON file."""
    path, content = folder / "p.json", (folder / "p.safetensors").read_bytes()
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"sha256": hashlib.sha256(content).hexdigest()}))
    _read_policy(folder)


def _parameters() -> tuple[dict[str, torch.Tensor], dict[str, torch.optim.Optimizer]]:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    return {"w": parameter.detach(), "running": torch.ones(2, 2)}, {"w": optimizer}


def _write_shard(folder: Path) -> None:
    write_shard(folder, 0, *_parameters())


def _write_verdict(folder: Path) -> None:
    keep_verdict(folder, _KEY, Verdict(True, "it is faster", 100.0, 50.0, 1.0, 10))


FORMATS = {
    form.name: form
    for form in (
        Format("policy", "p.json", _write_policy, _read_policy),
        Format("parameters", "p.safetensors", _write_policy, _read_sealed_policy, _OTHER),
        Format("torch_shard", "device_0.safetensors", _write_shard,
               lambda folder: read_shards(folder, ["device_0.safetensors"], *_parameters()), _OTHER),
        Format("verdict", f"verdicts/{_KEY}.json", _write_verdict, lambda folder: load_verdict(folder, _KEY)),
    )
}  # fmt: skip
