"""Pins and device maps for a module in the caller's own loop, whether its call is one fragment or several."""

import pytest
import torch
from torch import Tensor, nn

import baechi_ext
from baechi_ext.errors import FileError, MissingBackendError, OptionError
from baechi_ext.ir import Plan
from baechi_ext.ir.hints import nearest_map

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""TorchDynamo reads it of what one fragment hands to the next one."""


@pytest.fixture(autouse=True)
def unknown_to_dynamo() -> None:
    torch.compiler.reset()


class Towers(nn.Module):
    def __init__(self, takes_a_number: bool) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.takes_a_number = takes_a_number

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + self.b(x)
        if self.takes_a_number and y.sum() > 1e9:
            y = y * 2
        return self.head(y)


def plan_of(takes_a_number: bool, **options: object) -> Plan:
    """The plan, after three steps."""
    torch.manual_seed(0)
    module = Towers(takes_a_number)
    placed = baechi_ext.parallelize(module, devices=2, strict=True, keep_placed=True, **options)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        placed(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
    report = baechi_ext.report(placed)
    assert (report.fragments, report.placed_steps) == (2 if takes_a_number else 1, 2)
    return report.plan


def devices_of(plan: Plan, module: str) -> set[int]:
    return {d for op, d in zip(plan.graph.ops, plan.placement, strict=True) if op.module is not None and op.module.split(".")[0] == module}


@pytest.mark.parametrize("takes_a_number", [False, True])
def test_pins(takes_a_number: bool) -> None:
    plan = plan_of(takes_a_number, method="m_etf", pins=["a=1", "b=0"])
    assert (devices_of(plan, "a"), devices_of(plan, "b")) == ({1}, {0})
    assert plan.options["pins"] == ["a=1", "b=0"]


@pytest.mark.parametrize("takes_a_number", [False, True])
def test_what_is_inside_of_a_module(takes_a_number: bool) -> None:
    plan = plan_of(takes_a_number, method="m_etf", pins=["a.2=1", "b.2=0"])
    pinned = {op.module: d for op, d in zip(plan.graph.ops, plan.placement, strict=True) if op.module in ("a.2", "b.2")}
    assert pinned == {"a.2": 1, "b.2": 0}
    plan = plan_of(takes_a_number, method="expert", device_map={"a.0": 1, "a.1": 1, "a.2": 1, "b": 0, "head": 0})
    assert (devices_of(plan, "a"), devices_of(plan, "b")) == ({1}, {0})


@pytest.mark.parametrize("takes_a_number", [False, True])
def test_device_maps(takes_a_number: bool) -> None:
    given = {"a": 0, "b": 1, "head": 0}
    plan = plan_of(takes_a_number, method="expert", device_map=given)
    assert (devices_of(plan, "a"), devices_of(plan, "b"), devices_of(plan, "head")) == ({0}, {1}, {0})
    assert nearest_map(plan.graph, plan.placement) == given
    named = {name: torch.device(f"cpu:{d}") for name, d in given.items()}
    assert plan_of(takes_a_number, method="expert", device_map=named).placement == plan.placement


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="^device_map is only for the methods expert, auto, refine; "):
        baechi_ext.parallelize(Towers(False), devices=2, method="m_etf", device_map={"": 0})
    with pytest.raises(OptionError, match="^cuda_graphs=True needs CUDA devices"):
        baechi_ext.parallelize(Towers(False), devices=2, cuda_graphs=True)
    with pytest.raises(MissingBackendError, match=r"^cuda:98 is not on this machine, which has \d+ CUDA devices?$"):
        baechi_ext.parallelize(Towers(False), devices=["cuda:98", "cuda:99"])
    with pytest.raises(OptionError, match="'a' is not a pin"):
        baechi_ext.parallelize(Towers(False), devices=2, pins=["a"])
    with pytest.raises(FileError, match="device_map: the model has no module or parameter 'c'"):
        plan_of(False, method="expert", device_map={"": 0, "c": 1})
    with pytest.raises(OptionError, match="the pin 'c=1' matches nothing"):
        plan_of(False, method="m_etf", pins=["c=1"])
