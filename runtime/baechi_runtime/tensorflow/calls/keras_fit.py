"""Placing `model.fit` of Keras: the model's train_step runs placed, all around it is Keras's own.

Keras makes the function that a fit calls for each batch in `make_train_function`. Here it takes the next batch itself and gives it to the
placed train_step, so metrics, callbacks and the optimizer's state are Keras's variables, trained where the step runs.

Two numbers may differ from Keras's. Where a fit runs by a plan made ahead and its last batch is smaller, Keras does not know the sizes of
batches while it traces, and counts each batch as one in the mean of an output's own loss, if there are several outputs. Here sizes are
known, and each example counts as one.
Where a data set does not say how many batches it has, Keras meets its end in the middle of a step, which has counted itself by then:
`optimizer.iterations` is one more after each epoch, and Adam's steps differ a little. Here a step without a batch does not begin.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from baechi_ext.errors import OptionError
from baechi_runtime.tensorflow.calls.placed_function import EAGERLY, PlacedFunction
from baechi_runtime.tensorflow.step import require_keras_on_tensorflow

LARGE_ENOUGH = 1000
"""Parameters to be trained; a model with fewer is not worth a plan."""
_OF_FIT = ("x", "y", "sample_weight")
Place = Callable[[str, Callable[..., Any], Any], PlacedFunction]
"""A training step's name, the tf.function that runs it, which does not keep its owner, and the owner, who calls it -> what is called
instead."""


class PlacedModels:
    """The models of a program, each placed when it is first fitted."""

    def __init__(self, place: Place) -> None:
        self._place_step = place
        self._placed: weakref.WeakKeyDictionary[keras.Model, PlacedFunction] = weakref.WeakKeyDictionary()
        self.functions: list[PlacedFunction] = []
        self.too_small = 0
        """The most parameters of a model that was fitted and too small."""
        self.left_alone = ""
        """Why a model was left alone, if one was."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, every model's fit is placed."""
        ordinary = keras.Model.make_train_function
        keras.Model.make_train_function = _placing(ordinary, self._place)
        try:
            yield
        finally:
            keras.Model.make_train_function = ordinary

    def _place(self, model: keras.Model, train_step: Any) -> None:
        if train_step is None:
            self.left_alone = why_left_alone(model)
            return

        def placed() -> PlacedFunction | None:
            size = sum(int(tf.size(v.value)) for v in model.trainable_variables)
            if size < LARGE_ENOUGH:
                self.too_small = max(size, self.too_small)
                return None
            if model in self._placed:
                self._placed[model].unplace("the model was compiled anew")
            self._placed[model] = self._place_step(name_of_step(model), train_step, model)
            self.functions.append(self._placed[model])
            return self.functions[-1]

        model.train_function = PlacedFit(model, placed)


class _Placer:
    """Stands in for the `make_train_function` of a model whose fit is placed."""

    def __init__(self, model: keras.Model, make: Callable[[Any], PlacedFunction], planned: PlacedFunction | None) -> None:
        self._make = _placing(type(model).make_train_function, self.place)
        self._model, self._step, self._planned = model, make, planned
        self.fit: PlacedFit | None = None

    def __call__(self, force: bool = False) -> Any:
        return self._make(self._model, force)

    def place(self, model: keras.Model, train_step: Any) -> None:
        """Places the fit that the model's own train function runs, with this train_step, if it is one."""
        self.end("the model was compiled anew")
        if train_step is not None:
            self.fit = model.train_function = PlacedFit(model, partial(self._step, train_step), self._planned)
            self._planned = None

    def end(self, reason: str) -> None:
        """Leaves the variables with the model, and the devices free of them."""
        if self.fit is not None and self.fit.step is not None:
            self.fit.step.unplace(reason)
        self.fit = None


def place_fit(model: keras.Model, make: Callable[[Any], PlacedFunction], planned: PlacedFunction | None = None) -> None:
    """Places the model's fit from now on, by the step that `make` gives of its train_step whenever the model is compiled; until then by the
    `planned` one, of a batch as `batch_of` has it. Raises as `require_placeable` does."""
    require_placeable(model)
    model.make_train_function = placer = _Placer(model, make, planned)
    if model.train_function is not None:
        placer.place(model, train_step_of(model))


def require_placeable(model: keras.Model) -> None:
    """Raises OptionError where the model's fit is placed already, is told to run eagerly, or on several replicas, or runs a train function
    that its class makes, and MissingBackendError where Keras runs on another framework."""
    require_keras_on_tensorflow()
    if _placer_of(model) is not None:
        raise OptionError(f"the fit of {model.name} is placed already; call baechi_ext.unplace(model) first")
    if why := why_left_alone(model):
        raise OptionError(f"{why}; compile it without run_eagerly and tf.distribute")
    if type(model).make_train_function is not keras.Model.make_train_function:
        advice = "which would not run placed; do what it does in train_step or in a callback"
        raise OptionError(f"{type(model).__name__} makes a train function of its own (make_train_function), {advice}")


def step_of_fit(model: keras.Model) -> PlacedFunction:
    """The step that runs the model's fit. Raises OptionError where there is none."""
    placer = _placer_of(model)
    if placer is None or placer.fit is None or placer.fit.step is None:
        advice = "call baechi_ext.parallelize(model) first" if placer is None else "fit it first"
        raise OptionError(f"no step of {model.name} is placed; {advice}")
    return placer.fit.step


def unplace_fit(model: keras.Model) -> None:
    """Leaves the model's fit to Keras from now on."""
    placer = _placer_of(model)
    if placer is not None:
        del model.make_train_function
        if placer.fit is not None and model.train_function is placer.fit:
            model.train_function = placer.fit.ordinary
        placer.end("it was unplaced")


def _placer_of(model: keras.Model) -> _Placer | None:
    if not isinstance(model, keras.Model):
        raise OptionError(f"{model!r} is neither an nn.Module nor a Keras model; a placed step has report() and unplace() of its own")
    found = vars(model).get("make_train_function")
    return found if isinstance(found, _Placer) else None


def _placing(ordinary: Callable[..., Any], place: Callable[[keras.Model, Any], None]) -> Callable[..., Any]:
    """Keras's `make_train_function`, behind which `place` may change what it made. The train_step that is placed, None for a model that is
    left alone, is the one that Keras's function calls: it is traced once, for both, in the first batch, as Python's values are then."""

    def make_train_function(model: keras.Model, force: bool = False) -> Any:
        if model.train_function is None or force:
            require_keras_on_tensorflow()
            train_step = None if why_left_alone(model) else train_step_of(model)
            with nullcontext() if train_step is None else _calling(model, train_step):
                ordinary(model, force)
            place(model, train_step)
        return model.train_function

    return make_train_function


@contextmanager
def _calling(model: keras.Model, train_step: Any) -> Iterator[None]:
    """Within, who looks up `model.train_step` finds this one; it is set past the model's own `__setattr__`."""
    own = vars(model)
    before = own.get("train_step")
    own["train_step"] = train_step
    try:
        yield
    finally:
        del own["train_step"]
        if before is not None:
            own["train_step"] = before


def why_left_alone(model: keras.Model) -> str:
    """Why Keras does not run the model's step as one graph on one replica; empty where it does."""
    if model.run_eagerly:
        return f"the model {model.name} runs eagerly"
    replicas = model.distribute_strategy.num_replicas_in_sync
    return f"the model {model.name} runs on {replicas} replicas" if replicas > 1 else ""


def name_of_step(model: keras.Model) -> str:
    return f"{model.name}.train_step"


def train_step_of(model: keras.Model) -> Any:
    """A tf.function of `model.train_step`: a batch -> logs. It does not keep the model."""
    of = weakref.ref(model)

    @tf.autograph.experimental.do_not_convert  # as in Keras
    def train_step(data: Any) -> Any:
        model = of()
        return None if model is None else model.train_step(data)

    return tf.function(train_step, jit_compile=model.jit_compile or None)


class PlacedFit:
    """The function that a fit calls with its iterator: it runs `steps_per_execution` steps and returns the last one's logs."""

    def __init__(self, model: keras.Model, make: Callable[[], PlacedFunction | None], planned: PlacedFunction | None = None) -> None:
        """`make` gives the step, unless one is `planned`. It is called once the model and its optimizer have their variables, which the
        first step makes at the latest; where it returns None, Keras's own function is called."""
        self._model, self._make = model, make
        self.ordinary = model.train_function
        self._planned = self._made = planned is not None
        self._began = self._left = False
        self.step = planned

    def __call__(self, iterator: Any) -> Any:
        optimizer = self._model.optimizer  # None where the model's train_step has its own
        if not self._made and (self._began or (self._model.built and (optimizer is None or optimizer.built))):
            self.step, self._made = self._make(), True
        if self._left or self.step is None or self.step.refusal:
            self._began = True
            return self._as_it_is(iterator)
        if tf.config.functions_run_eagerly():
            return self._as_it_is(iterator, EAGERLY)
        logs = None
        for _ in range(self._model.steps_per_execution):
            try:
                taken = next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                if logs is None:
                    raise
                break
            data = tf.nest.map_structure(_without_optionals, taken)
            data = _as_fitted(data) if self._planned else data
            if (spec := getattr(iterator, "element_spec", None)) is not None and not self._planned:
                self.step.specs = (tf.nest.map_structure(_without_optionals, spec),)
            if not (self.step.steps or self.step.prepare(data)):
                self._left = True
                return self._as_it_is(self._again(taken, iterator))
            logs = self.step(data)
        return logs

    def _as_it_is(self, iterator: Any, reason: str = "") -> Any:
        """Keras's own call, which is counted once it has found batches."""
        logs = self.ordinary(iterator)
        if self.step is not None:
            self.step.unplaced[self.step.refusal or reason] += self._model.steps_per_execution
        return logs

    def _again(self, taken: Any, iterator: Any) -> Any:
        """The batches of one call, the first of which was taken already, of the kind that Keras's function is traced for: its trace is for
        all sizes of batches, and goes on with its seeded sequences from the first batch on."""
        batches = chain([taken], islice(iterator, self._model.steps_per_execution - 1))
        spec = getattr(iterator, "element_spec", None)
        return batches if spec is None else iter(tf.data.Dataset.from_generator(lambda: batches, output_signature=spec))


def _without_optionals(value: Any) -> Any:
    """Keras's data sets have these in place of None."""
    return None if isinstance(value, (tf.experimental.Optional, tf.OptionalSpec)) else value


def batch_of(inputs: Any) -> Any:
    """The batch that a fit gives train_step of these: (x, y), (x, y, sample_weight) or a dict of them by name. Raises OptionError."""
    if isinstance(inputs, Mapping) and "x" in inputs and set(_OF_FIT).issuperset(inputs):
        inputs = [inputs.get(name) for name in _OF_FIT]
    if not (isinstance(inputs, (tuple, list)) and inputs):
        found = f"a dict of {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
        raise OptionError(f"the inputs of a Keras model are a batch, as (x, y) or (x, y, sample_weight), or a dict of these, not {found}")
    alone = all(part is None for part in inputs[1:])
    return _as_fitted(keras.utils.pack_x_y_sample_weight(inputs[0]) if alone else tuple(inputs))


def _as_fitted(data: Any) -> Any:
    """A batch as a fit of arrays makes it, where train_on_batch leaves it as it was given: without a sample_weight of None, with tuples for
    lists, and real numbers of Keras's own type."""
    if isinstance(data, tuple) and len(data) == len(_OF_FIT) and data[1] is not None and data[2] is None:
        data = data[:2]
    return keras.tree.map_structure(_as_array, keras.tree.lists_to_tuples(data))


def _as_array(value: Any) -> Any:
    if tf.is_tensor(value) or not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array.astype(tf.as_dtype(keras.config.floatx()).as_numpy_dtype) if array.dtype.kind == "f" else array
