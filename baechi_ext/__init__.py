"""Automatic device placement for training deep networks: the deciding half. Importing it loads no deep-learning framework."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

if TYPE_CHECKING:
    from baechi_ext.options import ApplyOptions, ParallelizeOptions, PlanOptions
    from baechi_runtime.library import (
        CallReport,
        Cluster,
        Compared,
        Device,
        Explained,
        Link,
        Op,
        OpChoices,
        OpGraph,
        Plan,
        PlanExplanation,
        Run,
        Tensor,
        Timeline,
        Transfer,
    )

__version__ = "0.1.0"
__all__ = [
    "plan", "parallelize", "report", "unplace", "log", "Run", "Compared", "Explained", "CallReport", "PlanOptions", "ApplyOptions",
    "ParallelizeOptions", "OpGraph", "Op", "Tensor", "Cluster", "Device", "Link", "Plan", "Timeline", "Transfer", "PlanExplanation",
    "OpChoices",
]  # fmt: skip
T = TypeVar("T")

if not TYPE_CHECKING:  # a type checker sees the names themselves

    def __getattr__(name: str) -> Any:
        """The value types, which are loaded when they are asked for."""
        if name not in __all__:
            raise AttributeError(f"module 'baechi_ext' has no attribute {name!r}")
        from baechi_ext import options
        from baechi_runtime import library

        return getattr(library if hasattr(library, name) else options, name)

    def __dir__() -> list[str]:
        """For completion: loaded or not."""
        return sorted({*globals(), *__all__})


def plan(
    model_or_step: Any, inputs: Any = None, *, devices: "int | str | Sequence[str] | Cluster" = 2, **options: "Unpack[PlanOptions]"
) -> "Run":
    """A training step and its plan for these devices, as a value to look at, to ask and to run: `Run`.

        run = baechi_ext.plan(model, (x,), devices=4)
        run.explain("encoder.3"); run.pin("head", 1); run.what_if(devices=8, link="25GB/s"); run.compare("m_etf", "single")
        run.apply(); run.save("runs/mine"); run.report("report.html")

    Of a PyTorch module with the inputs of a training call (a tuple of arguments, or a dict of keyword arguments): its forward and backward
    passes, captured and profiled as by `parallelize`; loss and optimizer stay in your loop. Of a compiled Keras model with a batch,
    `(x, y)` or `(x, y, sample_weight)`: the step that `fit` runs. Of a TensorFlow training step, a function or tf.function, with its
    arguments: all that it computes; `run.apply()` gives the placed one. Of a built-in model's name, with its sizes (`{"batch_size": 8}`)
    as inputs: the whole step. Of a costed `OpGraph`: that. `devices` are so many CPU workers, CUDA devices by name
    (`["cuda:0", "cuda:1"]`), a `Cluster` or a cluster file's path, which the machine need not have: costs are then those of its own
    devices; or published hardware (`"h100"` for two, `"8xh100"`), for which costs are counted.

    Raises MissingBackendError without the framework, OptionError for what is not known, CaptureError where the call can't be placed,
    InfeasibleError where nothing fits.
    """
    from baechi_runtime.library.planning import plan

    return plan(model_or_step, inputs, devices, options)


@overload
def parallelize(
    model: None = None, example_inputs: Any = None, *, framework: str | None = None, **options: "Unpack[ParallelizeOptions]"
) -> Callable[[T], T]: ...


@overload
def parallelize(model: T, example_inputs: Any = None, *, framework: str | None = None, **options: "Unpack[ParallelizeOptions]") -> T: ...


def parallelize(
    model: Any = None, example_inputs: Any = None, *, framework: str | None = None, **options: "Unpack[ParallelizeOptions]"
) -> Any:
    """A counterpart of `model` that computes the same on several devices at the same time, in your own training loop.

    PyTorch: the training calls of a module run placed from now on; the very module is returned.

        baechi_ext.parallelize(model, devices=2, method="auto")
        loss = criterion(model(x), y); loss.backward(); optimizer.step()

    TorchDynamo traces its calls, and guards what they depend on. A call is captured, profiled and placed when it comes the second time,
    or at once with `example_inputs` (a tuple of arguments, or a dict of keyword arguments). The plan of a large one may be searched for in
    another process; until it is there, calls run as they are. Then placed and plain steps take turns, and the
    faster is kept. `baechi_ext.report(model)` says what that gained, and has the plan; `baechi_ext.unplace(model)` ends it. Without a
    model it is a decorator, of a class of modules or of a function that makes one; their modules are then placed.

    TensorFlow: a whole training step, a function or tf.function, becomes one whose calls run placed; so does `fit` of a Keras model.

        @baechi_ext.parallelize(devices=2)
        @tf.function
        def train_step(images, labels): ...

    The variables stay the caller's: after a step they live on the devices, and whoever looks at them has them brought home first.

    The options are those of `ParallelizeOptions`. The `framework`, "torch" or "tensorflow", is found out where it is not given.

    Raises MissingBackendError without the framework, OptionError for an unknown option. What can't be placed runs as it is, which is
    said on stderr once. With strict=True (TensorFlow: unless fallback=True) a training call raises CaptureError where it can't be captured,
    ParityError where the placed call differs from the unplaced one, InfeasibleError where nothing fits.
    """
    from baechi_ext.errors import OptionError
    from baechi_runtime.host.frameworks import TENSORFLOW, TORCH, framework_of

    if framework not in (None, TORCH, TENSORFLOW):
        raise OptionError(f"unknown framework {framework!r}; choose {TORCH} or {TENSORFLOW}")
    if framework is None and model is None:
        _require_options_of_one([f for f in (TORCH, TENSORFLOW) if f in sys.modules], example_inputs, options)
        return lambda target: parallelize(target, example_inputs, framework=framework_of(target), **options)
    if (framework or framework_of(model)) == TENSORFLOW:
        return _parallelize_tensorflow(model, example_inputs, options)
    return _parallelize_torch(model, example_inputs, options)


def report(model: Any) -> "CallReport":
    """The report of a PyTorch module, or a Keras model, that `parallelize` was given: its plan, what it was predicted to gain, and what was
    measured so far. Raises OptionError for one that is not placed."""
    found: CallReport = _calls_of(model).report(model)
    return found


def log(report: "CallReport", to: Any) -> None:
    """Logs what was measured of a placed module (`baechi_ext.report(model)`) where your training logs: `to` is a `SummaryWriter` of
    `torch.utils.tensorboard`, an open run of Weights & Biases (`wandb.run`), or the module `mlflow` with a run. They get times of steps,
    speed-up and memory under `baechi/`, and the latter two the page as an artifact; `baechi train SCRIPT` does so by itself. Raises
    OptionError for another logger, or where nothing is placed."""
    from baechi_runtime.library.loggers import log

    log(report, to)


def unplace(model: T) -> T:
    """The module itself, or the Keras model, whose calls run as they are from now on. Raises OptionError for what is neither."""
    _calls_of(model).unplace(model)
    return model


def _calls_of(model: Any) -> Any:
    """The module that places calls of a model like this one."""
    from baechi_runtime.host.frameworks import TENSORFLOW, framework_of

    if framework_of(model) == TENSORFLOW:
        from baechi_runtime.tensorflow.calls import parallelize as calls

        return calls
    from baechi_runtime.torch.calls import parallelize as of_modules

    return of_modules


def _require_options_of_one(frameworks: Sequence[str], example_inputs: Any, options: "ParallelizeOptions") -> None:
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


def _parallelize_torch(model: Any, example_inputs: Any, options: "ParallelizeOptions") -> Any:
    from baechi_ext.errors import MissingBackendError

    try:
        import torch  # noqa: F401
    except ImportError as e:
        raise MissingBackendError(f"placing a module needs torch 2.11 or newer ({e}); install baechi-ext[torch]") from e
    from baechi_runtime.host.generators import python_generators_kept

    with python_generators_kept():
        from baechi_runtime.torch.calls.parallelize import parallelize

        return parallelize(model, example_inputs, options)


def _parallelize_tensorflow(target: Any, example_inputs: Any, options: "ParallelizeOptions") -> Any:
    from baechi_ext.capture.tensorflow_private import tensorflow
    from baechi_ext.errors import OptionError

    tensorflow()
    from baechi_runtime.tensorflow.calls.parallelize import parallelize

    if example_inputs is not None:
        raise OptionError("example_inputs are for PyTorch; a TensorFlow step is captured at its first call")
    return parallelize(target, options)
