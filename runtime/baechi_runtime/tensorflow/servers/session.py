"""A placed graph, loaded into the devices' servers (or this process's logical devices) and run there."""

import contextlib
import ctypes
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.errors import ExecutionError
from baechi_runtime.tensorflow.lowering.placed_graph import PlacedGraph, PlacedVariable
from baechi_runtime.tensorflow.servers.blocking_calls import Calls
from baechi_runtime.tensorflow.servers.devices import Devices

T = TypeVar("T")

_MOST_BYTES_AT_ONCE = 32 * 1024 * 1024
"""Most bytes of first values in one call: they are on the device twice for a moment, and a message holds 2 GiB at most."""
_CLOSING_SECONDS = 10.0
_SEEN_DEAD_SECONDS = 2.0


class PlacedSession:
    """Runs one placed graph. Every call ends in time: it raises ExecutionError where a device died or did not answer, where memory ran
    out (naming device and op), or where an op failed.
    """

    def __init__(self, placed: PlacedGraph, devices: Devices) -> None:
        tf = tensorflow()
        self.placed = placed
        self._devices = devices
        self._calls = Calls(devices.gone, devices.timeout_seconds)
        self._broken = False
        self._session: Any = None
        devices.at_end(self.close)
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(placed.graph_def, name="")
        fetches = [*placed.fetches, *(graph.get_operation_by_name(name) for name in placed.targets)]
        self._session = self._call(lambda: tf.compat.v1.Session(devices.target, graph=graph, config=devices.config()))
        self._step = self._call(lambda: self._session.make_callable(fetches, accept_options=True))

    def initialise(self, values: Mapping[str, np.ndarray]) -> None:
        """Gives variables their values, by shared name; others keep theirs."""
        self._assign([(v, values[v.name]) for v in self.placed.variables if v.name in values])

    def feed(self, inputs: Sequence[np.ndarray]) -> None:
        """Puts the step's inputs where they are read; they stay for all steps from now on."""
        self._assign(list(zip(self.placed.inputs, inputs, strict=True)))

    def _assign(self, pairs: Sequence[tuple[PlacedVariable, np.ndarray]]) -> None:
        for some in _batches(pairs):
            self._call(partial(self._session.run, [v.assign for v, _ in some], {v.value: value for v, value in some}))

    def run(self, inputs: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """One step: the captured function's results, flat. Without `inputs`, on those of the last step."""
        if inputs is not None:
            self.feed(inputs)
        return self._call(lambda: self._step())[: len(self.placed.fetches)]

    def trace(self, inputs: Sequence[np.ndarray] | None = None) -> Any:
        """One step, traced op by op: its RunMetadata."""
        return self.traced(inputs)[1]

    def traced(self, inputs: Sequence[np.ndarray] | None = None) -> tuple[list[np.ndarray], Any]:
        """The same with its results, flat."""
        if inputs is not None:
            self.feed(inputs)
        v1 = tensorflow().compat.v1
        options, metadata = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), v1.RunMetadata()
        found = self._call(lambda: self._step(options=options, run_metadata=metadata))
        return found[: len(self.placed.fetches)], metadata

    def variables(self, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """All variables, or those named, as they are now, by shared name."""
        found: dict[str, np.ndarray] = {}
        for some in _batches([(v, v) for v in self.placed.variables if names is None or v.name in names]):
            values = self._call(partial(self._session.run, [v.read for v, _ in some]))
            found |= dict(zip((v.name for v, _ in some), values, strict=True))
        return found

    def close(self) -> None:
        """Frees the variables and ends the session; where its devices are gone, it is left alone."""
        session, self._session = self._session, None
        if session is None:
            return
        if not self._broken:
            destroy = [v.destroy for v in (*self.placed.variables, *self.placed.inputs)]
            with contextlib.suppress(ExecutionError):
                self._call(lambda: session.run(destroy), _CLOSING_SECONDS)
                self._call(session.close, _CLOSING_SECONDS)
        self._step = None
        if self._broken:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))  # its end would wait for the devices
        self._calls.end()

    def __enter__(self) -> "PlacedSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, function: Callable[[], T], timeout_seconds: float | None = None) -> T:
        errors = tensorflow().errors
        try:
            return self._calls(function, timeout_seconds)
        except ExecutionError:
            self._broken = True
            raise
        except errors.ResourceExhaustedError as e:
            raise ExecutionError(self._out_of_memory(e)) from e
        except errors.OpError as e:
            gone = self._devices.gone(_SEEN_DEAD_SECONDS) if isinstance(e, _lost(errors)) else None
            self._broken = isinstance(e, _lost(errors))
            raise ExecutionError(gone or self._failure(e)) from e

    def _out_of_memory(self, error: Any) -> str:
        """TensorFlow's message has the tensor and the device, and may name the op in brackets."""
        message = str(error)
        device = self._device_in(message)
        op = self._op_in(error)
        wanted = re.search(r"allocating tensor with shape\[([\d,]*)\] and type (\w+)", message)
        what = f" for a {wanted[2]} tensor of {wanted[1] or 'no'} sides" if wanted else ""
        where = f"device {device}" if device is not None else "a device"
        return (
            f"out of memory on {where} in op {op!r}{what}; raise --device_memory, use more devices or a smaller batch, or plan with a "
            "smaller --memory_fraction"
        )

    def _failure(self, error: Any) -> str:
        first = next((line.strip() for line in str(error).splitlines() if line.strip(" =")), type(error).__name__)
        if isinstance(error, tensorflow().errors.DeadlineExceededError):
            return f"a device did not answer within {self._devices.timeout_seconds:g} s; check whether it still runs, or raise --timeout"
        return f"op {self._op_in(error)!r} failed: {first}"

    def _device_in(self, message: str) -> int | None:
        return next((i for i, name in enumerate(self.placed.devices) if name in message), None)

    def _op_in(self, error: Any) -> str:
        """The op of the plan that an error names, or the node."""
        node = error.node_def.name if error.node_def is not None else ""
        named = re.search(r"\{\{node ([^}]+)\}\}", str(error))
        name = node or (named[1] if named else "")
        return self.placed.op_of.get(name, name or "unknown")


def _lost(errors: Any) -> tuple[type[Exception], ...]:
    """Errors of a call whose devices are gone, or do not answer."""
    return errors.UnavailableError, errors.DeadlineExceededError, errors.AbortedError, errors.CancelledError


def _batches(pairs: Sequence[tuple[PlacedVariable, T]]) -> list[list[tuple[PlacedVariable, T]]]:
    batches: list[list[tuple[PlacedVariable, T]]] = []
    size = _MOST_BYTES_AT_ONCE
    for variable, value in pairs:
        if size + variable.bytes > _MOST_BYTES_AT_ONCE:
            batches.append([])
            size = 0
        batches[-1].append((variable, value))
        size += variable.bytes
    return batches
