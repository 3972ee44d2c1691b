"""A PyTorch device's part of a checkpoint: its shard, written and read."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import CheckpointError
from baechi_runtime.files.checkpoint_folder import Shard, another, written_shard

_STATE, _OPTIMIZER = "state/", "optimizer/"
Optimizers = Mapping[str, torch.optim.Optimizer]


def homes(binding: Binding, placement: Sequence[int]) -> dict[str, int]:
    """Parameter or buffer -> the device where it lives: that of its readers, or where nobody reads it, of the op that writes it. Those
    that the step neither reads nor writes are left out."""
    found = {name: placement[reader] for name, reader in binding.state_reader.items()}
    for op, writes in binding.buffer_writes.items():
        for name, _ in writes:
            found.setdefault(name, placement[op])
    return found


def owned(binding: Binding, placement: Sequence[int], devices: int) -> list[list[str]]:
    """The names of the parameters and buffers that live on each device, in the same order in every process."""
    where = homes(binding, placement)
    return [[name for name, home in where.items() if home == device] for device in range(devices)]


def living_on(device: int, where: Mapping[str, int], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of `state` that belongs in a device's shard: what lives there, and with device 0 what lives nowhere."""
    return {name: value for name, value in state.items() if where.get(name, 0) == device}


def write_shard(folder: Path, device: int, state: Mapping[str, Tensor], optimizers: Optimizers) -> Shard:
    """Writes what lives on a device, with the state of its parameters' optimizers. Raises FileError where that is not possible."""
    tensors = {_STATE + name: value for name, value in state.items()}
    for name in optimizers.keys() & state.keys():
        slots = optimizers[name].state.get(state[name], {})
        tensors |= {f"{_OPTIMIZER}{name}/{slot}": value for slot, value in slots.items() if isinstance(value, Tensor)}
    return written_shard(folder, device, lambda path: save_file({name: _plain(tensors[name]) for name in sorted(tensors)}, path))


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
            raise CheckpointError(f"{checkpoint / file} can't be read: {e}; {another(checkpoint)}") from e
    if missing:
        raise CheckpointError(f"{checkpoint} has no tensor {min(missing)!r}; it is of another model: choose another --checkpoint")
    for optimizer in dict.fromkeys(optimizers.values()):
        names = [name for name, own in optimizers.items() if own is optimizer]  # in the order of its parameters
        kept = optimizer.state_dict()
        try:
            optimizer.load_state_dict({**kept, "state": {i: slots[name] for i, name in enumerate(names) if slots[name]}})
        except (LookupError, ValueError, TypeError, RuntimeError, AttributeError) as e:  # each optimizer looks at its own
            what = ", ".join(map(repr, names))
            raise CheckpointError(f"{checkpoint}: the optimizer can't take up its state of {what} ({e!r}); {another(checkpoint)}") from e


def _take(into: Tensor, value: Tensor, what: str) -> None:
    if value.shape != into.shape or value.dtype != into.dtype:
        raise CheckpointError(
            f"{what} is {value.dtype} of shape {tuple(value.shape)}, this model's is {into.dtype} of shape {tuple(into.shape)}; "
            "give the flags that the training was begun with"
        )
    with torch.no_grad():
        into.copy_(value)


def _plain(value: Tensor) -> Tensor:
    """On the host, dense, in a storage of its own."""
    here = value.detach().to("cpu").contiguous()
    return here if here.untyped_storage().nbytes() == here.numel() * here.element_size() else here.clone()
