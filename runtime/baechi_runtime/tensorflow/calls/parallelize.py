"""Placing a training step in the caller's own loop: `baechi_ext.parallelize` of a function, a tf.function or a Keras model; or planning its
call before it runs, and placing it by a plan that is there already: `baechi_ext.plan`."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import keras

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.cost import attach_costs
from baechi_ext.errors import MismatchError, OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.numbers import bytes_of, device_count
from baechi_ext.ir.plan import Plan
from baechi_runtime.drivers.call_options import chosen, require_sound
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest, WorkerKind
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.tensorflow.calls.call_report import report_of
from baechi_runtime.tensorflow.calls.keras_fit import (
    batch_of,
    name_of_step,
    place_fit,
    require_placeable,
    step_of_fit,
    train_step_of,
    unplace_fit,
)
from baechi_runtime.tensorflow.calls.placed_function import Arguments, PlacedFunction, Settings, close, running, when_gone
from baechi_runtime.tensorflow.calls.placing import place_step
from baechi_runtime.tensorflow.coarse import COARSE, begins_coarse


@dataclass(frozen=True)
class ParallelizeOptions:
    """The options of `parallelize` for TensorFlow, with their defaults; baechi_ext.options says what each is."""

    devices: int = 2
    method: str = "auto"
    verify_steps: int = 2
    fallback: bool = False
    keep_placed: bool = False
    device_memory: int | str | None = None
    time_limit: float | None = None
    seed: int = 0
    cluster: Cluster | None = None
    pins: Sequence[str] = ()
    workers: WorkerKind = "process"
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Raises OptionError for what would fail in a training call."""
        require_sound(self.verify_steps, self.cluster)

    def request(self, name: str) -> TrainRequest:
        """The options as a run's request. Raises OptionError for an unknown method or kind of workers, and what is not a pin."""
        return TrainRequest(
            model=name,
            plan=self.begun(PlanRequest.of(self.method, pins=self.pins, seed=self.seed, time_limit=self.time_limit)),
            num_devices=device_count(self.devices),
            workers=self.workers,
            cluster=self.cluster,
            device_memory=None if self.device_memory is None else bytes_of(self.device_memory, "device_memory"),
            timeout_seconds=self.timeout_seconds,
            framework="tensorflow",
        )

    def begun(self, plan: PlanRequest) -> PlanRequest:
        """The request as a plan for workers of this kind begins."""
        coarse = self.workers == "process" and begins_coarse(plan.method)
        return replace(plan, grouper=COARSE[0], placer_type=COARSE[1]) if coarse else plan

    def settings(self, name: str) -> Settings:
        return Settings(self.request(name), self.verify_steps, self.fallback, self.keep_placed)


@dataclass(frozen=True)
class PlannedCall:
    """A call of a training step, captured; the step itself runs as it is."""

    step: PlacedFunction
    given: Arguments
    captured: CapturedFunction
    model: keras.Model | None = None
    """The model whose fit makes the call."""
    train_function: Any = None
    """Keras's own; another compile replaces it."""

    @classmethod
    def of(cls, step: PlacedFunction, given: Arguments, model: keras.Model | None = None) -> "PlannedCall":
        """Raises CaptureError where the call can't be placed."""
        with running():
            given = step.at_numbers(given)
            return cls(step, given, step.capture(given), model, None if model is None else model.train_function)


def plan_call(target: Any, example_inputs: Any, options: ParallelizeOptions) -> tuple[PlannedCall, OpGraph, Placement]:
    """The call of a training step, or of a Keras model's, with these inputs, its graph with the costs of devices side by side, and its
    plan. Variables keep their values.

    Raises OptionError for what is no step, CaptureError where the call can't be placed, and what placing raises.
    """
    if isinstance(target, keras.Model):
        require_placeable(target)
        if not target.compiled:
            raise OptionError(f"{target.name} has no training step before compile(optimizer, loss); call that, or plan a step of your own")
        target.make_train_function()
        call = PlannedCall.of(_step_of(target, options, train_step_of(target)), Arguments.of((batch_of(example_inputs),), {}), target)
    else:
        call = PlannedCall.of(_unplaced_step(target, options), arguments_of(example_inputs))
    with running():
        placement = place_step(call.step.settings.request, call.captured, call.given.inputs)
    several = len(placement.result.plan.cluster) > 1
    graph = placement.graph if placement.profile is None else attach_costs(placement.graph, placement.profile, contended=several)
    return call, graph, functools.reduce(Placement.noting, placement.notes, placement)


def apply_plan(call: PlannedCall, options: ParallelizeOptions, plan: Placement) -> "PlacedTrainStep | keras.Model":
    """The step whose calls run by a plan of what `plan_call` gave, as `parallelize` has them run; or the model, whose fit does. Raises
    MismatchError for a model that was compiled anew, OptionError for one that is placed."""
    step, model = PlacedTrainStep(call.step.unplace(), options, call.step.name), call.model
    step.ahead, step.placement = {call.given.key: (call.captured, plan)}, plan
    if model is None:
        return step
    require_placeable(model)
    if model.train_function is not call.train_function:
        raise MismatchError(f"{model.name} was compiled anew after it was planned; plan it again")
    place_fit(model, partial(_step_of, model, options), step)
    return model


def arguments_of(example_inputs: Any) -> Arguments:
    """A call's arguments: a tuple of them, or a dict of keyword arguments. Raises OptionError for neither, CaptureError for what is no
    dense tensor."""
    if isinstance(example_inputs, Mapping):
        return Arguments.of((), dict(example_inputs))
    if not isinstance(example_inputs, (tuple, list)):
        found = type(example_inputs).__name__
        raise OptionError(f"the inputs of a step are a tuple of arguments, or a dict of keyword arguments, not a {found}")
    return Arguments.of(tuple(example_inputs), {})


def _unplaced_step(target: Any, options: ParallelizeOptions) -> "PlacedTrainStep":
    if isinstance(getattr(target, "__func__", target), PlacedFunction):
        raise OptionError("the training step is placed already; call its unplace() first")
    if not callable(target) or isinstance(target, type):
        raise OptionError(f"a training step is a function or tf.function, not {target!r}")
    return PlacedTrainStep(target, options)


def _step_of(model: keras.Model, options: ParallelizeOptions, train_step: Any) -> "PlacedTrainStep":
    return PlacedTrainStep(train_step, options, name_of_step(model))


class PlacedTrainStep(PlacedFunction):
    """A training step whose calls run placed: a function, or a method of the objects it is looked up in.

    The variables that it trains are the caller's; they live on the devices and come back, up to date, when they are looked at.
    """

    __name__: str

    def __init__(self, target: Callable[..., Any], options: ParallelizeOptions, name: str = "") -> None:
        python = getattr(target, "python_function", target)
        name = name or getattr(python, "__name__", type(target).__name__)
        super().__init__(name, target, options.settings(name))
        when_gone(self, self.steps, partial(close, self.steps))
        functools.update_wrapper(self, python, updated=())
        self._options = options
        self._bound: dict[int, PlacedTrainStep] = {}
        """Those of the objects that there are, by their ids: two that are equal are two."""

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        if id(owner) not in self._bound:
            method, name = self.ordinary.__get__(owner, kind), f"{type(owner).__name__}.{self.__name__}"
            is_method = isinstance(method, MethodType)  # a tf.function keeps no owner
            made = _PlacedMethod(method, self._options, name, self) if is_method else PlacedTrainStep(method, self._options, name)
            self._bound[id(owner)] = made
            weakref.finalize(owner, self._bound.pop, id(owner), None).atexit = False
        bound = self._bound[id(owner)]
        return MethodType(bound, owner) if isinstance(bound, _PlacedMethod) else bound

    @property
    def plan(self) -> Plan | None:
        """The plan of the first call; None before it."""
        return None if self.placement is None else self.placement.result.plan

    def report(self) -> CallReport:
        """Reports what was placed and how long it takes, predicted and measured so far."""
        return report_of(self)


class _PlacedMethod(PlacedTrainStep):
    """The step of one object, which it does not keep: it is bound to that as a method is, and given it in each call."""

    def __init__(self, method: MethodType, options: ParallelizeOptions, name: str, of_all: PlacedTrainStep) -> None:
        super().__init__(method, options, name)
        self.__wrapped__, self._of_all = method.__func__, of_all

    def __call__(self, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        if method is None or method.__self__ is not owner:  # a method that was copied with its object
            return self._of_all.__get__(owner, type(owner))(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def ordinary(self) -> Any:
        return self._method()

    @ordinary.setter
    def ordinary(self, method: Any) -> None:
        self._method = weakref.WeakMethod(method)


def parallelize(target: Any, options: Mapping[str, Any]) -> Any:
    """See `baechi_ext.parallelize`."""
    found = chosen(ParallelizeOptions, options, "parallelize for TensorFlow")
    found.request("")  # what is wrong with the options, told early
    if target is None:
        return lambda target: parallelize(target, options)
    if isinstance(target, keras.Model):
        place_fit(target, partial(_step_of, target, found))
        return target
    return _unplaced_step(target, found)


def report(model: keras.Model) -> CallReport:
    """See `baechi_ext.report`."""
    return report_of(step_of_fit(model))


def unplace(model: keras.Model) -> None:
    """See `baechi_ext.unplace`."""
    unplace_fit(model)
