"""What the caller's optimizer keeps for each parameter, so that a plan leaves room for it."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

_SLOTS: dict[str, Callable[[dict[str, Any]], int]] = {
    "SGD": lambda o: bool(o["momentum"]),
    "Adam": lambda o: 2 + bool(o["amsgrad"]),
    "AdamW": lambda o: 2 + bool(o["amsgrad"]),
    "Adamax": lambda o: 2,
    "NAdam": lambda o: 2,
    "RAdam": lambda o: 2,
    "RMSprop": lambda o: 1 + (o["momentum"] > 0) + bool(o["centered"]),
    "Adagrad": lambda o: 1,
    "Adadelta": lambda o: 2,
    "ASGD": lambda o: 1,
    "Rprop": lambda o: 2,
}
"""Class -> tensors of a parameter's size that it keeps for each, from its options."""


@dataclass(frozen=True, slots=True)
class OptimizerFound:
    """`slots` tensors of a parameter's size are kept for each; 0 and a note where that is not known."""

    slots: int
    note: str = ""


def optimizer_of(module: nn.Module) -> OptimizerFound:
    """The most that an optimizer of this process keeps for the module's parameters."""
    parameters = {id(p) for p in module.parameters()}
    found = [o for o in gc.get_objects() if issubclass(type(o), Optimizer) and hasattr(o, "param_groups")]
    groups = [(type(o).__name__, g) for o in found for g in o.param_groups if any(id(p) in parameters for p in g["params"])]
    if not groups:
        return OptimizerFound(0, "no optimizer of its parameters was found, so no memory is planned for one")
    unknown = [name for name, _ in groups if name not in _SLOTS]
    if unknown:
        return OptimizerFound(0, f"what {unknown[0]} keeps for each parameter is not known, so no memory is planned for it")
    return OptimizerFound(max(int(_SLOTS[name](group)) for name, group in groups))
