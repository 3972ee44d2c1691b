"""Policy files: what is written is read, and what is no policy of this version is refused with the reason."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from baechi_ext.errors import FileError, PolicyError
from baechi_ext.place.placeto.checkpoint import load_policy, save_policy
from baechi_ext.place.placeto.policy import Policy, PolicyConfig


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The JSON file of a policy."""
    save_policy(tmp_path / "p", Policy.fresh(PolicyConfig(width=4, hidden=8), seed=7), {"updates": 3})
    return tmp_path / "p.json"


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    policy = Policy.fresh(PolicyConfig(width=4, rounds=2, hidden=8), seed=1)
    save_policy(tmp_path / "x.y", policy, {})
    for name in ("x.y", "x.y.json", "x.y.safetensors"):
        read = load_policy(tmp_path / name)
        assert read.config == policy.config
        assert read.parameters.keys() == policy.parameters.keys()
        assert all(torch.equal(read.parameters[k], v) for k, v in policy.parameters.items())


def test_the_files_are_open(saved: Path) -> None:
    value = json.loads(saved.read_text())
    assert (value["kind"], value["config"]["width"], value["training"]) == ("placeto policy", 4, {"updates": 3})
    with safetensors.safe_open(saved.with_suffix(".safetensors"), "numpy") as file:
        assert file.get_tensor("head.score.weight").shape == (8, 1)


def test_parameters_are_drawn_by_the_seed() -> None:
    policies = [Policy.fresh(PolicyConfig(), seed).parameters for seed in (1, 1, 2)]
    assert all(torch.equal(policies[0][k], policies[1][k]) for k in policies[0])
    assert not torch.equal(policies[0]["head.own.weight"], policies[2]["head.own.weight"])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read placeto policy file '.*none.json'"):
        load_policy(tmp_path / "none")


def test_a_cut_off_file(saved: Path) -> None:
    file = saved.with_suffix(".safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(PolicyError, match="are not those that its JSON file was written with; the file is damaged"):
        load_policy(saved)


def resealed(saved: Path, content: bytes) -> None:
    """Writes parameters as if the JSON file had been written with them."""
    saved.with_suffix(".safetensors").write_bytes(content)
    value = json.loads(saved.read_text()) | {"sha256": hashlib.sha256(content).hexdigest()}
    saved.write_text(json.dumps(value))


def test_damaged_parameters_whose_digest_matches(saved: Path) -> None:
    content = saved.with_suffix(".safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for damaged in (b"", content[:7], content[:-4], content[:20], content.replace(b"F32", b"F99", 1), content.replace(b"F32", b"C64", 1)):
        resealed(saved, damaged)
        with pytest.raises(PolicyError, match="can't be read|train it again"):
            load_policy(saved)
    for number in (float("nan"), float("inf")):
        resealed(saved, content[:header] + struct.pack("<f", number) + content[header + 4 :])
        with pytest.raises(PolicyError, match="the parameter '.*' has values that are no finite numbers; train it again"):
            load_policy(saved)


class KilledError(BaseException):
    """As if the process had been killed."""


@pytest.mark.parametrize("renames", range(4))
@pytest.mark.parametrize("first", [False, True])
def test_a_writer_that_is_killed_leaves_one_pair_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int, *, first: bool
) -> None:
    old, new = (Policy.fresh(PolicyConfig(width=4, hidden=8), seed) for seed in (1, 2))
    if not first:
        save_policy(tmp_path / "p", old, {})
    replace, done = os.replace, []

    def killed(*paths: Any) -> None:
        if len(done) == renames:
            raise KilledError
        done.append(paths)
        replace(*paths)

    monkeypatch.setattr(os, "replace", killed)
    with suppress(KilledError):
        save_policy(tmp_path / "p", new, {})
    monkeypatch.undo()
    assert (len(done) == 3) == (renames == 3)
    if first and renames < 2:
        with pytest.raises(FileError, match="No such file"):
            load_policy(tmp_path / "p")
    else:
        expected = old if renames < 2 else new
        assert torch.equal(load_policy(tmp_path / "p").parameters["head.score.weight"], expected.parameters["head.score.weight"])
    save_policy(tmp_path / "p", new, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "p.safetensors"]


def test_parameters_of_another_type(saved: Path) -> None:
    tensors = safetensors.torch.load_file(saved.with_suffix(".safetensors"))
    resealed(saved, safetensors.torch.save({name: tensor.double() for name, tensor in tensors.items()}))
    with pytest.raises(PolicyError, match="is of torch.float64, expected torch.float32; train it again"):
        load_policy(saved)


def test_missing_parameters(saved: Path) -> None:
    saved.with_suffix(".safetensors").unlink()
    with pytest.raises(PolicyError, match=r"cannot read parameters file '.*p.safetensors': No such file or directory; .* it belongs"):
        load_policy(saved)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v.update(kind="plan"), "is of kind 'plan', expected \"placeto policy\""),
        (lambda v: v.pop("config"), '"config" is None; expected an object of device_features, embedding, every_step'),
        (lambda v: v["config"].update(more=1), "expected an object of device_features"),
        (lambda v: v["config"].update(embedding="sweep"), "embedding is 'sweep', this version reads 'rounds'; train it again"),
        (lambda v: v["config"].update(every_step=True), "every_step is True, this version reads False"),
        (lambda v: v["config"].update(width=0), r"width, rounds, hidden and visits are \(0, 4, 8, 1\)"),
        (lambda v: v["config"].update(visits=0), r"are \(4, 4, 8, 0\); expected whole numbers from 1"),
        (lambda v: v["config"].update(hidden="8"), "expected whole numbers from 1 to 4096"),
        (lambda v: v["config"].update(op_features=["run"]), r"trained on other features of ops \(run\) than this version computes \(run, "),
        (lambda v: v["config"]["device_features"].reverse(), r"other features of devices \(devices, visited, .*train it again"),
        (lambda v: v["config"].update(device_features=3), "other features of devices"),
        (lambda v: v["config"].update(hidden=16), r"do not belong .*, first 'head.above.bias' of shape \(8,\), expected \(16,\)"),
    ],
)
def test_what_is_refused(saved: Path, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    change(saved, edit)
    with pytest.raises(PolicyError, match=message):
        load_policy(saved)


def test_without_safetensors(saved: Path) -> None:
    code = (
        "import sys\nsys.modules['safetensors'] = None\nfrom baechi_ext.errors import MissingBackendError\n"
        "from baechi_ext.place.placeto.checkpoint import load_policy\n"
        f"try: load_policy({str(saved)!r})\nexcept MissingBackendError as e: sys.stdout.write(str(e))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "placeto needs torch and safetensors" in done.stdout
    assert "pip install 'baechi-ext[torch]'" in done.stdout
