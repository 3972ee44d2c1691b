"""Strategies as plans for parallelize_module: what can be expressed, and what is left out."""

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from baechi_ext.errors import OptionError
from baechi_runtime.sharding.tensor_parallel import parallelize_plan
from tests.runtime.sharding.layers import Layers, plan


def test_columns_then_rows_stay_in_parts() -> None:
    found = plan(Layers(), linear={"units": 2}, linear_1={"in_units": 2})
    assert found.parts == 2
    assert found.styles == {"up": "colwise", "down": "rowwise"}
    assert found.left_out == {}


def test_what_stands_alone_reads_and_writes_whole_tensors() -> None:
    assert plan(Layers(), linear={"units": 2}).styles == {"up": "colwise_rep"}
    assert plan(Layers(), linear_1={"in_units": 2}).styles == {"down": "rowwise_rep"}
    assert plan(Layers(), embedding_1={"vocabulary": 2}, linear_2={"units": 2}).styles == {"places": "rowwise_rep", "gate": "colwise_rep"}


def test_what_cannot_be_expressed_is_left_out() -> None:
    found = plan(Layers(), embedding={"vocabulary": 2}, linear={"units": 4}, linear_1={"in_units": 2, "units": 2}, linear_2={"units": 4})
    assert found.parts == 4
    assert found.styles == {"up": "colwise_rep", "gate": "colwise_rep"}
    assert set(found.left_out) == {"words", "down"}


def test_styles_become_torchs() -> None:
    made = parallelize_plan({"a": "colwise", "b": "rowwise_rep"})
    assert isinstance(made["a"], ColwiseParallel)
    assert isinstance(made["b"], RowwiseParallel)
    with pytest.raises(OptionError, match="unknown style 'diagonal'"):
        parallelize_plan({"a": "diagonal"})
