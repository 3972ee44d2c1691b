"""Checkpoints of a placed training: a folder for each, with a safetensors file per device, and checkpoint.json, which seals them.

    FOLDER/step_00000040/device_0.safetensors    the parameters, buffers and optimizer state that live on device 0
                         device_1.safetensors    ...
                         checkpoint.json         the step, all losses, the random state, what is trained, the files' digests, and its own

A checkpoint is written into a folder beside it that gets its name when all is there and on the disk: whatever happens meanwhile, what
counts as a checkpoint is complete. The last field of checkpoint.json is the digest of every byte before it, so that one digest covers all
that is read on resuming. It tells damage, not forgery: who can write the files can seal them again. Tensors go by their names, so a
checkpoint can be taken up with any number of devices and any plan.

Reading executes nothing: safetensors holds numbers, JSON is JSON. (torch.distributed.checkpoint would unpickle its metadata.)
"""

import contextlib
import hashlib
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from baechi_ext.errors import CheckpointError, FileError
from baechi_ext.ir.files import SCHEMA_VERSION, encode_json, make_folder, parse_json, read_bytes, write_bytes

KIND = "baechi checkpoint"
KEPT = 2
"""Complete checkpoints that are kept, the last ones."""
_MANIFEST = "checkpoint.json"
_BESIDE = ".unfinished_"
_SEAL, _END = b',\n"sha256":"', b'"}\n'
"""The bytes around the digest at the end of checkpoint.json."""
_WITHOUT_SEAL = {"schema_version", "kind", "step", "training", "random_state", "losses", "command", "versions", "shards"}
"""All fields of a checkpoint.json of version 0.1.0, which has no digest of its own: with another one a file is a damaged newer one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One device's file."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    losses: tuple[float, ...]
    random_state: str
    training: Mapping[str, Any]
    shards: tuple[Shard, ...]


def written_shard(folder: Path, device: int, write: Callable[[Path], None]) -> Shard:
    """The file of a device, which `write` makes; it is on the disk. Raises FileError where that is not possible."""
    path = folder / f"device_{device}.safetensors"
    try:
        write(path)
        _to_disk(path)
        return Shard(path.name, path.stat().st_size, _digest(path))
    except (OSError, SafetensorError) as e:
        raise FileError(f"cannot write {str(path)!r}: {e}; make room there, or choose another --checkpoint") from e


def verify_shard(checkpoint: Path, shard: Shard) -> None:
    """Raises CheckpointError where a shard is not what was written."""
    path = checkpoint / shard.file
    try:
        found = path.stat()
        same = stat.S_ISREG(found.st_mode) and found.st_size == shard.bytes and _digest(path) == shard.sha256
    except (OSError, ValueError) as e:  # a name with a null byte is a ValueError
        raise CheckpointError(f"{path} can't be read: {getattr(e, 'strerror', None) or e}; {another(checkpoint)}") from e
    if not same:
        raise CheckpointError(f"{path} is damaged: it is not the file that was written; {another(checkpoint)}")


def another(checkpoint: Path) -> str:
    """Says what to do about a checkpoint that can't be used."""
    return f"remove {checkpoint} to go on from the checkpoint before it"


class CheckpointFolder:
    """The checkpoints of one training."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def last(self) -> Checkpoint | None:
        """The checkpoint of the highest step; None where there is none. Raises FileError or CheckpointError where it can't be used."""
        steps = self._steps()
        return None if not steps else _read(steps[max(steps)])

    def verify(self) -> None:
        """Raises what `last` raises, and CheckpointError where a shard of the last checkpoint is not what was written: before anything is
        built that would be trained on from there."""
        found = self.last()
        if found is not None:
            for shard in found.shards:
                verify_shard(found.folder, shard)

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
        write_bytes(unfinished / _MANIFEST, sealed(value))
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


def sealed(value: dict[str, Any]) -> bytes:
    """The content of a checkpoint.json of these fields, with the digest of all of it at its end."""
    head = encode_json(value, compact=True).removesuffix(b"}\n")
    return head + _SEAL + hashlib.sha256(head).hexdigest().encode() + _END


def _read(folder: Path) -> Checkpoint:
    path = folder / _MANIFEST
    content = read_bytes(path, "checkpoint")
    value = parse_json(content, path, "checkpoint")
    _require_sealed(content, value, folder)
    try:
        if value["kind"] != KIND:
            raise CheckpointError(f"{path} is of kind {value['kind']!r}, expected {KIND!r}; check --checkpoint")
        losses, step = tuple(map(float, value["losses"])), int(value["step"])
        shards = tuple(Shard(str(s["file"]), int(s["bytes"]), str(s["sha256"])) for s in value["shards"])
        random_state, training = str(value["random_state"]), dict(value["training"])
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise CheckpointError(f"{path} is damaged ({e!r}); {another(folder)}") from e
    outside = [s.file for s in shards if Path(s.file).name != s.file]
    if outside or len(losses) != step or folder.name != _name(step) or not all(map(math.isfinite, losses)):
        raise CheckpointError(f"{path} is damaged: its fields do not fit together; {another(folder)}")
    return Checkpoint(folder, step, losses, random_state, training, shards)


def _require_sealed(content: bytes, value: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError where checkpoint.json is not what was written, byte by byte. One of version 0.1.0 can't be told."""
    head, seal, digest = content.rpartition(_SEAL)
    if seal and digest == hashlib.sha256(head).hexdigest().encode() + _END:
        return
    if seal or value.keys() - _WITHOUT_SEAL:
        raise CheckpointError(f"{folder / _MANIFEST} is damaged: it is not the file that was written; {another(folder)}")


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    """Flushes a file or folder to the disk, so that what was written there survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(*[OSError] if path.is_dir() else []):  # not every file system can do it for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
