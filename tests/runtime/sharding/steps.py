"""Small modules with all kinds of ops, how their calls split, and strategies: what a run has to equal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional


class Perceptron(nn.Module):
    """Linear layers with an activation, dropout, and squares of differences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        y = functional.dropout(functional.relu(self.first(x)), 0.5, self.training)
        return functional.mse_loss(self.second(y), wanted)


class Classifier(nn.Module):
    """Convolutions, batch normalization, pooling, flattening, and classes, some rows of which are to be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, 2)
        self.last = nn.Linear(16, 12)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = functional.relu_(self.norm(self.first(x)))
        y = functional.max_pool2d(self.second(y), 2)
        return functional.cross_entropy(self.last(y.flatten(1)), labels)


class Words(nn.Module):
    """An embedding that is also the last layer's weight, attention, layer normalization, and a constant that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=3)
        self.projection, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("positions", torch.randn(4, 8))

    def forward(self, words: Tensor, wanted: Tensor) -> Tensor:
        x = self.embedding(words) + self.positions
        q = self.projection(x).unflatten(2, (4, 2)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, q, q)
        x = self.norm(x + y.transpose(1, 2).flatten(2))
        return functional.cross_entropy(functional.linear(x, self.embedding.weight).flatten(0, 1), wanted.flatten())


def _classes() -> tuple[Tensor, ...]:
    labels = torch.randint(12, (8,))
    labels[2] = -100
    return torch.randn(8, 4, 9, 9) + 3.0, labels


@dataclass(frozen=True)
class Case:
    """A module, inputs, letters for its calls, and strategies by name (parts by letter, by call)."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    texts: Mapping[str, str]
    strategies: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)


CASES = {
    "perceptron": Case(
        Perceptron,
        lambda: (torch.randn(8, 8), torch.randn(8, 4)),
        {
            "linear": "bk nk n -> bn",
            "relu": "bn -> bn",
            "dropout": "bn -> bn",
            "linear_1": "bk nk n -> bn",
            "mse_loss": "bn bn -> .",
        },
        {
            "batch": {"*": {"b": -1}},
            "columns and rows": {
                "*": {},
                "linear": {"n": -1},
                "relu": {"n": -1},
                "dropout": {"n": -1},
                "linear_1": {"k": -1},
                "mse_loss": {"n": -1},
            },
            "mixed": {"*": {"b": 2, "n": 2}, "linear_1": {"k": 2, "b": 2}, "dropout": {"n": 4}},
        },
    ),
    "classifier": Case(
        Classifier,
        _classes,
        {
            "conv2d": "bchw nc.. -> bnhw",
            "batch_norm": "bnhw n n n n -> bnhw",
            "relu_": "bnhw -> bnhw",
            "conv2d_1": "bc.. nc.. n -> bn..",
            "max_pool2d": "bc.. -> bc..",
            "flatten": "bchw -> b(chw)",
            "linear": "bk nk n -> bn",
            "cross_entropy_loss": "bn b -> .",
        },
        {
            "batch": {"*": {"b": -1}},
            "channels": {"*": {"n": -1}, "relu_": {"n": -1}, "conv2d_1": {"c": -1}, "max_pool2d": {"c": -1}, "flatten": {"c": -1}},
            "mixed": {
                "*": {"b": 2, "n": 2},
                "conv2d_1": {"b": 2, "c": 2},
                "max_pool2d": {"b": 4},
                "flatten": {"c": 2},
                "linear": {"n": 2, "k": 2},
            },
        },
    ),
    "words": Case(
        Words,
        lambda: (torch.randint(16, (4, 4)), torch.randint(16, (4, 4))),
        {
            "embedding": "vd bs -> bsd",
            "add": "bsd sd -> bsd",
            "linear": "bsk nk n -> bsn",
            "unflatten": "bs(hd) -> bshd",
            "transpose": "bshd -> bhsd",
            "scaled_dot_product_attention": "bhqd bh.d bh.d -> bhqd",
            "transpose_1": "bhsd -> bshd",
            "flatten": "bshd -> bs(hd)",
            "add_1": "bsd bsd -> bsd",
            "layer_norm": "bsd d d -> bsd",
            "linear_1": "bsk vk -> bsv",
            "flatten_1": "bsv -> (bs)v",
            "flatten_2": "bs -> (bs)",
            "cross_entropy_loss": "rv r -> .",
        },
        {
            "batch": {"*": {"b": -1}, "cross_entropy_loss": {"r": -1}},
            "vocabulary and heads": {
                "*": {"h": -1},
                "embedding": {"v": -1},
                "linear": {"n": -1},
                "linear_1": {"v": -1},
                "flatten_1": {"v": -1},
                "cross_entropy_loss": {"v": -1},
            },
            "mixed": {
                "*": {"b": 2},
                "embedding": {"v": 2, "b": 2},
                "add": {"s": 2, "d": 2},
                "scaled_dot_product_attention": {"h": 2, "q": 2},
                "linear_1": {"v": 2, "k": 2},
                "cross_entropy_loss": {"r": 2, "v": 2},
            },
        },
    ),
}
