"""Automatic device placement for training deep networks: the deciding half. Importing it loads no deep-learning framework."""

from typing import Any

__version__ = "0.1.0"


def parallelize(model: Any = None, example_inputs: Any = None, **options: Any) -> Any:
    """A module that computes what `model` computes, on several devices at the same time, in your own training loop.

        placed = baechi_ext.parallelize(model, devices=2, method="auto")
        loss = criterion(placed(x), y); loss.backward(); optimizer.step()

    It has the model's parameters under the model's names. At its first training call, or from `example_inputs` (a tuple of arguments, or
    a dict of keyword arguments) when `placed.plan` is asked for, the call is captured, profiled and placed. `placed.report()` says what
    that gained; `placed.unplace()` gives the model back. Without a model it is a decorator, of a class of modules or of a function that
    makes one; the class, or the function, then makes placed modules.

    The options are those of runtime.calls.parallelize.ParallelizeOptions: devices, method, verify_steps, fallback, device_memory,
    time_limit, seed, cluster, pins, device_map, timeout_seconds.

    Raises MissingBackendError without torch, OptionError for an unknown option. A training call raises CaptureError where it can't be
    captured, ParityError where the placed call differs from the unplaced one, InfeasibleError where nothing fits; with fallback=True it
    goes on unplaced instead.
    """
    from baechi_ext.errors import MissingBackendError

    try:
        import torch  # noqa: F401
    except ImportError as e:
        raise MissingBackendError(f"placing a module needs torch 2.11 or newer ({e}); install baechi-ext[torch]") from e
    from runtime.calls.parallelize import parallelize

    return parallelize(model, example_inputs, options)
