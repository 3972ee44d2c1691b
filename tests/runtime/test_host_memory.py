"""The share of the machine's memory that this process may use, by the control groups it is in."""

import os
from pathlib import Path

import pytest

from baechi_runtime.host.host_memory import available_bytes, usable_bytes

GIB = 2**30
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
UNLIMITED = 9223372036854771712
"""Version 1's value where there is no limit."""


def system(root: Path, membership: str, limits: dict[str, str]) -> dict[str, Path]:
    """A system's files: /proc/self/cgroup and the limits below /sys/fs/cgroup."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(membership)
    for path, text in limits.items():
        file = root / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return {"proc": root / "proc", "cgroups": root / "cgroup"}


V1 = "9:name=systemd:/\n4:memory:/jobs/one\n3:cpu,cpuacct:/jobs/one\n"


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/jobs/one\n", {"jobs/one/memory.max": str(GIB)}, GIB),
        ("0::/jobs/one\n", {"jobs/one/memory.max": "max", "jobs/memory.max": str(GIB // 2), "memory.max": "max"}, GIB // 2),
        ("0::/\n", {"memory.max": str(GIB)}, GIB),
        ("0::/not/seen/from/here\n", {"memory.max": str(GIB)}, GIB),
        ("0::/jobs/one\n", {"jobs/one/memory.max": "max"}, MACHINE),
        (V1, {"memory/jobs/one/memory.limit_in_bytes": str(GIB), "memory/memory.limit_in_bytes": str(UNLIMITED)}, GIB),
        (V1, {"memory/jobs/memory.limit_in_bytes": str(GIB)}, GIB),
        (V1, {"memory/jobs/one/memory.limit_in_bytes": str(UNLIMITED)}, MACHINE),
        (V1, {"cpu/jobs/one/memory.limit_in_bytes": str(GIB)}, MACHINE),
        (V1 + "0::/\n", {"unified/memory.max": str(GIB), "memory/memory.limit_in_bytes": str(2 * GIB)}, GIB),
        ("", {}, MACHINE),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, membership: str, limits: dict[str, str], expected: int) -> None:
    assert usable_bytes(**system(tmp_path, membership, limits)) == expected


MIB = 2**20
OF_FILES = f"anon 5\ninactive_file {60 * MIB}\nactive_file {40 * MIB}"


@pytest.mark.parametrize(
    ("membership", "files", "left_mib"),
    [
        ("0::/a/b\n", {"a/b/memory.max": str(GIB), "a/b/memory.current": str(600 * MIB), "a/b/memory.stat": OF_FILES}, 524),
        ("0::/a/b\n", {"a/b/memory.max": str(GIB), "a/b/memory.current": str(600 * MIB)}, 424),
        ("0::/a/b\n", {"a/b/memory.max": str(GIB), "a/b/memory.current": str(2 * GIB)}, 0),
        ("0::/a/b\n", {"a/b/memory.max": str(GIB), "a/memory.max": str(2 * GIB), "a/memory.current": str(2000 * MIB)}, 48),
        ("0::/a/b\n", {"a/b/memory.max": str(GIB)}, 1024),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": str(600 * MIB)}, 3072),
        (
            V1,
            {
                "memory/jobs/one/memory.limit_in_bytes": str(GIB),
                "memory/jobs/one/memory.usage_in_bytes": str(600 * MIB),
                "memory/jobs/one/memory.stat": f"inactive_file 1\ntotal_inactive_file {90 * MIB}\ntotal_active_file {10 * MIB}",
            },
            524,
        ),
    ],
)
def test_what_a_group_holds_is_taken(tmp_path: Path, membership: str, files: dict[str, str], left_mib: int) -> None:
    """But for files that it may drop. The machine has 3 GiB left."""
    where = system(tmp_path, membership, files)
    (where["proc"] / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {3 * 2**20} kB\n")
    assert available_bytes(**where) == left_mib * MIB


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert usable_bytes(tmp_path, tmp_path) == MACHINE


def test_this_process() -> None:
    assert 0 < usable_bytes() <= MACHINE
