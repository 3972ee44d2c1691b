"""The parts of torch that are not its public interface, all of those that the project uses, behind names of its own.

What stands here may change with any release of torch: tests/test_layers.py wants no private name of torch anywhere else,
and `make test-compat` runs the torch tests with another release than `make test` does.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import MissingBackendError

if TYPE_CHECKING:
    import torch
    from torch import fx

TRIED_WITH = ("2.11", "2.13")
"""The releases that the tests were run with: 2.11 on Python 3.12 and 2.13 on Python 3.11."""


def joint_graph(module: "torch.nn.Module", inputs: "Sequence[torch.Tensor]") -> "fx.GraphModule":
    """AOTAutograd's graph of forward and backward together. The module must return its outputs as tensors; those that need a gradient
    get a tangent as a further input. What is raised while the module's forward is traced passes. Raises MissingBackendError."""
    with _needed("capturing a step"):
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return aot_export_joint_with_descriptors(stack, module, tuple(inputs)).graph_module


def descriptors() -> ModuleType:
    """The classes of `node.meta["desc"]`, which say what the graph's inputs and outputs stand for. Raises MissingBackendError."""
    with _needed("capturing a step"):
        from torch._functorch._aot_autograd import descriptors
    return descriptors


def profiler_events(profiler: "torch.profiler.profile") -> list[Any]:
    """What a finished profile recorded, memory events included; each has name(), start_ns(), duration_ns() and nbytes()."""
    with _needed("profiling memory"):
        return profiler.profiler.kineto_results.events()


def abort_process_group() -> None:
    """Ends all communicators of this process at once, without their peers. Raises MissingBackendError."""
    with _needed("leaving a group of workers"):
        from torch.distributed.distributed_c10d import _abort_process_group
    _abort_process_group()


@contextlib.contextmanager
def _needed(what: str) -> Iterator[None]:
    """Raises MissingBackendError, which names the releases that were tried, where this torch has not what is used inside."""
    try:
        yield
    except (ImportError, AttributeError) as e:
        raise MissingBackendError(f"{what} needs torch, a release like {' or '.join(TRIED_WITH)}{_found()} ({e}); {_ADVICE}") from e


_ADVICE = f"install it with: pip install 'torch=={TRIED_WITH[-1]}.*'"


def _found() -> str:
    try:
        import torch
    except ImportError:
        return ""
    return f", not {torch.__version__}"
