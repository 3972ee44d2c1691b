"""The embedding: what a network makes of each op from its own features and those around it, by Placeto's message passing (NeurIPS 2019,
section 3.2), in both directions, a number of synchronous rounds.

Layers are functions of named parameters: a network is a dict of tensors, as its file is. Torch is imported where tensors are made.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from baechi_ext.place.placeto.decisions import View

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shapes = dict[str, tuple[int, int]]
"""Layer -> its inputs and outputs."""
Parameters = dict[str, "torch.Tensor"]
"""`LAYER.weight` and `LAYER.bias`."""


def draw(shapes: Shapes, seed: int) -> Parameters:
    """Fresh parameters, uniform as by He et al. (ICCV 2015); the same for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found: Parameters = {}
    for name, (inputs, outputs) in sorted(shapes.items()):
        bound = math.sqrt(3.0 / inputs)
        found[f"{name}.weight"] = (torch.rand(inputs, outputs, generator=generator) * 2 - 1) * bound
        found[f"{name}.bias"] = torch.zeros(outputs)
    return found


def tensors(arrays: Iterable[NDArray[Any]]) -> "list[Tensor]":
    """The same memory as tensors."""
    import torch

    return [torch.from_numpy(array) for array in arrays]


def linear(parameters: Parameters, name: str, x: "Tensor") -> "Tensor":
    return x @ parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def dense(parameters: Parameters, name: str, x: "Tensor") -> "Tensor":
    """A linear layer and its rectified outputs."""
    return linear(parameters, name, x).relu()


def gathered(h: "Tensor", source: "Tensor", target: "Tensor", edge: "Tensor | None" = None) -> "Tensor":
    """The mean of h (.. x op x feature) over the source of each edge, by target; `edge` is added for each edge, and rectified."""
    messages = h.index_select(-2, source)
    if edge is not None:
        messages = (messages + edge).relu()
    count = h.new_zeros(h.shape[-2]).index_add_(0, target, h.new_ones(len(target))).clamp(min=1).unsqueeze(-1)
    return h.new_zeros(h.shape[:-1] + messages.shape[-1:]).index_add_(-2, target, messages) / count


class Size(NamedTuple):
    """The sizes of an embedding: the features it takes, the width of what it makes of an op, and how far it looks."""

    inputs: int
    width: int
    rounds: int


_WAYS = ("down", "up")  # along the edges, and against them


def embedding_shapes(size: Size) -> Shapes:
    """The embedding's layers."""
    found = {"embed.join_down": (size.width, size.width), "embed.join_up": (size.width, size.width)}
    for way in _WAYS:
        found[f"embed.{way}.own"] = (size.inputs, size.width)
        found[f"embed.{way}.edge"] = (1, size.width)
        found |= {f"embed.{way}.{part}": (size.width, size.width) for part in ("each", "all")}
    return found


def embed(parameters: Parameters, view: View, x: "Tensor", size: Size) -> "Tensor":
    """Features (op x feature) -> op x width."""
    source, target, feature = tensors(view.edges)
    both = []
    for way, (a, b) in zip(_WAYS, ((source, target), (target, source)), strict=True):
        h = own = dense(parameters, f"embed.{way}.own", x)
        edge = linear(parameters, f"embed.{way}.edge", feature)
        for _ in range(size.rounds):
            around = gathered(linear(parameters, f"embed.{way}.each", h), a, b, edge)
            h = own + dense(parameters, f"embed.{way}.all", around)
        both.append(h)
    down, up = both
    return (linear(parameters, "embed.join_down", down) + linear(parameters, "embed.join_up", up)).relu()
