"""Split specs of captured models: torch.distributed.pipelining cuts the model into the plan's stages by them."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from baechi_ext.errors import PlanError
from baechi_ext.ir.hints import modules_around
from baechi_ext.ir.split_spec import split_spec, stages_of
from baechi_runtime.models.training_step import TrainingStep, WithLoss, optimizer_spec
from tests.torch_steps import capture


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.mix(self.norm(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(6, 8), nn.ModuleList(Block(8) for _ in range(3)), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def placed_by(devices: dict[str, int]) -> tuple[TrainingStep, list, list[int]]:
    """The step, its graph's stages, and the placement, where a module is on the device of the innermost name that covers it."""
    torch.manual_seed(0)
    step = TrainingStep("layers", WithLoss(Layers()), (torch.randn(4, 6), torch.randint(5, (4,))), optimizer_spec("sgd", 0.1))
    graph, _ = capture(step)
    placement = [next((devices[n] for n in modules_around(op.module or "") if n in devices), 0) for op in graph.ops]
    return step, stages_of(graph, placement), placement


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch 2.13's own
def test_pipelining_cuts_where_the_plan_does() -> None:
    step, stages, _ = placed_by({"first": 1, "blocks.0": 1, "blocks.1": 0, "blocks.2": 0, "head": 2})
    spec = split_spec(stages)
    assert spec == {"blocks.1": "BEGINNING", "head": "BEGINNING"}
    assert [stage.device for stage in stages] == [1, 0, 2]
    model, inputs = step.module.model, step.inputs[0]
    pipe = pipeline(model, mb_args=(inputs,), split_spec={name: SplitPoint[kind] for name, kind in spec.items()})
    assert pipe.num_stages == 3
    parts = [{name.split(".weight")[0].split(".bias")[0] for name, _ in pipe.get_stage_module(i).named_parameters()} for i in range(3)]
    assert parts == [{"first", "blocks.0.norm", "blocks.0.mix"}, {f"blocks.{i}.{m}" for i in (1, 2) for m in ("norm", "mix")}, {"head"}]
    found = pipe(inputs)
    assert torch.equal(found[0] if isinstance(found, tuple) else found, model(inputs))


def test_a_cut_inside_a_module_is_one_of_its_own_parts() -> None:
    _, stages, _ = placed_by({"blocks.1.mix": 1, "blocks.1": 1, "blocks.2": 1, "head": 1})
    assert split_spec(stages) == {"blocks.1": "BEGINNING"}


def test_a_branch_that_comes_back_is_no_chain() -> None:
    with pytest.raises(PlanError, match=r"module 'blocks\.2.*' is on device 0 again, after 'blocks\.1' on device 1"):
        placed_by({"blocks.1": 1})
