"""GPUs as devices of this process: all of a machine's first ones, or parts of the first."""

from typing import Any

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.errors import MissingBackendError, OptionError
from baechi_runtime.tensorflow.servers.devices import Sessions, session_config

_MIB = 1024 * 1024


class Gpus(Sessions):
    """`count` GPUs; with `part_bytes` the first GPU as `count` logical devices, each with so much of its memory.

    To be made before TensorFlow's first use of a GPU. Raises MissingBackendError where there are too few.
    """

    target = ""
    shared_memory = False

    def __init__(self, count: int, *, part_bytes: int | None = None, timeout_seconds: float = 300.0) -> None:
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self.names = tuple(f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(count))
        self._part_mib = None if part_bytes is None else part_bytes // _MIB
        tf = tensorflow()
        found = tf.config.list_physical_devices("GPU")
        needed = count if part_bytes is None else 1
        if len(found) < needed:
            raise MissingBackendError(
                f"--num_gpus={count} asks for {needed} GPU{'s' * (needed > 1)} and TensorFlow finds {len(found)}; use "
                f"--num_devices={count} for CPU workers, or install the GPU build: pip install 'tensorflow[and-cuda]'"
            )
        if self._part_mib is not None:
            part = tf.config.LogicalDeviceConfiguration(memory_limit=self._part_mib)
            try:
                tf.config.set_logical_device_configuration(found[0], [part] * count)
            except RuntimeError as e:
                raise OptionError(f"the GPU is in use already and can't be split any more ({e}); split it when the program begins") from e

    def config(self) -> Any:
        """Ops without a kernel for GPUs run on the host; memory is taken as it is needed, up to a part's limit."""
        config = session_config(self.timeout_seconds)
        config.allow_soft_placement = True
        config.gpu_options.allow_growth = True
        if self._part_mib is not None:
            parts = config.gpu_options.experimental.virtual_devices.add()
            parts.memory_limit_mb.extend([float(self._part_mib)] * len(self.names))
        return config

    def __enter__(self) -> "Gpus":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_sessions()

    def gone(self, within_seconds: float = 0.0) -> None:
        """They end with this process alone."""
