"""Language models whose recurrent cell is drawn from the search space of ENAS (Pham et al. 2018, arXiv 1802.03268, sections 2.1 and 3.1),
for the Penn Treebank. The cell is drawn uniformly, not searched for, and unrolled over time: every step is ops of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

from baechi_runtime.models.torch.rnn import next_word_loss

NODES = 12
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that are not searched for."""

    batch_size: int = 64
    steps: int = 5
    units: int = 512
    """Units of every node, and of the embedding."""
    vocab_size: int = 5000
    chunk: int = 2
    """Steps whose words are predicted by one op."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A tree of nodes: node k > 0 reads node `reads[k]` < k, node 0 the word and the state; `reads[0]` is -1."""

    reads: tuple[int, ...]
    activations: tuple[str, ...]

    @classmethod
    def sample(cls, draw: Random) -> "Cell":
        """A cell of 12 nodes."""
        reads = (-1, *(draw.randrange(k) for k in range(1, NODES)))
        return cls(reads, tuple(draw.choice(tuple(ACTIVATIONS)) for _ in range(NODES)))

    @property
    def leaves(self) -> tuple[int, ...]:
        """The nodes nobody reads; their mean is the new state."""
        return tuple(k for k in range(len(self.reads)) if k not in self.reads)


class LanguageModel(nn.Module):
    """Words (steps + 1, batch) -> the mean cross-entropy of the next word. The embedding is also the output projection.

    A node is highway-like: h = x + c * (f(x W) - x) with c = sigmoid(x C), and x what it reads.
    """

    def __init__(self, cell: Cell, sizes: Sizes) -> None:
        super().__init__()
        self.cell, self.chunk = cell, sizes.chunk
        units = sizes.units
        self.embedding = nn.Embedding(sizes.vocab_size, units)
        self.word = nn.Linear(units, 2 * units, bias=False)
        self.nodes = nn.ModuleList(nn.Linear(units, 2 * units, bias=False) for _ in cell.reads)
        self.projection = nn.Linear(units, sizes.vocab_size, bias=False)
        self.projection.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -(units**-0.5), units**-0.5)

    def forward(self, words: Tensor) -> Tensor:
        inputs = self.word(self.embedding(words[:-1]))
        state, outputs = torch.zeros_like(inputs[0, :, : self.word.in_features]), []
        for step in inputs:
            state = self._step(step, state)
            outputs.append(state)
        chunks = (outputs[i : i + self.chunk] for i in range(0, len(outputs), self.chunk))
        return next_word_loss((self.projection(torch.cat(chunk)) for chunk in chunks), words[1:], self.chunk)

    def _step(self, word: Tensor, state: Tensor) -> Tensor:
        """The next state, from a word's share of node 0's product and the last state, both (batch, ...)."""
        nodes: list[Tensor] = []
        for k, (read, activation) in enumerate(zip(self.cell.reads, self.cell.activations, strict=True)):
            x = nodes[read] if k else state
            product = self.nodes[k](x)
            gate, value = (product if k else product + word).chunk(2, dim=-1)
            nodes.append(x + torch.sigmoid(gate) * (ACTIVATIONS[activation](value) - x))
        leaves = [nodes[k] for k in self.cell.leaves]
        return torch.stack(leaves).mean(dim=0) if len(leaves) > 1 else leaves[0]


def build(cell: Cell, sizes: Sizes = Sizes()) -> tuple[nn.Module, tuple[Tensor, ...]]:  # noqa: B008 - frozen
    """The model, which returns its loss, and random words."""
    return LanguageModel(cell, sizes), (torch.randint(sizes.vocab_size, (sizes.steps + 1, sizes.batch_size)),)
