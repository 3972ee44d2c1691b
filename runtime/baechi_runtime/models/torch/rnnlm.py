"""A recurrent language model (Zaremba et al. 2014, arXiv 1409.2329), by default the paper's medium one: 19.8 M parameters.

The large one, 66.0 M, is --rnn_units=1500 --dropout=0.65. Dropout stands where no state passes from step to step. Every sequence begins
with a zero state. Weights are drawn as PyTorch does by default, the paper's from U(-0.05, 0.05). Layers pass chunks of time steps on,
which are one op each (see `rnn`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baechi_runtime.models.torch.rnn import Recurrent, chunks_of, next_word_loss


@dataclass(frozen=True, slots=True)
class Options:
    batch_size: int = 20
    vocab_size: int = 10_000
    max_seq_length: int = 35
    """Words of every sequence."""
    rnn_units: int = 650
    """Also the width of the embedding."""
    rnn_unit_type: str = "lstm"
    num_layers: int = 2
    rnn_chunk: int = 5
    """Time steps per op."""
    dropout: float = 0.5


class LanguageModel(nn.Module):
    """Words (steps + 1, batch) -> the mean cross-entropy of the next word."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        units, self.chunk = options.rnn_units, options.rnn_chunk
        self.embedding = nn.Embedding(options.vocab_size, units)
        self.layers = nn.ModuleList(Recurrent([units], units, options.rnn_unit_type) for _ in range(options.num_layers))
        self.dropout = nn.Dropout(options.dropout)
        self.projection = nn.Linear(units, options.vocab_size)

    def forward(self, words: Tensor) -> Tensor:
        chunks = list(chunks_of(self.embedding(words[:-1]), self.chunk))
        for layer in self.layers:
            chunks, _ = layer([[self.dropout(x)] for x in chunks])
        return next_word_loss((self.projection(self.dropout(y)) for y in chunks), words[1:], self.chunk)


def build(options: Options) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, which returns its loss, and random words."""
    return LanguageModel(options), (torch.randint(options.vocab_size, (options.max_seq_length + 1, options.batch_size)),)
