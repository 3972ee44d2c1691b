"""The user's training step, placed: which calls run placed, which as they are, and what is captured, placed and verified when.

The first call is captured, profiled and placed. Arguments of other shapes run as they are until they come twice in a row; then they are
captured too, and placed as the first ones were if they have the same ops. So a smaller last batch runs as it is.
"""

import io
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from baechi_ext.capture.tensorflow_graph import CapturedFunction, capture_function, capture_kept_trace
from baechi_ext.capture.tensorflow_private import is_recorded, keeps_trace
from baechi_ext.capture.tensorflow_refusals import numbers_outside, require_unchanged
from baechi_ext.errors import BaechiError, CaptureError, ExecutionError, ParityError
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.generators import python_generators_kept
from baechi_runtime.measure.lead import Lead
from baechi_runtime.measure.turns import PLACED, PLAIN, Turns
from baechi_runtime.report.call_report import OTHER_SHAPES, PLAIN_TURN
from baechi_runtime.report.progress import progress
from baechi_runtime.tensorflow.calls.placing import opened, place_step, shared_devices
from baechi_runtime.tensorflow.lowering.live_variables import LiveVariables, bring_home, others_wait
from baechi_runtime.tensorflow.measure import load_of_others
from baechi_runtime.tensorflow.parity import Verification, as_captured, draws_anew, perturbed, require_no_sequence, results_of
from baechi_runtime.tensorflow.servers.devices import Devices
from baechi_runtime.tensorflow.servers.session import FailedOpError, PlacedSession
from baechi_runtime.tensorflow.servers.step_recorder import RUNS, WARM_UP

EAGERLY = "tf.config.run_functions_eagerly has them run as Python"
RECORDED = "a GradientTape around the call needs to see what it computes"
MOST_SHAPES = 8
"""Shapes of the arguments that are captured; further ones run as they are."""
_OF_PARTS = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)
"""Kinds of arguments that are several tensors each."""
_running = threading.local()
_due: deque[Callable[[], None]] = deque()
"""Calls to make before another step is placed."""


def is_running() -> bool:
    """True if this thread is in a call of a placed step."""
    return getattr(_running, "now", False)


@contextmanager
def running() -> Iterator[None]:
    """Within, calls of tf.functions are a placed step's own affair."""
    outside, _running.now = is_running(), True
    try:
        yield
    finally:
        _running.now = outside


def when_gone(owner: Any, steps: Mapping[Any, "PlacedStep"], do: Callable[[], None]) -> None:
    """Has `do` called, which may not refer to the owner, before another step is placed than the owner's, who is gone by then. Not at
    once: Python may collect the owner amid anything. The timing of these steps is left to others at once."""
    weakref.finalize(owner, _leave, steps, do).atexit = False


def _leave(steps: Mapping[Any, "PlacedStep"], do: Callable[[], None]) -> None:
    for step in steps.values():
        step.turns.leave()
    _due.append(do)


@dataclass(frozen=True)
class Arguments:
    """Arrays, and what stands around them."""

    inputs: tuple[np.ndarray, ...]
    key: tuple[Any, ...]
    """Equal for calls that one graph computes. It keeps the objects among them, so that no other one is ever taken for one of these."""
    fill: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    """Positional and keyword arguments with other values in place of the arrays."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments":
        """Raises CaptureError for what is no dense tensor."""
        leaves = tf.nest.flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, _OF_PARTS):
                advice = "pass dense ones (ragged.to_tensor(), tf.sparse.to_dense)"
                raise CaptureError(f"an argument of the training step is a {type(leaf).__name__}, which can't be placed; {advice}")
            if isinstance(leaf, tf.Tensor) and leaf.dtype in (tf.variant, tf.resource):
                advice = "use it outside of the step, and pass what was read"
                raise CaptureError(f"an argument of the training step is a tensor of {leaf.dtype.name}s, which can't be placed; {advice}")
        where = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, (tf.Tensor, np.ndarray, np.generic)))
        inputs = tuple(np.asarray(leaves[i]) for i in where)
        fixed = tuple(_fixed(leaf) for i, leaf in enumerate(leaves) if i not in where)
        structure = str(tf.nest.map_structure(lambda _: 0, (args, kwargs)))

        def fill(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            filled = list(leaves)
            for i, value in zip(where, values, strict=True):
                filled[i] = value
            return tf.nest.pack_sequence_as((args, kwargs), filled)

        return cls(inputs, (structure, where, fixed, tuple((i.shape, i.dtype.str) for i in inputs)), fill)


def _fixed(value: Any) -> Any:
    """The key of an argument that is no array: numbers and text by type and value, other objects by identity."""
    return (type(value), value) if isinstance(value, (int, float, str, np.generic, type(None))) else _Same(value)


class _Same:
    """Equal where it is the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def call_of(name: str, python: Callable[..., Any], given: Arguments) -> Callable[..., Any]:
    """A call of a training step, as a function of its arrays alone."""

    def step(*inputs: tf.Tensor) -> Any:
        args, kwargs = given.fill(inputs)
        return python(*args, **kwargs)

    step.__name__ = name
    return step


@contextmanager
def traced_once_more(name: str) -> Iterator[io.StringIO]:
    """Within, Python code that the step has run already, or will, prints nowhere but into this, and draws not from Python's generators."""
    with progress(f"capturing {name}"), python_generators_kept(), redirect_stdout(io.StringIO()) as printed:
        yield printed


def captured_call(
    name: str, python: Callable[..., Any], ordinary: Callable[..., Any], given: Arguments, specs: Sequence[Any] | None = None
) -> CapturedFunction:
    """The call, captured: the trace that `ordinary` keeps where it keeps one, or makes for arguments of these specs. Raises CaptureError
    where it can't be, or changes what is outside of it meanwhile."""
    if keeps_trace(ordinary):
        with progress(f"capturing {name}"):
            tensors = [tf.constant(i) for i in given.inputs]
            args, kwargs = given.fill(tensors)
            if (found := capture_kept_trace(ordinary, args, kwargs, tensors, name, specs)) is not None:
                return found
    with traced_once_more(name) as printed:
        shapes = [tf.TensorSpec(i.shape, i.dtype) for i in given.inputs]
        found = capture_function(call_of(name, python, given), shapes, wrapped=python, name=name)
    if not keeps_trace(ordinary):
        require_unchanged(f"the training step {name}", {}, {}, printed.getvalue())
    return found


@dataclass(frozen=True)
class Settings:
    """Settings for placing steps; devices are started at the first call."""

    request: TrainRequest
    """Where it keeps a folder, some steps of the first shape are traced."""
    verify_steps: int = 2
    fallback: bool = False
    keep_placed: bool = False
    """Placed steps alone run, whether or not they are faster."""


class PlacedStep:
    """Calls with arguments of one shape: they train the user's variables on the devices.

    The variables live there between steps, and are brought home when somebody looks at them.
    """

    def __init__(self, captured: CapturedFunction, timeline: Timeline, devices: Devices, turns: Turns, *, traces: bool) -> None:
        """`timeline` has the placement, and the order that devices keep to; `traces`: some steps are traced."""
        self.captured = captured.without_code()  # the devices keep this, and the step may be a method of an object that is gone
        self.session = PlacedSession.of(captured, timeline, devices)
        self.live = LiveVariables({v.shared_name: v.variable for v in captured.variables}, self._fetch)
        self.turns, self.mode = turns, PLACED
        """See Lead."""
        self._was_plain = False
        """True if the step before ran as it is, in its turn."""
        self.verification = Verification()
        self.calls = 0
        """Placed steps so far."""
        self.draws = draws_anew(captured)
        """True if nothing can be compared."""
        self.traces: list[Any] | None = [] if traces else None
        """RunMetadata of steps; None where none is traced."""
        self._devices = devices
        devices.at_end(self.close)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One step: its results, flat."""
        self._begin()
        return self.session.run(inputs)

    def run_unverified(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The same, counted and timed. Those behind a warm-up that are traced compute what all others do, and are not timed."""
        self.calls += 1
        self._begin()
        if self.calls == 1:
            self.turns.disturb_all()  # the servers have yet to set the step up
        if self._was_plain:
            self.turns.prepared()  # in further placed steps the variables are there
        self._was_plain = False
        if self.traces is None or not WARM_UP < self.calls - self.verification.steps <= WARM_UP + RUNS:
            return self.session.run(inputs)
        self.turns.disturb_all()
        results, trace = self.session.traced(inputs)
        self.traces.append(trace)
        return results

    def _begin(self) -> None:
        """The devices have the variables' values."""
        if changed := self.live.changes():
            self.session.initialise(changed)
        self.live.leave()

    def begin_plain(self) -> None:
        """The variables are here, whoever had them, for a step that runs as it is in its turn."""
        bring_home(v.variable for v in self.captured.variables)
        if not self._was_plain:
            self.turns.prepared()  # in further plain steps they are here
        self._was_plain = True

    def returned(self, results: Sequence[Any]) -> Any:
        """The user's step's return value, made from flat results."""
        left = iter(results)

        def value(x: Any) -> Any:
            return None if x is None else tf.convert_to_tensor(next(left))

        return tf.nest.map_structure(value, self.captured.structured_outputs, expand_composites=True)

    def close(self) -> None:
        """The variables come home, if the devices still have them, and the devices are free of them; steps of others may be timed."""
        self.turns.leave()
        with suppress(ExecutionError):
            self.live.bring_all()
            self.live.forget()  # only now: what is lost with its devices is not taken for what is here
        self.session.close()
        self._devices.not_at_end(self.close)

    def _fetch(self, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        try:
            return self.session.variables(names)
        except ExecutionError as e:
            raise ExecutionError(f"{e}. What was trained since the variables were last looked at is lost; go on from a checkpoint") from e


def close(steps: Mapping[Any, PlacedStep]) -> None:
    """Closes all of them."""
    for step in steps.values():
        step.close()


class PlacedFunction:
    """Stands in for a training step: `ordinary` runs it as it is, a function or tf.function, which is what is captured."""

    def __init__(self, name: str, ordinary: Callable[..., Any], settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.load = load_of_others(opened, one_machine=settings.request.cluster_hosts is None)
        self.steps: dict[Any, PlacedStep] = {}
        self.placement: Placement | None = None
        """The first shape's placement, which all calls with its ops have."""
        self.ahead: dict[Any, tuple[CapturedFunction, Placement]] = {}
        """Calls that are captured and placed ahead, by the keys of their arguments."""
        self.interrupted: Placement | None = None
        """The placement that the first shape's search had found when it was interrupted; None once `placement` is there."""
        self.refusal = ""
        """Why calls run as they are for good: placing does not pay, or can't be done. Empty while they may run placed."""
        self.lead = self._new_lead()
        self.differs = False
        """True once a verified step was not the step as it is."""
        self.unplaced: Counter[str] = Counter()
        """Why calls ran as they are, and how many."""
        self.ordinary = ordinary
        self.specs: Sequence[Any] | None = None
        """Those of the arguments, where they are known ahead: `ordinary` is traced once for all shapes that fit."""
        self._last: Any = None
        self._declined: set[Any] = set()
        """Shapes that are not worth splitting."""

    @property
    def python(self) -> Callable[..., Any]:
        """The Python function of the step."""
        return getattr(self.ordinary, "python_function", self.ordinary)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with running():
            try:
                if not (self.refusal or tf.executing_eagerly()):
                    advice = "call it from Python, and put parallelize above tf.function"
                    raise CaptureError(f"the placed step {self.name} is called inside a tf.function, or is one; {advice}")
                if self.refusal or is_recorded():
                    return self._as_it_is(args, kwargs, RECORDED)
                if tf.config.functions_run_eagerly():
                    return self._as_it_is(args, kwargs, EAGERLY)
                return self._run(self.at_numbers(Arguments.of(args, kwargs)), args, kwargs)
            except CaptureError as e:
                self.refuse(e)
                return self._as_it_is(args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> bool:
        """Places a first call ahead of it; False where it would run as it is, and all that come after it."""
        with running():
            try:
                given = self.at_numbers(Arguments.of(args, kwargs))
                if not (self.refusal or given.key in self.steps or given.key in self._declined):
                    self._placed(given)
            except CaptureError as e:
                self.refuse(e)
        return not self.refusal

    def refuse(self, error: CaptureError) -> None:
        """Goes on unplaced; raises the error where that is not wanted."""
        if not self.settings.fallback:
            raise error
        self._go_on_unplaced(error)

    def unplace(self, reason: str = "it was unplaced") -> Callable[..., Any]:
        """The ordinary step; this one runs as it from now on. The variables are back, and the devices are free of them."""
        self.refusal = self.refusal or reason
        close(self.steps)
        return self.ordinary

    def end(self) -> None:
        """Lets go of all that was captured and placed: nobody calls the step any more."""
        self.unplace()
        for kept in (self.steps, self.ahead, self._declined):
            kept.clear()
        self.lead = self._new_lead()
        self.placement = self.interrupted = self._last = None

    def _new_lead(self) -> Lead:
        # A step waits for its results, so there is nothing else to wait for.
        return Lead(tuple, verify_steps=self.settings.verify_steps, keep_placed=self.settings.keep_placed)

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = OTHER_SHAPES) -> Any:
        self.lead.turns.disturbed()
        self.unplaced[self.refusal or reason] += 1
        if not (tf.executing_eagerly() or keeps_trace(self.ordinary)):
            return tf.function(self.ordinary)(*args, **kwargs)  # AutoGraph, which the function around has, does not look into this call
        return self.ordinary(*args, **kwargs)

    def _run(self, given: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self.steps.get(given.key)
        again, self._last = given.key == self._last, given.key
        left = given.key in self._declined or len(self.steps) == MOST_SHAPES
        at_once = given.key in self.ahead or not (self.steps or self._declined)
        if step is None and (left or not (again or at_once)):
            return self._as_it_is(args, kwargs)
        if step is None:
            try:
                step = self._placed(given)
            except FailedOpError as e:
                returned = self._as_it_is(args, kwargs)  # raises TensorFlow's own error for what it was given; a later call is placed
                if not self.settings.fallback:
                    raise
                self._go_on_unplaced(e)
                return returned
        if step is None:
            return self._as_it_is(args, kwargs)
        step.live.require_unread(self.name)
        with others_wait():
            if self.lead.begin_step(step) == PLAIN:
                self._pause(step.turns.why_plain)
                return self._as_it_is(args, kwargs)
            if step.mode == PLAIN:
                step.begin_plain()
                self.unplaced[PLAIN_TURN] += 1
                return self.ordinary(*args, **kwargs)
            if step.calls < self.settings.verify_steps and not step.draws:
                self.lead.disturb()
                return self._verified(step, given, args, kwargs)
            try:
                return step.returned(step.run_unverified(given.inputs))
            except FailedOpError as e:
                self.lead.disturb()
                raise e.error from None  # as the step itself raises it

    def at_numbers(self, given: Arguments) -> Arguments:
        """The same, and a key of their own for each state of the numbers that a plain function reads outside of it. A tf.function keeps the
        trace that it has for arguments, whatever changed since."""
        if keeps_trace(self.ordinary):
            return given
        numbers = tuple((name, _fixed(value)) for name, value in sorted(numbers_outside(self.python).items()))
        return replace(given, key=(*given.key, numbers))

    def capture(self, given: Arguments) -> CapturedFunction:
        """The call with these arguments. Raises CaptureError."""
        return captured_call(self.name, self.python, self.ordinary, given, self.specs)

    def _placed(self, given: Arguments) -> PlacedStep | None:
        """Captures these arguments, and places the step; None where it is better left as it is."""
        self.lead.disturb()
        while _due:
            _due.popleft()()
        first = not (self.steps or self._declined)
        captured, placement = self.ahead.get(given.key) or (self.capture(given), self.placement)
        require_no_sequence(self.name, captured.graph_def)
        if placement is None or captured.graph.index != placement.graph.index:
            if first and self.ahead:
                sys.stderr.write(f"baechi: {self.name} is called with other shapes or types than it was planned for, and planned anew\n")
            placement = place_step(self.settings.request, captured, given.inputs)
        if placement.result.interrupted:
            self.interrupted = None if self.placement else placement
            raise KeyboardInterrupt
        self.placement, self.interrupted = placement if first else self.placement, None
        if self.settings.request.plan.method == "auto" and not placement.result.splits:
            self._declined.add(given.key)
            self.refusal = "" if self.steps or self.ahead.keys() - {given.key} else placement.result.why_whole
            return None
        request = self.settings.request
        devices, traces = shared_devices(request)[1], first and request.out is not None
        turns = Turns(alone=self.settings.keep_placed)
        self.steps[given.key] = PlacedStep(captured, placement.result.timeline, devices, turns, traces=traces)
        return self.steps[given.key]

    def _verified(self, step: PlacedStep, given: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, placed, and as it is from the same state."""
        captured, verification = step.captured, step.verification
        # A trace is kept, whatever changed since in Python. What was captured has to agree with it, and not with how a new one would be.
        own = self.ordinary if keeps_trace(self.ordinary) else self.python
        plain = captured.unplaced if captured.kept else tf.function(call_of(self.name, own, given))
        before = captured.values()
        returned = self.ordinary(*args, **kwargs)
        expected = results_of(returned) | captured.values()

        def again(seed: int | None) -> dict[str, np.ndarray]:
            step.live.forget()
            captured.assign({n: perturbed(x, seed) for n, x in before.items()})
            with as_captured():
                return results_of(plain(*(tf.constant(perturbed(x, seed)) for x in given.inputs))) | captured.values()

        try:
            captured.assign(before)
            found = step.run(given.inputs)
            actual = step.session.variables()
            verification.compare(expected, actual | results_of(found), again)
        except BaseException as e:  # an interrupt, too, leaves the variables as they are unplaced
            step.live.forget()
            captured.assign(expected)
            if not self.settings.fallback or not isinstance(e, (ParityError, FailedOpError)):
                raise
            self._go_on_unplaced(e)
            return returned
        step.live.leave()  # what perturbed steps made of the variables here is nobody's
        step.calls += 1
        return step.returned(found)

    def _pause(self, why: str) -> None:
        self.refusal = why
        self._let_go(f"{self.name} runs as it is: {why}")

    def _go_on_unplaced(self, error: BaechiError) -> None:
        self.refusal, self.differs = str(error), isinstance(error, ParityError)
        self._let_go(f"{self.name} goes on unplaced: {error}")

    def _let_go(self, why: str) -> None:
        close(self.steps)
        with suppress(OSError, ValueError):  # closed, or nobody reads it: the training goes on
            sys.stderr.write(f"baechi: {why}\n")

