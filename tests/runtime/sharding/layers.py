"""A module of embeddings and linear layers, and plans for torch's parallelize_module by which its calls are split."""

import torch
from torch import Tensor, nn

from baechi_runtime.sharding.captured import captured_graph, forward_graph
from baechi_runtime.sharding.tensor_parallel import TensorParallelPlan, tensor_parallel_plan


class Layers(nn.Module):
    """Two embeddings, one of them tied, and a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.up, self.down, self.gate = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(words)
        x = x + self.gate(self.down(nn.functional.gelu(self.up(x))))
        return nn.functional.linear(x, self.words.weight).square().mean()


def words() -> Tensor:
    """The input of Layers."""
    return torch.randint(16, (4, 4))


def plan(module: Layers, **splits: dict[str, int]) -> TensorParallelPlan:
    """The plan of a strategy: by call, into how many parts which of its loops are split."""
    captured = captured_graph(forward_graph(module, (words(),)))
    strategy = [tuple(splits.get(node.name, {}).get(axis.name, 1) for axis in node.axes) for node in captured.graph.nodes]
    return tensor_parallel_plan(captured, strategy)
