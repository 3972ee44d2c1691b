"""Placing `model.fit` of Keras: the model's train_step runs placed, all around it is Keras's own.

Keras makes the function that a fit calls for each batch in `make_train_function`. Here it takes the next batch itself and gives it to the
placed train_step, so metrics, callbacks and the optimizer's state are Keras's variables, trained where the step runs.

One number may differ from Keras's: where the last batch is smaller, Keras does not know the sizes of batches while it traces, and counts
each batch as one in the mean of an output's own loss, if there are several outputs. Here sizes are known, and each example counts as one.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import keras
import tensorflow as tf

from baechi_ext.errors import OptionError
from baechi_runtime.tensorflow.calls.placed_function import PlacedFunction, Settings

LARGE_ENOUGH = 1000
"""Parameters to be trained; a model with fewer is not worth a plan."""
Place = Callable[[str, Callable[..., Any], Callable[..., Any]], PlacedFunction]
"""A training step's name, the function to capture, and the one that runs the step as it is -> what is called instead."""


class PlacedModels:
    """The models of a program, each placed when it is first fitted."""

    def __init__(self, place: Place) -> None:
        self._place_step = place
        self._placed: weakref.WeakKeyDictionary[keras.Model, PlacedFunction] = weakref.WeakKeyDictionary()
        self.functions: list[PlacedFunction] = []
        self.too_small = 0
        """The most parameters of a model that was fitted and too small."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, every model's fit is placed."""
        ordinary = keras.Model.make_train_function
        keras.Model.make_train_function = _placing(ordinary, self._place)
        try:
            yield
        finally:
            keras.Model.make_train_function = ordinary

    def _place(self, model: keras.Model) -> None:
        if is_left_alone(model):
            return

        def placed() -> PlacedFunction | None:
            size = sum(int(tf.size(v.value)) for v in model.trainable_variables)
            if size < LARGE_ENOUGH:
                self.too_small = max(size, self.too_small)
                return None
            if model in self._placed:
                self._placed[model].unplace("the model was compiled anew")
            self._placed[model] = placed_train_step(model, self._place_step)
            self.functions.append(self._placed[model])
            return self.functions[-1]

        model.train_function = train_function(model, placed)


def place_fit(model: keras.Model, settings: Settings) -> None:
    """Places the model's fit from now on. Raises OptionError where the model is told to run eagerly, or on several replicas."""
    if is_left_alone(model):
        raise OptionError(f"model {model.name} runs eagerly, or on several replicas; compile it without run_eagerly and tf.distribute")

    def place(model: keras.Model) -> None:
        step = partial(PlacedFunction, settings=settings)
        model.train_function = train_function(model, lambda: placed_train_step(model, step))

    model.make_train_function = MethodType(_placing(type(model).make_train_function, place), model)
    model.train_function = None


def _placing(ordinary: Callable[..., Any], place: Callable[[keras.Model], None]) -> Callable[..., Any]:
    """Keras's `make_train_function`, behind which `place` may change what it made."""

    def make_train_function(model: keras.Model, force: bool = False) -> Any:
        if model.train_function is None or force:
            ordinary(model, force)
            place(model)
        return model.train_function

    return make_train_function


def is_left_alone(model: keras.Model) -> bool:
    """True if Keras does not run the model's step as one graph on one replica."""
    return bool(model.run_eagerly) or model.distribute_strategy.num_replicas_in_sync > 1


def placed_train_step(model: keras.Model, place: Place) -> PlacedFunction:
    """Stands in for `model.train_step`: a batch -> logs."""

    @tf.autograph.experimental.do_not_convert  # as in Keras
    def train_step(data: Any) -> Any:
        return model.train_step(data)

    return place(f"{model.name}.train_step", train_step, tf.function(train_step))


def train_function(model: keras.Model, make: Callable[[], PlacedFunction | None]) -> Callable[[Any], Any]:
    """The function that a fit calls with its iterator: it runs `steps_per_execution` steps and returns the last one's logs. `make` is
    called once the model and its optimizer have their variables, which the first step makes at the latest; where it returns None, Keras's
    own function is called."""
    given = model.train_function
    made: list[PlacedFunction | None] = []

    def run(iterator: Any) -> Any:
        if not made:
            if not (model.built and model.optimizer.built):
                return given(iterator)
            made.append(make())
        if made[0] is None:
            return given(iterator)
        logs = None
        for _ in range(model.steps_per_execution):
            try:
                data = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
            logs = made[0](tf.nest.map_structure(_without_optionals, data))
        return logs

    return run


def _without_optionals(value: Any) -> Any:
    """Keras's data sets have these in place of None."""
    return None if isinstance(value, tf.experimental.Optional) else value
