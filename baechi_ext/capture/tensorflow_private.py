"""All uses of TensorFlow beyond its public interface, in one place, and its first import."""

import gc
import os
import sys
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import MissingBackendError
from baechi_ext.stderr import stderr_without

if TYPE_CHECKING:
    import tensorflow as tf

TRIED_WITH = "2.21"
"""The release that this was written against."""


def tensorflow() -> Any:
    """The module, its start-up remarks on stderr left out. Raises MissingBackendError."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with nullcontext() if "tensorflow" in sys.modules else stderr_without(b""):
            import tensorflow as tf
    except ImportError as e:
        raise MissingBackendError(
            f"this needs TensorFlow ({e}); install it with: pip install 'tensorflow=={TRIED_WITH}.*' (or 'tensorflow-cpu=={TRIED_WITH}.*')"
        ) from e
    return tf


def with_calls_inlined(concrete: Any) -> "tf.compat.v1.GraphDef":
    """The graph of a concrete function in which what nested functions do stands in place of their calls; loops and branches stay."""
    try:
        from tensorflow.python.framework.convert_to_constants import _run_inline_graph_optimization as inline
    except ImportError as e:
        raise _another_release("a step that calls other tf.functions") from e
    return inline(concrete, lower_control_flow=False, aggressive_inlining=True)


@cache
def has_kernel(op_type: str, device_type: str) -> bool:
    """True if an op can run on a device of this type ("CPU", "GPU")."""
    try:
        from tensorflow.python.framework.kernels import get_registered_kernels_for_op
    except ImportError as e:
        raise _another_release("looking for kernels") from e
    return any(k.device_type in (device_type, "DEFAULT") for k in get_registered_kernels_for_op(op_type).kernel)


def is_recorded() -> bool:
    """True if a GradientTape of this thread records what is computed now."""
    try:
        from tensorflow.python.eager.record import could_possibly_record
    except ImportError as e:
        raise _another_release("looking for a GradientTape") from e
    return bool(could_possibly_record())


def resources_of(dataset: Any) -> list[Any]:
    """Variables, tables and the like that the functions of a data set have captured, without those of its inputs. One that is saved has
    the function that it was given in place of a traced one, or None."""
    traced = (getattr(function, "function", None) for function in dataset._functions())
    return [c for function in traced for c in getattr(function, "captured_inputs", ()) if c.dtype == tensorflow().resource]


def variable_of(handle: Any) -> Any:
    """The variable with this handle, of all that there are; None where it is the handle of something else. A trace knows only the variables
    that it reads, and not those that it writes with read_value=False alone."""
    kind = tensorflow().Variable
    return next((o for o in gc.get_objects() if kind in type(o).__mro__ and vars(o).get("_handle") is handle), None)


def keeps_trace(function: Any) -> bool:
    """True for a tf.function."""
    return isinstance(function, type(tensorflow().function(lambda: None)))


def _another_release(what: str) -> MissingBackendError:
    import tensorflow as tf

    advice = f"install it with: pip install 'tensorflow=={TRIED_WITH}.*'"
    return MissingBackendError(f"{what} needs TensorFlow {TRIED_WITH} or one like it, not {tf.__version__}; {advice}")
