"""Automatic device placement for training deep networks: the deciding half. Importing it loads no deep-learning framework."""

import sys
from collections.abc import Sequence
from typing import Any

__version__ = "0.1.0"


def parallelize(model: Any = None, example_inputs: Any = None, *, framework: str | None = None, **options: Any) -> Any:
    """What computes what `model` computes, on several devices at the same time, in your own training loop.

    PyTorch: a module becomes one whose training calls run placed.

        placed = baechi_ext.parallelize(model, devices=2, method="auto")
        loss = criterion(placed(x), y); loss.backward(); optimizer.step()

    It has the model's parameters under the model's names. At its first training call, or from `example_inputs` (a tuple of arguments, or
    a dict of keyword arguments) when `placed.plan` is asked for, the call is captured, profiled and placed. `placed.report()` says what
    that gained; `placed.unplace()` gives the model back. Without a model it is a decorator, of a class of modules or of a function that
    makes one; the class, or the function, then makes placed modules.

    TensorFlow: a whole training step, a function or tf.function, becomes one whose calls run placed; so does `fit` of a Keras model.

        @baechi_ext.parallelize(devices=2)
        @tf.function
        def train_step(images, labels): ...

    The variables stay the caller's: after a step they live on the devices, and whoever looks at them has them brought home first.

    The options are those of runtime.calls.parallelize.ParallelizeOptions and runtime.tensorflow.parallelize.ParallelizeOptions. The
    `framework`, "torch" or "tensorflow", is found out where it is not given.

    Raises MissingBackendError without the framework, OptionError for an unknown option. A training call raises CaptureError where it
    can't be captured, ParityError where the placed call differs from the unplaced one, InfeasibleError where nothing fits; with
    fallback=True it goes on unplaced instead.
    """
    from baechi_ext.errors import OptionError
    from runtime.frameworks import TENSORFLOW, TORCH, framework_of

    if framework not in (None, TORCH, TENSORFLOW):
        raise OptionError(f"unknown framework {framework!r}; choose {TORCH} or {TENSORFLOW}")
    if framework is None and model is None:
        _require_options_of_one([f for f in (TORCH, TENSORFLOW) if f in sys.modules], example_inputs, options)
        return lambda target: parallelize(target, example_inputs, framework=framework_of(target), **options)
    if (framework or framework_of(model)) == TENSORFLOW:
        return _parallelize_tensorflow(model, example_inputs, options)
    return _parallelize_torch(model, example_inputs, options)


def _require_options_of_one(frameworks: Sequence[str], example_inputs: Any, options: dict[str, Any]) -> None:
    """Raises OptionError where the options are those of none of these frameworks: what is decorated comes later, an error need not."""
    from baechi_ext.errors import OptionError

    errors = []
    for framework in frameworks:
        try:
            parallelize(None, example_inputs, framework=framework, **options)
        except OptionError as e:
            errors.append(e)
    if errors and len(errors) == len(frameworks):
        raise errors[0]


def _parallelize_torch(model: Any, example_inputs: Any, options: dict[str, Any]) -> Any:
    from baechi_ext.errors import MissingBackendError

    try:
        import torch  # noqa: F401
    except ImportError as e:
        raise MissingBackendError(f"placing a module needs torch 2.11 or newer ({e}); install baechi-ext[torch]") from e
    from runtime.calls.parallelize import parallelize

    return parallelize(model, example_inputs, options)


def _parallelize_tensorflow(target: Any, example_inputs: Any, options: dict[str, Any]) -> Any:
    from baechi_ext.capture.tensorflow_private import tensorflow
    from baechi_ext.errors import OptionError

    tensorflow()
    from runtime.tensorflow.parallelize import parallelize

    if example_inputs is not None:
        raise OptionError("example_inputs are for PyTorch; a TensorFlow step is captured at its first call")
    return parallelize(target, options)
