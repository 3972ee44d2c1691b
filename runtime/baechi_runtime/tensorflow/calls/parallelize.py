"""Placing a training step in the caller's own loop: `baechi_ext.parallelize` of a function, a tf.function or a Keras model."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import keras

from baechi_ext.cost import attach_costs
from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.numbers import bytes_of, device_count
from baechi_ext.ir.plan import Plan
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest, WorkerKind
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.tensorflow.calls.call_report import report_of
from baechi_runtime.tensorflow.calls.keras_fit import place_fit
from baechi_runtime.tensorflow.calls.placed_function import Arguments, PlacedFunction, Settings, running
from baechi_runtime.tensorflow.calls.placing import place_step
from baechi_runtime.tensorflow.coarse import COARSE, begins_coarse


@dataclass(frozen=True)
class ParallelizeOptions:
    """The options of `parallelize` for TensorFlow, with their defaults; baechi_ext.options says what each is."""

    devices: int = 2
    method: str = "auto"
    verify_steps: int = 2
    fallback: bool = False
    device_memory: int | str | None = None
    time_limit: float | None = None
    seed: int = 0
    cluster: Cluster | None = None
    pins: Sequence[str] = ()
    workers: WorkerKind = "process"
    timeout_seconds: float = 300.0

    def request(self, name: str) -> TrainRequest:
        """The options as a run's request. Raises OptionError for an unknown method or kind of workers, and what is not a pin."""
        if self.workers not in ("process", "thread"):
            raise OptionError(f"workers={self.workers!r} is unknown; choose process or thread")
        plan = PlanRequest.of(self.method, pins=self.pins, seed=self.seed, time_limit=self.time_limit)
        if self.workers == "process" and begins_coarse(self.method):
            plan = replace(plan, grouper=COARSE[0], placer_type=COARSE[1])
        return TrainRequest(
            model=name,
            plan=plan,
            num_devices=device_count(self.devices),
            workers=self.workers,
            cluster=self.cluster,
            device_memory=None if self.device_memory is None else bytes_of(self.device_memory, "device_memory"),
            timeout_seconds=self.timeout_seconds,
            framework="tensorflow",
        )

    def settings(self, name: str) -> Settings:
        return Settings(self.request(name), self.verify_steps, self.fallback)


def plan_call(target: Any, example_inputs: Any, options: ParallelizeOptions) -> tuple["PlacedTrainStep", OpGraph, Placement]:
    """A training step, not placed yet, the graph of its call with these inputs, with the costs of devices side by side, and its plan.
    Variables keep their values.

    Raises OptionError for what is no step, CaptureError where the call can't be placed, and what placing raises.
    """
    step, given = _unplaced_step(target, options), arguments_of(example_inputs)
    with running():
        captured = step.ahead[given.key] = step.capture(given)
        placement = place_step(step.settings.request, captured, given.inputs)
    several = len(placement.result.plan.cluster) > 1
    graph = placement.graph if placement.profile is None else attach_costs(placement.graph, placement.profile, contended=several)
    return step, graph, placement


def apply_plan(planned: "PlacedTrainStep", options: ParallelizeOptions, plan: Placement) -> "PlacedTrainStep":
    """The step whose calls run by a plan of what `plan_call` gave, as `parallelize` has them run."""
    step = PlacedTrainStep(planned.unplace(), options, planned.name)
    step.ahead, step.placement = planned.ahead, plan
    return step


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
    if isinstance(target, PlacedFunction):
        raise OptionError("the training step is placed already; call its unplace() first")
    if isinstance(target, keras.Model):
        raise OptionError(
            f"a Keras model has a step once it was fitted; give that, as plan({target.name}.train_step, ((x, y),)), or have "
            "baechi_ext.parallelize place its fit"
        )
    if not callable(target) or isinstance(target, type):
        raise OptionError(f"a training step is a function or tf.function, not {target!r}")
    return PlacedTrainStep(target, options)


class PlacedTrainStep(PlacedFunction):
    """A training step whose calls run placed: a function, or a method of the objects it is looked up in.

    The variables that it trains are the caller's; they live on the devices and come back, up to date, when they are looked at.
    """

    __name__: str

    def __init__(self, target: Callable[..., Any], options: ParallelizeOptions, name: str = "") -> None:
        python = getattr(target, "python_function", target)
        name = name or getattr(python, "__name__", type(target).__name__)
        super().__init__(name, python, target, options.settings(name))
        functools.update_wrapper(self, python, updated=())
        self._options = options
        self._bound: weakref.WeakKeyDictionary[Any, PlacedTrainStep] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: type | None = None) -> "PlacedTrainStep":
        if owner is None:
            return self
        if owner not in self._bound:
            bound = PlacedTrainStep(self._ordinary.__get__(owner, kind), self._options, f"{type(owner).__name__}.{self.__name__}")
            self._bound[owner] = bound
        return self._bound[owner]

    @property
    def plan(self) -> Plan | None:
        """The plan of the first call; None before it."""
        return None if self.placement is None else self.placement.result.plan

    def report(self) -> CallReport:
        """Reports what was placed and how long it takes, predicted and measured so far."""
        return report_of(self)


def parallelize(target: Any, options: Mapping[str, Any]) -> Any:
    """See `baechi_ext.parallelize`."""
    known = [f.name for f in fields(ParallelizeOptions)]
    if unknown := [name for name in options if name not in known]:
        raise OptionError(f"unknown option {unknown[0]!r} of parallelize for TensorFlow; it takes {', '.join(known)}")
    chosen = ParallelizeOptions(**options)
    chosen.request("")  # what is wrong with the options, told early
    if target is None:
        return lambda target: parallelize(target, options)
    if isinstance(target, keras.Model):
        place_fit(target, chosen.settings(target.name))
        return target
    return _unplaced_step(target, chosen)
