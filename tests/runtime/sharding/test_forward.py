"""The forward graph: its ops, and whose tensor each placeholder is."""

import pytest
import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.errors import CaptureError
from baechi_runtime.sharding.captured import forward_graph


class Tied(nn.Module):
    """Two layers with one weight, a constant, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        y = self.norm(self.second(self.first(x))) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return nn.functional.mse_loss(y, wanted)


def test_placeholders_have_the_modules_names() -> None:
    module = Tied()
    graph = forward_graph(module, (torch.randn(3, 4), torch.randn(3, 4)))
    read = {n.name for call in graph.nodes for n in call.all_input_nodes}
    weights = {graph.parameters[name] for name in read & graph.parameters.keys()}
    assert weights == {"first.weight", "first.bias", "second.bias", "norm.weight", "norm.bias"}
    assert set(graph.buffers.values()) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert [t.tolist() for t in graph.constants.values()] == [[1.0, 2.0, 3.0, 4.0]]
    assert len(graph.inputs) == 2
    assert graph.loss.name == graph.nodes[-1].name
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("aten.linear.default") == 2
    assert module.norm.num_batches_tracked == 0


class LastStates(nn.Module):
    """The last states of two layers of an LSTM, joined, and a layer that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6, 2), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, c) = self.lstm(x)
        return self.last(torch.cat([h.sum(0), c[-1]], 1)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_lstms_last_states_are_captured_as_it_returns_them(dtype: torch.dtype) -> None:
    module, x = LastStates().to(dtype), torch.randn(5, 3, 4, dtype=dtype)
    lstm = next(node for node in forward_graph(module, (x,)).nodes if "lstm" in str(node.target))
    assert [t.shape for t in lstm.meta["val"][1:]] == [t.shape for t in module.lstm(x)[1]]
    graph, _ = capture_joint(module, (x,), CaptureOptions())
    assert "aten.cat" in [op.op for op in graph.ops]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() if x.sum() > 0 else x.mean()


@pytest.mark.parametrize(("module", "message"), [(Branches(), "keep it a tensor"), (nn.Linear(4, 4), "one scalar loss")])
def test_what_cannot_be_captured_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        forward_graph(module, (torch.randn(3, 4),))
