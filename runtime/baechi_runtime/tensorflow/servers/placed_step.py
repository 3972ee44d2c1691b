"""A captured step on its devices, and the user's variables that it trains."""

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.errors import ExecutionError
from baechi_ext.simulate import Timeline
from baechi_runtime.tensorflow.lowering.live_variables import LiveVariables
from baechi_runtime.tensorflow.servers.devices import Devices
from baechi_runtime.tensorflow.servers.session import PlacedSession

_TIMES = 200


class PlacedStep:
    """Trains the user's variables on the devices. They live there between steps, and are brought home when somebody looks at them."""

    def __init__(self, captured: CapturedFunction, timeline: Timeline, devices: Devices) -> None:
        """`timeline` has the placement, and the order that devices keep to."""
        self.captured = captured
        self.session = PlacedSession.of(captured, timeline, devices)
        self.live = LiveVariables({v.shared_name: v.variable for v in captured.variables}, self._fetch)
        self.times_us: deque[float] = deque(maxlen=_TIMES)
        """Times of the last steps, including what had to be sent first."""
        devices.at_end(self.close)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One step: its results, flat."""
        began = time.perf_counter()
        self._begin()
        results = self.session.run(inputs)
        self.times_us.append((time.perf_counter() - began) * 1e6)
        return results

    def traced(self, inputs: Sequence[np.ndarray]) -> tuple[list[np.ndarray], Any]:
        """The same, traced op by op: its results, and its RunMetadata. It is not timed."""
        self._begin()
        return self.session.traced(inputs)

    def _begin(self) -> None:
        """The devices have the variables' values."""
        if changed := self.live.changes():
            self.session.initialise(changed)
        self.live.leave()

    def returned(self, results: Sequence[Any]) -> Any:
        """The user's step's return value, made from flat results."""
        left = iter(results)
        return tf.nest.map_structure(lambda x: None if x is None else tf.convert_to_tensor(next(left)), self.captured.structured_outputs)

    def close(self) -> None:
        """The variables come home, if the devices still have them, and the devices are free of them."""
        with contextlib.suppress(ExecutionError):
            self.live.bring_all()
        self.session.close()

    def _fetch(self, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        try:
            return self.session.variables(names)
        except ExecutionError as e:
            raise ExecutionError(f"{e}. What was trained since the variables were last looked at is lost; go on from a checkpoint") from e
