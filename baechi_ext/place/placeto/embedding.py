"""Embeddings: what a network makes of each op from its own features and those around it.

    rounds      Placeto's message passing (NeurIPS 2019, section 3.2), in both directions, a number of synchronous rounds
    sweep       the same in one sweep in topological order and one back
    graphsage   GraphSAGE (Hamilton, Ying and Leskovec, NeurIPS 2017), means over what an op reads from and what reads from it
    pgnn        P-GNN (You, Ying and Leskovec, ICML 2019), messages from the nearest anchors of random sets

Each takes features (.. x op x feature) and returns (.. x op x width). Layers are functions of named parameters: a network is a dict of
tensors, as its file is. Torch is imported where tensors are made.
"""

import math
from collections.abc import Callable, Iterable
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


class Embedding(NamedTuple):
    """The layers of an embedding, and what it does with their parameters."""

    shapes: Callable[[Size], Shapes]
    apply: Callable[[Parameters, View, "torch.Tensor", Size], "torch.Tensor"]


_WAYS = ("down", "up")  # along the edges, and against them


def _message_passing_shapes(size: Size) -> Shapes:
    found = {"embed.join_down": (size.width, size.width), "embed.join_up": (size.width, size.width)}
    for way in _WAYS:
        found[f"embed.{way}.own"] = (size.inputs, size.width)
        found[f"embed.{way}.edge"] = (1, size.width)
        found |= {f"embed.{way}.{part}": (size.width, size.width) for part in ("each", "all")}
    return found


def _rounds(parameters: Parameters, view: View, x: "Tensor", size: Size) -> "Tensor":
    source, target, feature = tensors(view.edges)
    both = []
    for way, (a, b) in zip(_WAYS, ((source, target), (target, source)), strict=True):
        h = own = dense(parameters, f"embed.{way}.own", x)
        edge = linear(parameters, f"embed.{way}.edge", feature)
        for _ in range(size.rounds):
            around = gathered(linear(parameters, f"embed.{way}.each", h), a, b, edge)
            h = own + dense(parameters, f"embed.{way}.all", around)
        both.append(h)
    return _joined(parameters, *both)


def _sweep(parameters: Parameters, view: View, x: "Tensor", size: Size) -> "Tensor":
    source, target, feature = tensors(view.edges)
    both = []
    for way, (a, b) in zip(_WAYS, ((source, target), (target, source)), strict=True):
        h = dense(parameters, f"embed.{way}.own", x)
        edge = linear(parameters, f"embed.{way}.edge", feature)
        for ops, into, out in map(tensors, view.levels if way == "down" else reversed(view.levels)):
            chosen = into if way == "down" else out
            if len(chosen):
                each = linear(parameters, f"embed.{way}.each", h)
                around = gathered(each, a[chosen], b[chosen], edge[chosen]).index_select(-2, ops)
                h = h.index_add(-2, ops, dense(parameters, f"embed.{way}.all", around))
        both.append(h)
    return _joined(parameters, *both)


def _joined(parameters: Parameters, down: "Tensor", up: "Tensor") -> "Tensor":
    return (linear(parameters, "embed.join_down", down) + linear(parameters, "embed.join_up", up)).relu()


def _graphsage_shapes(size: Size) -> Shapes:
    found: Shapes = {}
    for i in range(size.rounds):
        inputs = size.inputs if i == 0 else size.width
        found |= {f"embed.{i}.{part}": (inputs, size.width) for part in ("own", *_WAYS)}
    return found


def _graphsage(parameters: Parameters, view: View, x: "Tensor", size: Size) -> "Tensor":
    source, target, _ = tensors(view.edges)
    h = x
    for i in range(size.rounds):
        around = linear(parameters, f"embed.{i}.down", gathered(h, source, target))
        around = around + linear(parameters, f"embed.{i}.up", gathered(h, target, source))
        h = (linear(parameters, f"embed.{i}.own", h) + around).relu()
        h = h / h.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return h


def _pgnn_shapes(size: Size) -> Shapes:
    found = {"embed.first": (size.inputs, size.width)}
    for i in range(size.rounds):
        found |= {f"embed.{i}.{part}": (size.width, size.width) for part in ("own", "anchor")}
    return found


def _pgnn(parameters: Parameters, view: View, x: "Tensor", size: Size) -> "Tensor":
    nearest, near = tensors(view.anchors)
    h = dense(parameters, "embed.first", x)
    for i in range(size.rounds):
        there = linear(parameters, f"embed.{i}.anchor", h).index_select(-2, nearest.flatten())
        there = there.reshape(*h.shape[:-1], nearest.shape[1], size.width) * near.unsqueeze(-1)
        h = (linear(parameters, f"embed.{i}.own", h).unsqueeze(-2) + there).relu().mean(dim=-2)
    return h


EMBEDDINGS: dict[str, Embedding] = {
    "rounds": Embedding(_message_passing_shapes, _rounds),
    "sweep": Embedding(_message_passing_shapes, _sweep),
    "graphsage": Embedding(_graphsage_shapes, _graphsage),
    "pgnn": Embedding(_pgnn_shapes, _pgnn),
}
