"""The tensors that the caller's optimizer keeps for each parameter, so that a plan leaves room for them."""

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
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
"""Class of torch.optim -> tensors of a parameter's size that it keeps for each, from its options."""


def optimizer_slots(tensors: Iterable[Tensor]) -> tuple[int, str]:
    """The most tensors of a parameter's size that an optimizer of this process keeps for each of these; 0 and a note where that is not
    known."""
    parameters = {id(p) for p in tensors}
    groups = [(type(o), g) for o in _optimizers() for g in o.param_groups if any(id(p) in parameters for p in g["params"])]
    if not groups:
        return 0, "no optimizer of its parameters was found, so no memory is planned for one"
    unknown = [kind.__name__ for kind, _ in groups if not _is_known(kind)]
    if unknown:
        return 0, f"what {unknown[0]} keeps for each parameter is not known, so no memory is planned for it"
    return max(int(_SLOTS[kind.__name__](group)) for kind, group in groups), ""


def _is_known(kind: type) -> bool:
    """True for torch's own; what a user's class of the same name keeps, and which options it has, nobody knows."""
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in _SLOTS


def resident_bytes(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes of parameters and buffers, by name: each with its gradient, which counts for the whole of a step as in a plan, and with what
    optimizers of this process keep for it by now."""
    kept: dict[int, int] = {}
    for optimizer in _optimizers():
        for parameter, slots in optimizer.state.items():
            if isinstance(slots, Mapping):
                sizes = (value.nbytes for value in slots.values() if isinstance(value, Tensor) and value.dim() > 0)
                kept[id(parameter)] = kept.get(id(parameter), 0) + sum(sizes)
    return {name: value.nbytes * (2 if value.requires_grad else 1) + kept.get(id(value), 0) for name, value in state.items()}


def _optimizers() -> list[Optimizer]:
    return [o for o in gc.get_objects() if issubclass(type(o), Optimizer) and hasattr(o, "param_groups")]
