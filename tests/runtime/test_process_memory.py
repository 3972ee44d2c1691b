"""The memory that a process holds, by the system: it rises with what is used, falls with what is given back, and its high water stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baechi_runtime.host import process_memory
from baechi_runtime.host.malloc import freed_memory_given_back, keep_freed_memory
from baechi_runtime.torch.lowering.op_error import in_words, storages_of
from baechi_runtime.torch.threads.accounting import CountedSlots

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
KEEPS = pytest.mark.skipif(not keep_freed_memory(), reason="this malloc cannot be told what to keep")
pytestmark = pytest.mark.skipif(not process_memory.can_tell(), reason="the system does not tell a process's high water")


def test_the_high_water_is_of_what_was_held_at_one_time() -> None:
    """In a process of its own: what other tests have left in this one may be given back meanwhile."""
    code = "from tests.runtime.test_process_memory import hold_and_let_go; hold_and_let_go()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def hold_and_let_go() -> None:
    with freed_memory_given_back():
        torch.ones(8 * MIB)  # the first one takes pages of torch's own, 9 MiB with torch 2.15
        process_memory.trim()
        process_memory.reset_high_water()
        before = process_memory.resident_bytes()
        for _ in range(3):
            torch.ones(8 * MIB)  # 32 MiB, gone at once
        one = process_memory.high_water_bytes() - before
        two = [torch.ones(8 * MIB) for _ in range(2)]
        both = process_memory.high_water_bytes() - before
        del two
        assert abs(process_memory.resident_bytes() - before) < 2 * MIB
    assert abs(one - 32 * MIB) < 2 * MIB
    assert abs(both - 64 * MIB) < 2 * MIB
    process_memory.reset_high_water()
    assert process_memory.high_water_bytes() - before < 2 * MIB


@KEEPS
def test_afterwards_freed_memory_is_kept_again() -> None:
    with freed_memory_given_back():
        torch.ones(4 * MIB)
    blocks = [torch.ones(MIB) for _ in range(16)]
    held = process_memory.resident_bytes()
    del blocks
    assert held - process_memory.resident_bytes() < 16 * MIB
    process_memory.trim()
    assert held - process_memory.resident_bytes() > 32 * MIB  # of 64: threads of other tests may take some meanwhile


def faults_of(code: str) -> list[int]:
    """Page faults of a few blocks of 64 MiB that are gone at once, each time that `code`, in a process of its own, calls `large`."""
    beginning = (
        "import resource\n"
        "from baechi_runtime.host import malloc\n"
        "def large():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(4):\n"
        "        b'x' * (64 * 2**20)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", beginning + code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return [int(line) for line in done.stdout.splitlines()]


ALL_PAGES = 4 * 64 * MIB // os.sysconf("SC_PAGE_SIZE")


@KEEPS
def test_what_is_kept_costs_no_page_faults() -> None:
    mapped, *_, kept = faults_of("large(); malloc.keep_freed_memory(); large(); large(); large(); large()\n")
    assert mapped > 0.9 * ALL_PAGES
    assert kept < 0.01 * ALL_PAGES


@KEEPS
def test_the_heap_does_not_grow_by_blocks_that_are_mapped() -> None:
    *_, mapped = faults_of("malloc.keep_freed_memory(); malloc.map_large_blocks(); large(); large()\n")
    given_back, *_, kept = faults_of("with malloc.freed_memory_given_back():\n    large()\nlarge(); large(); large(); large()\n")
    assert mapped > 0.9 * ALL_PAGES
    assert given_back > 0.9 * ALL_PAGES
    assert kept < 0.01 * ALL_PAGES


@KEEPS
@pytest.mark.parametrize("left_mib", [100, 10_000])
def test_what_is_free_goes_back_where_less_is_left_than_is_held(left_mib: int) -> None:
    given_back = faults_of(
        "from baechi_runtime.host import process_memory\n"
        "malloc.keep_freed_memory()\n"
        "blocks = [b'x' * (number * 2**20) for number in range(100, 104)]\n"
        "del blocks[1:]\n"
        "held = process_memory.resident_bytes()\n"
        f"malloc.usable_bytes = lambda: held + {left_mib * MIB}\n"
        "malloc.mind_shortage()\n"
        "print(held - process_memory.resident_bytes())\n"
    )[0]
    assert (given_back > 250 * MIB) == (left_mib == 100)


def test_live_tensors_are_counted_once_and_parameters_go_by_their_names() -> None:
    big, small = torch.zeros(1000), torch.zeros(10)
    live = storages_of([("conv:0", big), ("view", big[10:]), ("relu:0", small), ("nothing", None), ("mean:0", torch.zeros(2))])
    said = in_words(live | storages_of({"weight": torch.zeros(500), "bias": small}.items()))
    largest = "conv:0 (4000 bytes), weight (2000 bytes), bias (40 bytes)"
    assert said == f"it held {4 * (1000 + 10 + 2 + 500)} bytes then, most of them in {largest}"
    assert in_words({}) == "it held 0 bytes then, most of them in no tensor"


def test_sparse_tensors_are_their_indices_and_values() -> None:
    gradient = torch.sparse_coo_tensor(torch.tensor([[3, 5]]), torch.ones(2, 10), (1000, 10), check_invariants=True)
    assert in_words(storages_of([("embedding", gradient)])).startswith(f"it held {2 * 8 + 2 * 10 * 4} bytes then")
    slots = CountedSlots(2, set())
    slots[0] = [gradient, torch.ones(5)]
    assert slots.bytes == 2 * 8 + 2 * 10 * 4 + 5 * 4
    slots[0] = None
    assert slots.bytes == 0
