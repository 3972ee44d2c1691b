"""Checkpoints of a placed training: a folder for each, with a safetensors file per device, and checkpoint.json, which seals them.

    FOLDER/step_00000040/device_0.safetensors    the parameters, buffers and optimizer state that live on device 0
                         device_1.safetensors    ...
                         checkpoint.json         the step, all losses, the random state, what is trained, and the files' digests

A checkpoint is written into a folder beside it that gets its name when all is there and on the disk: whatever happens meanwhile, what
counts as a checkpoint is complete. Tensors go by their names, so a checkpoint can be taken up with any number of devices and any plan.

Reading executes nothing: safetensors holds numbers, JSON is JSON. (torch.distributed.checkpoint would unpickle its metadata.)
"""

import contextlib
import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import CheckpointError, FileError
from baechi_ext.ir.files import SCHEMA_VERSION, make_folder, read_json, write_json

KIND = "baechi checkpoint"
KEPT = 2
"""Complete checkpoints that are kept, the last ones."""
_STATE, _OPTIMIZER = "state/", "optimizer/"
_MANIFEST = "checkpoint.json"
_BESIDE = ".unfinished_"
Optimizers = Mapping[str, torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Shard:
    """One device's file."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one."""

    folder: Path
    step: int
    losses: tuple[float, ...]
    random_state: str
    training: Mapping[str, Any]
    shards: tuple[Shard, ...]


def homes(binding: Binding, placement: Sequence[int]) -> dict[str, int]:
    """Parameter or buffer -> the device where it lives: that of its readers, or where nobody reads it, of the op that writes it. Those
    that the step neither reads nor writes are left out."""
    found = {name: placement[reader] for name, reader in binding.state_reader.items()}
    for op, writes in binding.buffer_writes.items():
        for name, _ in writes:
            found.setdefault(name, placement[op])
    return found


def living_on(device: int, where: Mapping[str, int], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of `state` that belongs in a device's shard: what lives there, and with device 0 what lives nowhere."""
    return {name: value for name, value in state.items() if where.get(name, 0) == device}


def write_shard(folder: Path, device: int, state: Mapping[str, Tensor], optimizers: Optimizers) -> Shard:
    """Writes what lives on a device, with the state of its parameters' optimizers. Raises FileError where that is not possible."""
    tensors = {_STATE + name: value for name, value in state.items()}
    for name in optimizers.keys() & state.keys():
        for slots in optimizers[name].state.values():
            tensors |= {f"{_OPTIMIZER}{name}/{slot}": value for slot, value in slots.items() if isinstance(value, Tensor)}
    path = folder / f"device_{device}.safetensors"
    try:
        save_file({name: _plain(tensors[name]) for name in sorted(tensors)}, path)
        _to_disk(path)
        return Shard(path.name, path.stat().st_size, _digest(path))
    except (OSError, SafetensorError) as e:
        raise FileError(f"cannot write {str(path)!r}: {e}; make room there, or choose another --checkpoint") from e


def read_shards(checkpoint: Path, files: Iterable[str], state: Mapping[str, Tensor], optimizers: Optimizers) -> None:
    """Fills `state`, and the optimizers' state, from the shards that have them.

    Raises CheckpointError where a shard can't be read, or has no tensor of that name and shape.
    """
    missing = set(state)
    slots: dict[str, dict[str, Tensor]] = {name: {} for name in optimizers}
    for file in files:
        try:
            with safe_open(checkpoint / file, framework="pt", device="cpu") as shard:
                for key in shard.keys():  # noqa: SIM118 - no dict
                    if key.startswith(_STATE) and (name := key.removeprefix(_STATE)) in missing:
                        _take(state[name], shard.get_tensor(key), f"{checkpoint / file}: {name!r}")
                        missing.remove(name)
                    elif key.startswith(_OPTIMIZER):
                        name, _, slot = key.removeprefix(_OPTIMIZER).rpartition("/")
                        if name in slots:
                            slots[name][slot] = shard.get_tensor(key)
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{checkpoint / file} can't be read: {e}; {_another(checkpoint)}") from e
    if missing:
        raise CheckpointError(f"{checkpoint} has no tensor {min(missing)!r}; it is of another model: choose another --checkpoint")
    for name, optimizer in optimizers.items():
        kept = optimizer.state_dict()
        optimizer.load_state_dict({**kept, "state": {0: slots[name]} if slots[name] else {}})


def _take(into: Tensor, value: Tensor, what: str) -> None:
    if value.shape != into.shape or value.dtype != into.dtype:
        raise CheckpointError(
            f"{what} is {value.dtype} of shape {tuple(value.shape)}, this model's is {into.dtype} of shape {tuple(into.shape)}; "
            "give the flags that the training was begun with"
        )
    with torch.no_grad():
        into.copy_(value)


def verify_shard(checkpoint: Path, shard: Shard) -> None:
    """Raises CheckpointError where a shard is not what was written."""
    path = checkpoint / shard.file
    try:
        same = path.stat().st_size == shard.bytes and _digest(path) == shard.sha256
    except OSError as e:
        raise CheckpointError(f"{path} can't be read: {e.strerror}; {_another(checkpoint)}") from e
    if not same:
        raise CheckpointError(f"{path} is damaged: it is not the file that was written; {_another(checkpoint)}")


def _another(checkpoint: Path) -> str:
    return f"remove {checkpoint} to go on from the checkpoint before it"


class CheckpointFolder:
    """The checkpoints of one training."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def last(self) -> Checkpoint | None:
        """The checkpoint of the highest step; None where there is none. Raises FileError or CheckpointError where it can't be used."""
        steps = self._steps()
        return None if not steps else _read(steps[max(steps)])

    def make(self) -> None:
        """Makes the folder if need be, and clears away what an interrupted run left unfinished. Raises FileError."""
        make_folder(self.folder)
        for path in self.folder.glob(f"{_BESIDE}*"):
            shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int) -> Path:
        """An empty folder for the files of a new checkpoint. Raises FileError."""
        path = self.folder / f"{_BESIDE}{_name(step)}"
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        except OSError as e:
            raise FileError(f"cannot make the folder {str(path)!r}: {e.strerror}; choose another --checkpoint") from e
        return path

    def complete(self, unfinished: Path, checkpoint: Mapping[str, Any], shards: Sequence[Shard]) -> None:
        """Seals what is in `unfinished`, gives it its name, and removes checkpoints that are no longer kept.

        `checkpoint` has the fields of Checkpoint that are neither folder nor shards. Raises FileError; nothing has changed then.
        """
        for shard in shards:
            if not (unfinished / shard.file).is_file():
                raise FileError(
                    f"{shard.file}, which its device has written, is not in {str(unfinished)!r}; --checkpoint has to be a folder that "
                    "all machines share"
                )
        value = {"schema_version": SCHEMA_VERSION, "kind": KIND, **checkpoint, "shards": [asdict(s) for s in shards]}
        write_json(unfinished / _MANIFEST, value, compact=True)
        try:
            _to_disk(unfinished)
            target = self.folder / _name(int(checkpoint["step"]))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(unfinished, target)
            _to_disk(self.folder)
        except OSError as e:
            raise FileError(f"cannot keep the checkpoint {str(unfinished)!r}: {e.strerror}; choose another --checkpoint") from e
        steps = self._steps()
        for step in sorted(steps)[:-KEPT]:
            shutil.rmtree(steps[step], ignore_errors=True)

    @staticmethod
    def drop(unfinished: Path) -> None:
        """Removes what is in the folder that `begin` made: a full disk has room again."""
        shutil.rmtree(unfinished, ignore_errors=True)

    def _steps(self) -> dict[int, Path]:
        try:
            found = [(re.fullmatch(r"step_(\d{8,})", path.name), path) for path in self.folder.iterdir()]
        except FileNotFoundError:
            return {}
        except OSError as e:
            raise FileError(f"cannot read the folder {str(self.folder)!r}: {e.strerror}; check --checkpoint") from e
        return {int(match[1]): path for match, path in found if match and (path / _MANIFEST).is_file()}


def _read(folder: Path) -> Checkpoint:
    value = read_json(folder / _MANIFEST, "checkpoint")
    try:
        if value["kind"] != KIND:
            raise CheckpointError(f"{folder / _MANIFEST} is of kind {value['kind']!r}, expected {KIND!r}; check --checkpoint")
        losses, step = tuple(map(float, value["losses"])), int(value["step"])
        shards = tuple(Shard(str(s["file"]), int(s["bytes"]), str(s["sha256"])) for s in value["shards"])
        random_state, training = str(value["random_state"]), dict(value["training"])
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointError(f"{folder / _MANIFEST} is damaged ({e!r}); {_another(folder)}") from e
    outside = [s.file for s in shards if Path(s.file).name != s.file]
    if outside or len(losses) != step or not all(map(math.isfinite, losses)):
        raise CheckpointError(f"{folder / _MANIFEST} is damaged: its fields do not fit together; {_another(folder)}")
    return Checkpoint(folder, step, losses, random_state, training, shards)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _plain(value: Tensor) -> Tensor:
    """On the host, dense, in a storage of its own."""
    here = value.detach().to("cpu").contiguous()
    return here if here.untyped_storage().nbytes() == here.numel() * here.element_size() else here.clone()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    """What was written there survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError if path.is_dir() else ()):  # not every file system can do it for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
