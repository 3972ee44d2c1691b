"""Layers as functions of named parameters: a network is a dict of tensors, as its file is. Torch is imported where tensors are made."""

import math
from typing import TYPE_CHECKING

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
