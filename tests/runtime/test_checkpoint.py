"""Trainings that are interrupted and go on: the same losses bit for bit, whatever the plan; and checkpoints that are refused."""

import hashlib
import json
import os
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baechi_ext.errors import CheckpointError, ExecutionError, FileError, OptionError
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import RunOptions, TrainRequest
from baechi_runtime.drivers.training import Progressed, train_on
from baechi_runtime.drivers.training import train as train_model
from baechi_runtime.files.checkpoint_folder import CheckpointFolder, Shard, sealed, verify_shard, written_shard
from baechi_runtime.models.registry import ModelOptions, effective_options
from baechi_runtime.models.torch import gpt2
from baechi_runtime.models.training_step import EagerStep, TrainingStep, optimizer_spec
from baechi_runtime.torch.backend import TrainedStep
from baechi_runtime.torch.lowering.devices import cpu_devices, one_thread
from baechi_runtime.torch.threads.executor import PlacedStep, ThreadExecutor
from tests.torch_steps import capture, make_step, scattered

TRAINING = {"model": "branches", "learning_rate": 0.05}


def slow_step(name: str, optimizer: str) -> TrainingStep:
    """With a learning rate at which no loss comes to 0 in a few steps."""
    return replace(make_step(name), optimizer=optimizer_spec(optimizer, 0.001))


def placed(name: str, optimizer: str, num_devices: int, seed: int, executor: ThreadExecutor) -> PlacedStep:
    """A small step with fresh weights, scattered over devices."""
    step = slow_step(name, optimizer)
    graph, binding = capture(step)
    timeline: Timeline = scattered(graph, num_devices, seed)
    return executor.load(timeline, binding, step)


def train(
    folder: Path | None,
    steps: int,
    *,
    name: str = "branches",
    optimizer: str = "adam",
    resume: bool = False,
    plan: tuple[int, int] = (2, 1),
    **training: object,
) -> Progressed:
    """A run with a checkpoint after every second step; `plan` is the number of devices, and a seed."""
    with ThreadExecutor(cpu_devices(3), timeout_seconds=60.0) as executor:
        loaded = placed(name, optimizer, *plan, executor)
        options = RunOptions(steps, None if folder is None else str(folder), 2, resume)
        return train_on(TrainedStep(loaded), options, TRAINING | training, lambda _: None)


def reseal(path: Path, **changes: object) -> None:
    """Changes fields of a checkpoint.json as if it had been written so."""
    value = json.loads(path.read_text()) | changes
    path.write_bytes(sealed({key: field for key, field in value.items() if key != "sha256"}))


def eager_losses(step: TrainingStep, steps: int) -> tuple[float, ...]:
    """On one thread, as a device has: two add up in another order."""
    eager = EagerStep(step, torch.device("cpu"))
    torch.manual_seed(step.seed)
    with one_thread():
        return tuple(eager.run().item() for _ in range(steps))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "rmsprop", "adagrad", "adadelta", "adam", "adamw"])
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_it_goes_on_with_the_same_losses(tmp_path: Path, name: str, optimizer: str) -> None:
    """With dropout, BatchNorm and a tied weight; in the end as plain PyTorch; the plan and the number of devices change on the way."""
    whole = train(None, 9, name=name, optimizer=optimizer)
    first = train(tmp_path, 4, name=name, optimizer=optimizer)
    assert (first.resumed_from, first.checkpoint_step, first.losses) == (None, 4, whole.losses[:4])
    second = train(tmp_path, 7, name=name, optimizer=optimizer, resume=True, plan=(3, 2))
    assert (second.resumed_from, second.checkpoint_step, len(second.step_us)) == (4, 7, 3)
    third = train(tmp_path, 9, name=name, optimizer=optimizer, resume=True, plan=(1, 3))
    assert third.losses == second.losses + third.losses[7:] == whole.losses == eager_losses(slow_step(name, optimizer), 9)
    assert len(set(whole.losses)) == 9


def test_a_checkpoint_says_who_wrote_it(tmp_path: Path) -> None:
    with ThreadExecutor(cpu_devices(3), timeout_seconds=60.0) as executor:
        loaded = placed("branches", "sgd", 2, 1, executor)
        train_on(TrainedStep(loaded), RunOptions(2, str(tmp_path), 2, command=("baechi", "train", "it")), TRAINING, lambda _: None)
    said = json.loads((tmp_path / "step_00000002" / "checkpoint.json").read_text())
    assert (said["command"], said["versions"]["torch"]) == (["baechi", "train", "it"], torch.__version__)


def test_it_goes_on_even_where_random_numbers_were_drawn_meanwhile(tmp_path: Path) -> None:
    whole = train(None, 6)
    train(tmp_path, 3)
    torch.manual_seed(99)
    assert train(tmp_path, 6, resume=True).losses == whole.losses


def test_the_last_two_are_kept_and_nothing_else(tmp_path: Path) -> None:
    train(tmp_path, 7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000006", "step_00000007"]
    for folder in tmp_path.iterdir():
        assert sorted(p.name for p in folder.iterdir()) == ["checkpoint.json", "device_0.safetensors", "device_1.safetensors"]
    assert json.loads((tmp_path / "step_00000007" / "checkpoint.json").read_text())["step"] == 7


def test_what_is_unfinished_does_not_count_and_is_cleared_away(tmp_path: Path) -> None:
    whole = train(None, 6)
    train(tmp_path, 4)
    os.rename(tmp_path / "step_00000004", tmp_path / ".unfinished_step_00000004")
    (tmp_path / "step_00000005").mkdir()
    (tmp_path / "step_00000005" / "device_0.safetensors").write_bytes(b"half")
    again = train(tmp_path, 6, resume=True)
    assert (again.resumed_from, again.losses) == (2, whole.losses)
    assert not (tmp_path / ".unfinished_step_00000004").exists()


def test_a_run_that_is_done_stays_so(tmp_path: Path) -> None:
    first = train(tmp_path, 3)
    again = train(tmp_path, 3, resume=True)
    assert (again.losses, again.step_us, again.resumed_from) == (first.losses, (), 3)


def test_without_a_checkpoint_yet_resume_begins_at_the_beginning(tmp_path: Path) -> None:
    assert train(tmp_path / "new", 2, resume=True).resumed_from is None


def test_checkpoints_are_not_overwritten_unasked(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with pytest.raises(OptionError, match="holds checkpoints, the last of step 2; add --resume"):
        train(tmp_path, 4)


def test_more_steps_than_asked_for(tmp_path: Path) -> None:
    train(tmp_path, 4)
    with pytest.raises(OptionError, match="is of step 4, beyond --train_steps=3"):
        train(tmp_path, 3, resume=True)


def test_another_training_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2)
    reseal(tmp_path / "step_00000002" / "checkpoint.json", training={**TRAINING, "learning_rate": 0.1})
    with pytest.raises(CheckpointError, match="is of another training: its learning_rate is 0.1, here it is 0.05"):
        train(tmp_path, 4, resume=True)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {}, None])
def test_other_options_of_the_model_are_refused(tmp_path: Path, options: dict | None) -> None:
    """The graph is the same."""
    train(tmp_path, 2, options=options)
    with pytest.raises(CheckpointError, match="is of another training: its dropout is .*, here it is 0.5"):
        train(tmp_path, 4, resume=True, options={"dropout": 0.5, "d_model": 8})


def test_checkpoints_without_the_models_options_are_gone_on_from(tmp_path: Path) -> None:
    """Those of earlier versions."""
    train(tmp_path, 2)
    assert train(tmp_path, 4, resume=True, options={"dropout": 0.5}).resumed_from == 2


def test_the_options_of_a_model_are_those_that_it_is_built_with() -> None:
    given = effective_options("gpt2", ModelOptions(dropout=0.3, num_devices=4, seed=2))
    assert given == {**asdict(gpt2.Options()), "dropout": 0.3}
    assert "num_devices" not in effective_options("gnmt_v2", ModelOptions(num_devices=4))


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    """Even where what is trained is said to be the same."""
    train(tmp_path, 2, name="tied")
    with pytest.raises(CheckpointError, match="has no tensor 'model.last.bias'; it is of another model"):
        train(tmp_path, 4, name="branches", resume=True)


@pytest.mark.parametrize("content", [None, b"", b"half"])
def test_a_damaged_shard_is_named(tmp_path: Path, content: bytes | None) -> None:
    train(tmp_path, 2)
    shard = tmp_path / "step_00000002" / "device_1.safetensors"
    if content is None:
        shard.unlink()
    else:
        shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{shard} .*; remove {shard.parent} to go on from the checkpoint before it"):
        train(tmp_path, 4, resume=True)


def test_one_wrong_bit_is_found(tmp_path: Path) -> None:
    train(tmp_path, 2)
    shard = tmp_path / "step_00000002" / "device_0.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        train(tmp_path, 4, resume=True)


@pytest.mark.parametrize(
    "change",
    [
        *({"losses": [1.0]}, {"losses": None}, {"shards": [{"file": "../x", "bytes": 1, "sha256": ""}]}),
        *({"random_state": "%"}, {"random_state": "é"}, {"random_state": "AAAA"}, {"random_state": "A" * 6741 + "A=="}),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, change: dict) -> None:
    train(tmp_path, 2)
    reseal(tmp_path / "step_00000002" / "checkpoint.json", **change)
    with pytest.raises(CheckpointError, match="damaged"):
        train(tmp_path, 4, resume=True)


def small_checkpoint(folder: Path) -> CheckpointFolder:
    """Two steps, two shards of a number or two."""
    checkpoints = CheckpointFolder(folder)
    checkpoints.make()
    unfinished = checkpoints.begin(2)
    shards = [
        written_shard(unfinished, device, lambda path, device=device: save_file({f"state/{device}": torch.ones(device + 1)}, path))
        for device in range(2)
    ]
    about = {"step": 2, "training": TRAINING, "random_state": "AAECAw==", "losses": [0.5, 0.25], **MadeBy(("baechi",)).to_json()}
    checkpoints.complete(unfinished, about, shards)
    return checkpoints


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """Each bit by itself and the byte as a whole, of checkpoint.json (its digest and line ends included) and of the shards."""
    folder = small_checkpoint(tmp_path)
    folder.verify()
    for path in sorted((tmp_path / "step_00000002").iterdir()):
        content = path.read_bytes()
        for at in range(len(content)):
            for flip in (1, 2, 4, 8, 16, 32, 64, 128, 255):
                path.write_bytes(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
                with pytest.raises((CheckpointError, FileError)) as caught:
                    folder.verify()
                assert "\n" not in str(caught.value)
        path.write_bytes(content)
    folder.verify()


def test_damage_is_found_before_anything_is_built(tmp_path: Path) -> None:
    train(tmp_path, 2)
    path = tmp_path / "step_00000002" / "checkpoint.json"
    path.write_text(path.read_text().replace('"losses":[\n', '"losses":[\n1', 1))
    request = TrainRequest("wide_towers", PlanRequest(), run=RunOptions(4, str(tmp_path), 2, resume=True))

    def never(*_: object) -> None:
        raise AssertionError("something is built")

    with pytest.raises(CheckpointError, match="is damaged: it is not the file that was written"):
        train_model(request, never, never)


def test_what_is_cut_off_or_added_is_found(tmp_path: Path) -> None:
    train(tmp_path, 2)
    path = tmp_path / "step_00000002" / "checkpoint.json"
    content = path.read_bytes()
    for changed in (content + b"\n", b" " + content, content[:-1], content.replace(b',\n"sha256"', b',\n"x":1,\n"sha256"')):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="is damaged: it is not the file that was written; remove"):
            CheckpointFolder(tmp_path).last()


def test_another_number_of_steps_than_losses(tmp_path: Path) -> None:
    train(tmp_path, 2)
    reseal(tmp_path / "step_00000002" / "checkpoint.json", step=1)
    with pytest.raises(CheckpointError, match="is damaged: its fields do not fit together"):
        CheckpointFolder(tmp_path).last()


def test_a_checkpoint_in_a_folder_of_another_step(tmp_path: Path) -> None:
    train(tmp_path, 2)
    os.rename(tmp_path / "step_00000002", tmp_path / "step_00000003")
    with pytest.raises(CheckpointError, match="is damaged: its fields do not fit together"):
        CheckpointFolder(tmp_path).last()


def without_seal(path: Path, **changes: object) -> None:
    """Makes a checkpoint.json what version 0.1.0 would have written."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: field for key, field in value.items() if key != "sha256"}))


def test_a_checkpoint_of_before_it_had_a_digest_is_resumed(tmp_path: Path) -> None:
    whole = train(None, 4)
    train(tmp_path, 2)
    without_seal(tmp_path / "step_00000002" / "checkpoint.json")
    again = train(tmp_path, 4, resume=True)
    assert (again.resumed_from, again.losses) == (2, whole.losses)


@pytest.mark.parametrize(
    "change", [{"step": float("inf")}, {"step": 1}, {"shards": [{"file": "x\0", "bytes": 1, "sha256": ""}]}, {"sha257": "0" * 64}]
)
def test_and_refused_where_it_is_damaged(tmp_path: Path, change: dict) -> None:
    train(tmp_path, 2)
    without_seal(tmp_path / "step_00000002" / "checkpoint.json", **change)
    with pytest.raises(CheckpointError, match="damaged|can't be read"):
        CheckpointFolder(tmp_path).verify()


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_reading_executes_nothing(tmp_path: Path) -> None:
    """A shard that is a pickle, sealed as if it had been written so."""
    train(tmp_path / "run", 2)
    folder = tmp_path / "run" / "step_00000002"
    content = pickle.dumps(Bomb(tmp_path / "executed"))
    (folder / "device_0.safetensors").write_bytes(content)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    manifest["shards"][0] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    reseal(folder / "checkpoint.json", shards=manifest["shards"])
    verify_shard(folder, Shard(**manifest["shards"][0]))
    with pytest.raises(CheckpointError, match="device_0.safetensors can't be read"):
        train(tmp_path / "run", 4, resume=True)
    assert not (tmp_path / "executed").exists()
    pickle.loads(content)  # noqa: S301 - it would have
    assert (tmp_path / "executed").exists()


def test_a_shard_that_does_not_come_is_noticed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.make()
    unfinished = folder.begin(1)
    with pytest.raises(FileError, match="a folder that all machines share"):
        folder.complete(unfinished, {"step": 1}, [Shard("device_1.safetensors", 1, "")])


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot make the folder"):
        train(tmp_path / "file", 2)


def test_a_loss_that_is_no_number_ends_the_training_and_is_not_kept(tmp_path: Path) -> None:
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60.0) as executor:
        loaded = placed("branches", "sgd", 2, 1, executor)
        for optimizer in loaded.optimizers.values():
            optimizer.param_groups[0]["lr"] = 1e30
        message = r"the loss of step \d is (nan|inf); choose a smaller --learning_rate; this was step \d: --resume goes on from"
        with pytest.raises(ExecutionError, match=message):
            train_on(TrainedStep(loaded), RunOptions(9, str(tmp_path), 1), TRAINING, lambda _: None)
    assert CheckpointFolder(tmp_path).last() is not None
