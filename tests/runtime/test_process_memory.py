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

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(not process_memory.can_tell(), reason="the system does not tell a process's high water")


def test_the_high_water_is_of_what_was_held_at_one_time() -> None:
    """In a process of its own: what other tests have left in this one may be given back meanwhile."""
    code = "from tests.runtime.test_process_memory import hold_and_let_go; hold_and_let_go()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def hold_and_let_go() -> None:
    with freed_memory_given_back():
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


@pytest.mark.skipif(not keep_freed_memory(), reason="this malloc cannot be told what to keep")
def test_afterwards_freed_memory_is_kept_again() -> None:
    with freed_memory_given_back():
        torch.ones(4 * MIB)
    blocks = [torch.ones(MIB) for _ in range(16)]
    held = process_memory.resident_bytes()
    del blocks
    assert held - process_memory.resident_bytes() < 16 * MIB
    process_memory.trim()
    assert held - process_memory.resident_bytes() > 48 * MIB


@pytest.mark.skipif("[never]" in HUGE_PAGES.read_text() if HUGE_PAGES.exists() else True, reason="the system has no huge pages")
def test_a_script_of_large_tensors_makes_few_page_faults(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import resource, torch\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(4):\n"
        "    torch.ones(16 * 2**20)\n"  # 64 MiB, gone at once
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    faults = {}
    for kind in ("0", None):
        environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
        environment |= {} if kind is None else {"THP_MEM_ALLOC_ENABLE": kind}
        words = [sys.executable, "-m", "baechi_ext", "train", "--num_devices=1", str(script)]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
        faults[kind] = int(done.stdout.splitlines()[0])
    assert faults["0"] > 4 * 64 * MIB / os.sysconf("SC_PAGE_SIZE") / 2
    assert faults[None] < faults["0"] / 4


def test_live_tensors_are_counted_once_and_parameters_go_by_their_names() -> None:
    big, small = torch.zeros(1000), torch.zeros(10)
    live = storages_of([("conv:0", big), ("view", big[10:]), ("relu:0", small), ("nothing", None), ("mean:0", torch.zeros(2))])
    said = in_words(live | storages_of({"weight": torch.zeros(500), "bias": small}.items()))
    largest = "conv:0 (4000 bytes), weight (2000 bytes), bias (40 bytes)"
    assert said == f"it held {4 * (1000 + 10 + 2 + 500)} bytes then, most of them in {largest}"
    assert in_words({}) == "it held 0 bytes then, most of them in no tensor"
