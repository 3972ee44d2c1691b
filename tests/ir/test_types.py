"""Habits of the value types: frozen, and units in the names of their fields."""

from typing import get_type_hints

import pytest

from baechi_ext.cost import LinkFit, OpProfile
from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph, Plan, Tensor
from baechi_ext.simulate import Timeline, Transfer

VALUES = [Op, Tensor, OpGraph, Device, Link, Cluster, Plan, OpProfile, LinkFit, Transfer, Timeline]
UNITS = ("_us", "_bytes", "_us_per_byte", "_seconds", "flop")
NO_UNIT = {"bytes", "us_per_byte", "speed", "r_squared", "seed", "producer", "tensor", "source", "target", "expert", "pin", "part"}


@pytest.mark.parametrize("value", VALUES)
def test_values_are_frozen(value: type) -> None:
    assert issubclass(value, tuple) or value.__dataclass_params__.frozen


@pytest.mark.parametrize("value", VALUES)
def test_numbers_carry_their_unit(value: type) -> None:
    hints = get_type_hints(value)
    numbers = [
        name for name, hint in hints.items() if {int, float} & set(getattr(hint, "__args__", (hint,))) and name not in NO_UNIT
    ]
    tables = {"inputs", "outputs", "readers", "placement", "priority", "started"}
    assert [name for name in numbers if not name.endswith(UNITS) and name not in tables] == []
