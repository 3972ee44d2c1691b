"""Calls of modules while a script runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from baechi_runtime.torch.calls.module_calls import outermost_calls


def layer_of_its_own(_: int) -> nn.Module:
    """A layer of a class whose forward is code of its own."""
    names = {"nn": nn}
    exec("class Layer(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * 0.5", names)
    return names["Layer"](4, 4)


def layer_of_torch(number: int) -> nn.Module:
    """Another one for every number."""
    return nn.Sequential(nn.Linear(4, 4), *(nn.Tanh() for _ in range(number)))


class Net(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module], count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(number) for number in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            print(end="")  # breaks the graph in a loop, so that the frame runs as it is
            x = each(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("layer", "count"), [(layer_of_its_own, 12), (layer_of_torch, 6)])
def test_layers_behind_graph_breaks_are_traced_each_by_itself(layer: Callable[[int], nn.Module], count: int) -> None:
    """TorchDynamo traces one function 8 times, whatever calls it."""
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    net = Net(layer, count)
    with outermost_calls(lambda _, ordinary: torch.compile(ordinary, backend=backend)):
        net(torch.ones(2, 4))
    assert len(graphs) == count


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", [layer_of_torch, lambda number: Net(layer_of_its_own, number)])
def test_the_scripts_own_compiler_sees_what_it_sees_without_us(kind: Callable[[int], nn.Module]) -> None:
    """TorchDynamo passes over the forward of torch's containers, and so over their layers."""

    def graphs(of: int) -> int:
        torch.compiler.reset()
        found: list[torch.fx.GraphModule] = []
        net = kind(of)
        net.compile(backend=lambda graph, _: found.append(graph) or graph)
        net(torch.ones(2, 4))
        return len(found)

    alone = graphs(12)
    with outermost_calls(lambda _, ordinary: ordinary):
        assert graphs(12) == alone
