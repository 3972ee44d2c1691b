"""Modules that are placed in the caller's own loop, for tests of what that loop may do."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import baechi_ext
from baechi_runtime.report.call_report import CallReport

QUICK = {"devices": 2, "method": "random", "strict": True, "keep_placed": True}
"""Placed anywhere, without a search, and for good; what can't be placed is an error."""


def place(model: nn.Module, *args: object, **options: object) -> nn.Module:
    return baechi_ext.parallelize(model, *args, **{**QUICK, **options})


def report(model: nn.Module) -> CallReport:
    return baechi_ext.report(model)


def batch(name: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "branches":
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(5, (4,), generator=generator)
    return torch.randint(11, (6, 4), generator=generator), torch.randint(11, (6,), generator=generator)


class Answers(nn.Module):
    """Returns `shape` of its two heads; takes keyword arguments."""

    def __init__(self, shape: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(12, 3)
        self.shape = shape

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> object:
        h = torch.tanh(self.body(x)) * scale
        h = h if mask is None else h * mask
        return self.shape(self.left(h), self.right(h), x)


@dataclass
class Pair:
    left: Tensor
    rest: dict
    name: str = "pair"


SHAPES = {
    "tensor": lambda a, b, x: a,
    "tuple": lambda a, b, x: (a, b),
    "nested": lambda a, b, x: {"a": [a, None, 3], "b": (b, "text")},
    "dataclass": lambda a, b, x: Pair(a, {"b": b}),
    "twice": lambda a, b, x: (a, a, b.view(-1), b),
    "input": lambda a, b, x: (a, x, x.view(-1)),
    "halves": lambda a, b, x: (*a.chunk(2, 1), b),
    "views of views": lambda a, b, x: (a.T[1:], a.T[1:].view(3, 5, 1), b[1:], b.unsqueeze(1)),
    "half detached": lambda a, b, x: (a[:, :2], a[:, 2:].detach(), b),
    "all detached but one": lambda a, b, x: (a.detach()[:, :2], a[:, 2:], b),
    "detached": lambda a, b, x: (a, b.detach(), b.argmax(1)),
    "distribution": lambda a, b, x: torch.distributions.Normal(a, b.exp().sum()),
}


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (Pair, torch.distributions.Normal)):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []
