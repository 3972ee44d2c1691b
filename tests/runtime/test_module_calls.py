"""Calls of modules while a script runs."""

import pytest
import torch
from torch import Tensor, nn

from baechi_runtime.torch.calls.module_calls import outermost_calls

LAYERS = torch._dynamo.config.recompile_limit + 4


def layer() -> nn.Module:
    """A layer of a class whose forward is code of its own."""
    names = {"nn": nn}
    exec("class Layer(nn.Linear):\n    def forward(self, x, **more):\n        return super().forward(x) * more.get('scale', 1.0)", names)
    return names["Layer"](4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for number, each in enumerate(self.layers):
            print(end="")
            x = each(x, scale=0.5) if number % 2 else each(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_more_layers_behind_graph_breaks_than_a_function_has_traces_are_all_traced() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    net = Net()
    with outermost_calls(lambda _, ordinary: torch.compile(ordinary, backend=backend)):
        net(torch.ones(2, 4))
    assert len(graphs) == LAYERS
