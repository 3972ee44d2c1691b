"""Placing a training step in the caller's own loop: `baechi_ext.parallelize` of a function, a tf.function or a Keras model."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import keras

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster
from baechi_ext.ir.numbers import bytes_of, device_count
from baechi_ext.ir.plan import Plan
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest, WorkerKind
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.tensorflow.calls.call_report import report_of
from baechi_runtime.tensorflow.calls.keras_fit import place_fit
from baechi_runtime.tensorflow.calls.placed_function import PlacedFunction, Settings
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
    if isinstance(target, PlacedFunction):
        raise OptionError("the training step is placed already; call its unplace() first")
    if isinstance(target, keras.Model):
        place_fit(target, chosen.settings(target.name))
        return target
    if callable(target) and not isinstance(target, type):
        return PlacedTrainStep(target, chosen)
    raise OptionError(f"parallelize takes a training step (a function or tf.function) or a Keras model, not {target!r}")
