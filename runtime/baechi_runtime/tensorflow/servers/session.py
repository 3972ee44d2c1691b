"""A placed graph, loaded into the devices' servers (or this process's logical devices) and run there."""

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.errors import ExecutionError
from baechi_ext.simulate import Timeline
from baechi_runtime.tensorflow.lowering.placed_graph import PlacedGraph, PlacedVariable, placed_graph
from baechi_runtime.tensorflow.servers.blocking_calls import CLOSING_SECONDS, Calls, leave_open
from baechi_runtime.tensorflow.servers.devices import Devices

T = TypeVar("T")

_MOST_BYTES_AT_ONCE = 32 * 1024 * 1024
"""Most bytes of first values in one call: they are on the device twice for a moment, and a message holds 2 GiB at most."""
_SEEN_DEAD_SECONDS = 2.0


class FailedOpError(ExecutionError):
    """An op failed by what it was given, as it does unplaced; the devices are well."""

    def __init__(self, message: str, error: Exception) -> None:
        super().__init__(message)
        self.error = error
        """TensorFlow's."""


class PlacedSession:
    """Runs one placed graph. Every call ends in time: it raises ExecutionError where a device died or did not answer, where memory ran
    out (naming device and op), or where an op failed.
    """

    timeline: Timeline
    """The plan that it runs; set by `of` alone."""

    def __init__(self, placed: PlacedGraph, devices: Devices) -> None:
        self.placed = placed
        self.devices = devices
        self._calls = Calls(devices.gone, devices.timeout_seconds)
        self._broken = False
        self._session: Any = None
        self._step: Any = None
        devices.at_end(self.close)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        tf, placed = tensorflow(), self.placed
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(placed.graph_def, name="")
        fetches = [*placed.fetches, *(graph.get_operation_by_name(name) for name in placed.targets)]
        self._session = self._call(lambda: tf.compat.v1.Session(self.devices.target, graph=graph, config=self.devices.config()))
        self._step = self._call(lambda: self._session.make_callable(fetches, accept_options=True))

    @classmethod
    def of(cls, captured: CapturedFunction, timeline: Timeline, devices: Devices) -> "PlacedSession":
        """The step, placed as the timeline says; devices keep to its order."""
        ops = [str(op.id) for op in timeline.graph.ops]
        where = dict(zip(ops, timeline.placement, strict=True))
        devices.planned_bytes = timeline.peak_memory_bytes
        session = cls(placed_graph(captured, where, devices.names, order=[ops[v] for v in timeline.started]), devices)
        session.timeline = timeline
        return session

    def initialise(self, values: Mapping[str, np.ndarray]) -> None:
        """Gives variables their values, by shared name; others keep theirs."""
        self._assign([(v, values[v.name]) for v in self.placed.variables if v.name in values])

    def feed(self, inputs: Sequence[np.ndarray]) -> None:
        """Puts the step's inputs where they are read; they stay for all steps from now on."""
        self._assign(list(zip(self.placed.inputs, inputs, strict=True)))

    def _assign(self, pairs: Sequence[tuple[PlacedVariable, np.ndarray]]) -> None:
        run = self._open().run
        for some in _batches(pairs):
            self._call(partial(run, [v.assign for v, _ in some], {v.value: value for v, value in some}))

    def run(self, inputs: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """One step: the captured function's results, flat. Without `inputs`, on those of the last step."""
        if inputs is not None:
            self.feed(inputs)
        return self._call(lambda: self._step())[: len(self.placed.fetches)]

    def traced(self, inputs: Sequence[np.ndarray] | None = None) -> tuple[list[np.ndarray], Any]:
        """The same, traced op by op, with its RunMetadata."""
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
            values = self._call(partial(self._open().run, [v.read for v, _ in some]))
            found |= dict(zip((v.name for v, _ in some), values, strict=True))
        return found

    def _open(self) -> Any:
        """The session. Raises ExecutionError where it was closed."""
        if self._session is None:
            raise ExecutionError("the devices that had the variables are gone")
        return self._session

    def close(self) -> None:
        """Frees the variables and ends the session; where its devices are gone, it is left alone."""
        session, self._session = self._session, None
        self.devices.not_at_end(self.close)
        if session is not None and not self._broken:
            destroy = [v.destroy for v in (*self.placed.variables, *self.placed.inputs)]
            with contextlib.suppress(ExecutionError):
                self._call(lambda: session.run(destroy), CLOSING_SECONDS)
                self._call(session.close, CLOSING_SECONDS)
        self._step = None
        if session is not None and self._broken:
            leave_open(session)
        self._calls.end()

    def __enter__(self) -> "PlacedSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, function: Callable[[], T], timeout_seconds: float | None = None) -> T:
        errors = tensorflow().errors
        lost = errors.UnavailableError, errors.DeadlineExceededError, errors.AbortedError, errors.CancelledError
        try:
            return self._calls(function, timeout_seconds)
        except ExecutionError:
            self._broken = True
            raise
        except errors.OpError as e:
            self._broken = isinstance(e, lost)
            gone = self.devices.gone(_SEEN_DEAD_SECONDS) if self._broken else None
            if self._broken or isinstance(e, errors.ResourceExhaustedError):
                raise ExecutionError(gone or self._failure(e)) from e
            raise FailedOpError(self._failure(e), e) from e

    def _failure(self, error: Any) -> str:
        """A message for TensorFlow's error, which names the device and, with its node or in brackets, the op."""
        errors, message = tensorflow().errors, str(error)
        if isinstance(error, errors.DeadlineExceededError):
            return f"a device did not answer within {self.devices.timeout_seconds:g} s; check whether it still runs, or raise --timeout"
        named = re.search(r"\{\{node ([^}]+)\}\}", message)
        node = (error.node_def.name if error.node_def is not None else "") or (named[1] if named else "")
        op = self.placed.op_of.get(node, node or "unknown")
        if not isinstance(error, errors.ResourceExhaustedError):
            first = next((line.strip() for line in message.splitlines() if line.strip(" =")), type(error).__name__)
            return f"op {op!r} failed: {first}"
        device = next((f"device {i}" for i, name in enumerate(self.placed.devices) if name in message), "a device")
        wanted = re.search(r"allocating tensor with shape\[([\d,]*)\] and type (\w+)", message)
        what = f" for a {wanted[2]} tensor of {wanted[1] or 'no'} sides" if wanted else ""
        advice = "raise --device_memory, use more devices or a smaller batch, or plan with a smaller --memory_fraction"
        return f"out of memory on {device} in op {op!r}{what}; {advice}"


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
