"""Devices that share cores: each process is in a group of its own, which always computes, and nothing is left of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baechi_runtime.torch import profiler
from baechi_runtime.torch.lowering import devices
from benchmarks import half_cores

needs_groups = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0 or not os.access(half_cores.GROUPS / "cgroup.procs", os.W_OK),
    reason="needs control groups of version 1, and root",
)
WORKER = """
import json, os, sys, threading, time
from benchmarks import half_cores
core = min(os.sched_getaffinity(0))
share = half_cores.become_part_of_a_core(int(sys.argv[1]), [core], 1)
threads = [int(name) for name in os.listdir("/proc/self/task")]
group = next(line for line in open("/proc/self/cgroup") if ":cpu:" in line).strip().partition(":cpu:/")[2]
policies = [os.sched_getscheduler(thread) for thread in threads]
cores = sorted(os.sched_getaffinity(0))
print(json.dumps({"share": share, "core": [core], "cores": cores, "group": group, "policies": policies}), flush=True)
time.sleep(600)
"""


@needs_groups
def test_processes_share_a_core() -> None:
    """The first of a core has a thread that wakes the system up, which is in no group. A group goes when its process has been killed."""
    with half_cores.groups(2):
        command = [sys.executable, "-c", WORKER]
        workers = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        try:
            found = [json.loads(worker.stdout.readline()) for worker in workers]
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGKILL)
                worker.communicate()
        names = [f"{half_cores.PREFIX}_{os.getpid()}_{rank}" for rank in range(2)]
        assert [row["group"] for row in found] == names
    assert all(row["cores"] == row["core"] and 0 < row["share"] < 1 for row in found)
    assert [row["policies"].count(os.SCHED_FIFO) for row in found] == [1, 0]
    assert [row["policies"].count(os.SCHED_IDLE) for row in found] == [1, 1]
    assert not any((half_cores.GROUPS / name).exists() for name in names)


@needs_groups
def test_groups_of_processes_that_are_gone_are_removed() -> None:
    left = half_cores.GROUPS / f"{half_cores.PREFIX}_0_0"
    left.mkdir(exist_ok=True)
    with half_cores.groups(1):
        assert not left.exists()


def test_devices_tell_the_time_of_a_slower_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """On half a core a thread computes twice as long, and its waits for the core are no longer left out."""
    own = time.thread_time_ns
    for module, name in ((time, "thread_time_ns"), (profiler, "_waited_for_core_ns"), (devices, "available_cores")):
        monkeypatch.setattr(module, name, getattr(module, name))
    half_cores.count_by_share(0.5, [3, 5])
    before = own()
    at = devices.CpuDevice(1).mark()
    after = own()
    assert 2 * before <= at <= 2 * after
    assert devices.CpuDevice(1).core == 5
    assert profiler._clocked(lambda: 7)[1] == 7 and profiler._waited_for_core_ns() == 0


@needs_groups
@pytest.mark.slow
def test_a_comparison_on_more_devices_than_cores(tmp_path: Path) -> None:
    file, more = tmp_path / "found.json", len(os.sched_getaffinity(0)) + 1
    flags = ["--model_name=transformer", "--batch_size=2", "--num_layers=1", "--d_model=16", "--d_ff=16", "--vocab_size=9", "--dropout=0"]
    flags += [f"--num_devices={more}", "--placement_methods=single,m_etf", "--num_steps=2"]
    subprocess.run([sys.executable, "-m", "benchmarks.half_cores", f"--out={file}", "--", *flags], check=True)
    found = json.loads(file.read_text())
    assert 0 < found["share_of_a_core"] < 1
    assert [row["method"] for row in found["methods"]] == ["single", "m_etf"]
    assert all(row["parity"]["passed"] and len(row["measured_step_us"]["samples"]) == 2 for row in found["methods"])
