"""A worker's memory limit is the system's: what goes beyond it is refused, and afterwards it is gone.

Where it is looked at closely that is in a process of its own: what earlier tests freed, malloc gives out again, whatever the limit.
"""

import pytest
import torch

from baechi_runtime.torch.lowering.memory_limit import SLACK_BYTES, MemoryLimit
from benchmarks.runner import in_fresh_process

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


def three_steps_with_more_loaded_before_each() -> list[str]:
    """The messages of what is refused in them."""
    more, kept, refused = 64 * MIB, [], []
    limit = MemoryLimit(more)
    for _ in range(3):
        kept.append(torch.ones(2 * (more + SLACK_BYTES), dtype=torch.uint8))
        with limit:
            assert torch.ones(more // 2, dtype=torch.uint8)[-1] == 1
            try:
                torch.ones(more + SLACK_BYTES + 8 * MIB, dtype=torch.uint8)
            except RuntimeError as e:
                refused.append(str(e))
    return refused


def test_what_is_loaded_between_two_steps_is_not_charged_to_either() -> None:
    refused = in_fresh_process(three_steps_with_more_loaded_before_each)
    assert ["can't allocate memory" in message for message in refused] == [True] * 3


def steps_until_one_is_refused() -> tuple[int, str]:
    """Each keeps 64 MiB, of 256."""
    more, kept = 256 * MIB, []
    limit = MemoryLimit(more)
    try:
        for _ in range(8):
            with limit:
                kept.append(torch.ones(more // 4, dtype=torch.uint8))
    except RuntimeError as e:
        return len(kept), str(e)
    return len(kept), ""


def test_what_a_step_keeps_is_charged_to_the_next() -> None:
    steps, message = in_fresh_process(steps_until_one_is_refused)
    assert "can't allocate memory" in message
    assert 4 <= steps < 6
