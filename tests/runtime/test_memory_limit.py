"""A worker's memory limit is the system's: what goes beyond it is refused, and afterwards it is gone."""

import pytest
import torch

from baechi_runtime.torch.lowering.memory_limit import SLACK_BYTES, MemoryLimit

MIB = 1024 * 1024


def test_what_exceeds_the_limit_is_refused_and_what_fits_is_not() -> None:
    more = 64 * MIB
    with MemoryLimit(more):
        assert torch.ones(more // 2, dtype=torch.uint8)[-1] == 1
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.ones(4 * (more + SLACK_BYTES), dtype=torch.uint8)
    assert torch.ones(4 * (more + SLACK_BYTES), dtype=torch.uint8)[-1] == 1


def test_no_limit() -> None:
    with MemoryLimit(None):
        assert torch.ones(512 * MIB, dtype=torch.uint8)[-1] == 1
