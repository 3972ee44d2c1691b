"""Which framework a user's code is for; finding out loads none."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

TORCH, TENSORFLOW = "torch", "tensorflow"
_PACKAGES = {"torch": TORCH, "torchvision": TORCH, "transformers": TORCH, "tensorflow": TENSORFLOW, "keras": TENSORFLOW}


def framework_of(target: Any) -> str:
    """The framework of a model, a class or a function, by the packages that it comes from or that its code names. Where these do not tell:
    TensorFlow where it is loaded and PyTorch is not, else PyTorch."""
    kinds = target.__mro__ if isinstance(target, type) else type(target).__mro__
    found = next((f for kind in kinds if (f := _PACKAGES.get(kind.__module__.partition(".")[0]))), None)
    if found is not None:
        return found
    named = [f for value in _named(target) if (f := _PACKAGES.get(_package(value)))]
    if named:
        return max(named, key=named.count)
    return TENSORFLOW if TENSORFLOW in sys.modules and TORCH not in sys.modules else TORCH


def _named(function: Callable[..., Any]) -> Iterator[Any]:
    """The values from outside that the code of a function names."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    around = function.__globals__
    yield from (around[name] for name in code.co_names if name in around)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _package(value: Any) -> str:
    """The package of a module, a class, a function, or of the class of anything else."""
    module = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0]
