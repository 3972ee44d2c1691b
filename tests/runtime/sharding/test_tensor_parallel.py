"""Strategies as plans for parallelize_module: what can be expressed, and what is left out."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from baechi_ext.errors import OptionError
from baechi_runtime.sharding.captured import captured_graph, forward_graph
from baechi_runtime.sharding.tensor_parallel import TensorParallelPlan, parallelize_plan, tensor_parallel_plan


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


def plan(**splits: dict[str, int]) -> TensorParallelPlan:
    forward = forward_graph(Layers(), (torch.randint(16, (4, 4)),))
    captured = captured_graph(forward)
    strategy = [tuple(splits.get(node.name, {}).get(axis.name, 1) for axis in node.axes) for node in captured.graph.nodes]
    return tensor_parallel_plan(captured, strategy)


def test_columns_then_rows_stay_in_parts() -> None:
    found = plan(linear={"units": 2}, linear_1={"in_units": 2})
    assert found.parts == 2
    assert found.styles == {"up": "colwise", "down": "rowwise"}
    assert found.left_out == {}


def test_what_stands_alone_reads_and_writes_whole_tensors() -> None:
    assert plan(linear={"units": 2}).styles == {"up": "colwise_rep"}
    assert plan(linear_1={"in_units": 2}).styles == {"down": "rowwise_rep"}
    assert plan(embedding_1={"vocabulary": 2}, linear_2={"units": 2}).styles == {"places": "rowwise", "gate": "colwise_rep"}


def test_what_cannot_be_expressed_is_left_out() -> None:
    found = plan(embedding={"vocabulary": 2}, linear={"units": 4}, linear_1={"in_units": 2, "units": 2}, linear_2={"units": 4})
    assert found.parts == 4
    assert found.styles == {"up": "colwise_rep", "gate": "colwise_rep"}
    assert set(found.left_out) == {"words", "down"}


def test_styles_become_torchs() -> None:
    made = parallelize_plan({"a": "colwise", "b": "rowwise_rep"})
    assert isinstance(made["a"], ColwiseParallel)
    assert isinstance(made["b"], RowwiseParallel)
    with pytest.raises(OptionError, match="unknown style 'diagonal'"):
        parallelize_plan({"a": "diagonal"})
