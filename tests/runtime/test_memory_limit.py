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


def test_what_is_loaded_between_two_steps_is_not_charged_to_either() -> None:
    more, kept = 64 * MIB, []
    limit = MemoryLimit(more)
    for _ in range(3):
        kept.append(torch.ones(2 * (more + SLACK_BYTES), dtype=torch.uint8))
        with limit:
            assert torch.ones(more // 2, dtype=torch.uint8)[-1] == 1
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                torch.ones(more + SLACK_BYTES + 8 * MIB, dtype=torch.uint8)


def test_what_a_step_keeps_is_charged_to_the_next() -> None:
    more, kept = 256 * MIB, []
    limit = MemoryLimit(more)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        for _ in range(8):
            with limit:
                kept.append(torch.ones(more // 4, dtype=torch.uint8))
    assert 4 <= len(kept) < 6
