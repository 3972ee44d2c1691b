"""The Transformer (Vaswani et al. 2017, arXiv 1706.03762, "Attention is all you need", sections 3 and 5.4), by default its base model.

Source and target embeddings and the output projection are one weight (section 3.4). All sentences have full length, the right target is
fed at every step, and labels are not smoothed. Projections of attention have biases, the paper's have none. Every projection is a layer
of its own, so that queries, keys and values may run apart.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from baechi_ext.errors import OptionError


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 8
    vocab_size: int = 10_000
    """Words of both languages together; the paper has about 37,000 for English and German."""
    max_seq_length: int = 32
    """Words of every source and target."""
    num_layers: int = 6
    """Layers of the encoder, and of the decoder."""
    d_model: int = 512
    """Width of what passes from layer to layer."""
    d_ff: int = 2048
    """Width inside the feed-forward layers."""
    num_heads: int = 8
    dropout: float = 0.1


class Attention(nn.Module):
    """Multi-head attention: (batch, steps, width) and what to look at -> (batch, steps, width)."""

    def __init__(self, options: Options, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = options.num_heads, causal
        self.query, self.key, self.value, self.output = (nn.Linear(options.d_model, options.d_model) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = map(self._split, (self.query(x), self.key(memory), self.value(memory)))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(found.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(batch, heads, steps, width of a head)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Residual(nn.Module):
    """LayerNorm(x + Dropout(f(x))), as the paper puts it around every sub-layer f."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.dropout = nn.Dropout(options.dropout)
        self.norm = nn.LayerNorm(options.d_model)

    def forward(self, x: Tensor, change: Tensor) -> Tensor:
        return self.norm(x + self.dropout(change))


def _feed_forward(options: Options) -> nn.Module:
    return nn.Sequential(nn.Linear(options.d_model, options.d_ff), nn.ReLU(), nn.Linear(options.d_ff, options.d_model))


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward layer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(options), _feed_forward(options)
        self.attended, self.fed = Residual(options), Residual(options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attended(x, self.attention(x, x))
        return self.fed(x, self.feed_forward(x))


class DecoderLayer(nn.Module):
    """Self-attention to what came before, attention to the encoder's memory, and a feed-forward layer."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.before, self.attention, self.feed_forward = Attention(options, causal=True), Attention(options), _feed_forward(options)
        self.looked_back, self.attended, self.fed = (Residual(options) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.looked_back(x, self.before(x, x))
        x = self.attended(x, self.attention(x, memory))
        return self.fed(x, self.feed_forward(x))


def positions(steps: int, width: int) -> Tensor:
    """Sines and cosines of geometrically growing wave lengths (section 3.5), (steps, width)."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(steps).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)[:, :width]


class Transformer(nn.Module):
    """Source (batch, steps) and target (batch, steps + 1) words -> the mean cross-entropy of a target's next word."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.width = options.d_model
        self.embedding = nn.Embedding(options.vocab_size, options.d_model)
        nn.init.normal_(self.embedding.weight, std=options.d_model**-0.5)
        self.register_buffer("positions", positions(options.max_seq_length, options.d_model), persistent=False)
        self.dropout = nn.Dropout(options.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(options) for _ in range(options.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(options) for _ in range(options.num_layers))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self._embed(target[:, :-1])
        for layer in self.decoder:
            x = layer(x, memory)
        logits = functional.linear(x, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    def _embed(self, words: Tensor) -> Tensor:
        return self.dropout(self.embedding(words) * math.sqrt(self.width) + self.positions)


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, which returns its loss, and random words. Raises OptionError where the heads do not share the width evenly."""
    if options.d_model % options.num_heads:
        raise OptionError(f"--d_model={options.d_model} does not suit --num_heads={options.num_heads}; it takes a multiple of that")
    model = Transformer(options)
    shapes = ((options.batch_size, options.max_seq_length + extra) for extra in (0, 1))
    return model, tuple(torch.randint(options.vocab_size, shape) for shape in shapes)
