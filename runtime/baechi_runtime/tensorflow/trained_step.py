"""A placed step of TensorFlow's, as a training takes it; and what each of its devices has in a checkpoint."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.errors import CheckpointError
from baechi_runtime.files.checkpoint_folder import Shard, another, verify_shard, written_shard
from baechi_runtime.tensorflow.lowering.placed_graph import PlacedVariable
from baechi_runtime.tensorflow.servers.session import PlacedSession


class TrainedSession:
    """See baechi_runtime.drivers.backend.Trained. Variables go by their shared names, those of the optimizer included."""

    random_state = ""
    """Seeds are variables, too: those of Keras's layers."""

    def __init__(self, session: PlacedSession) -> None:
        """`session` is initialised and fed, and returns the loss first."""
        self._session = session

    def begin(self) -> None:
        """Nothing is drawn that is not in a variable."""

    def run(self) -> tuple[float, float]:
        begin = time.perf_counter_ns()
        loss = self._session.run()[0]
        return float(loss), (time.perf_counter_ns() - begin) / 1000

    def save(self, folder: Path) -> list[Shard]:
        """This process writes for all devices, one after the other."""
        shards = []
        for device in range(len(self._session.placed.devices)):
            values = self._session.variables([v.name for v in self._session.placed.variables if v.device == device])
            tensors = {name: np.asarray(value, order="C") for name, value in sorted(values.items())}
            shards.append(written_shard(folder, device, partial(save_file, tensors)))
        return shards

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        for shard in shards:
            verify_shard(checkpoint, shard)
        missing = {v.name: v for v in self._session.placed.variables}
        for shard in shards:
            self._session.initialise(_taken(checkpoint / shard.file, missing))
        if missing:
            raise CheckpointError(f"{checkpoint} has no tensor {min(missing)!r}; it is of another model: choose another --checkpoint")


def _taken(path: Path, missing: dict[str, PlacedVariable]) -> dict[str, np.ndarray]:
    """The file's tensors that are missing, and no longer are."""
    try:
        with safe_open(path, framework="np") as file:
            values = {name: file.get_tensor(name) for name in file.keys() if name in missing}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path} can't be read: {e}; {another(path.parent)}") from e
    for name, value in values.items():
        variable = missing.pop(name)
        dtype = tensorflow().dtypes.as_dtype(variable.dtype).as_numpy_dtype
        if value.shape != variable.shape or value.dtype != dtype:
            raise CheckpointError(
                f"{path}: {name!r} is {value.dtype} of shape {value.shape}, this model's is {np.dtype(dtype)} of shape "
                f"{variable.shape}; give the flags that the training was begun with"
            )
    return values
