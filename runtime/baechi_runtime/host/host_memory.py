"""Host memory: how much of it this process may use, and how to keep what is freed."""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
"""The most that glibc takes on 64-bit machines."""
_SMALL_MMAP_THRESHOLD = 128 * 1024
"""The value that glibc begins with."""


def use_huge_pages() -> None:
    """Has torch, which is not imported yet, take huge pages for tensors of 2 MiB and more, unless the environment says otherwise.

    malloc gives what is larger than 32 MiB back to the system each time. AlexNet's step, whose largest weights are, spends a fifth of its
    time in page faults without them (benchmarks/results/huge_pages.md).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@cache
def keep_freed_memory() -> bool:
    """Tells this process's malloc to keep what is freed, in one heap for all threads. True if that was possible (only glibc can).

    Large tensors come and go hundreds of times a step, and giving their pages back to the system each time costs a few per cent of the
    step in page faults, most of all in threads that are not the main one. It holds for the whole process, so for an eager step in it as
    well: comparisons in one process stay fair.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_M_ARENA_MAX, 1))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)


@contextlib.contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """While its body runs, all but small blocks go back to the system when they are freed. What is held then is what is used, and a step
    takes a fifth to two fifths more CPU time, in page faults."""
    if keep_freed_memory():
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _SMALL_MMAP_THRESHOLD)
    try:
        yield
    finally:
        if keep_freed_memory():
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def usable_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The machine's memory, or the least that a control group (version 1 or 2) of this process or above it allows."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [machine]
    for file in _limit_files(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):  # no such group seen from here; "max"
            limits.append(int(file.read_text(encoding="ascii")))
    return min(limits)


def _limit_files(proc: Path, cgroups: Path) -> list[Path]:
    """The files that may hold limits: one for the process's group, and one for each group above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    files: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        own = PurePosixPath(path.lstrip("/"))
        if number == "0":
            files += [root / group / "memory.max" for root in (cgroups, cgroups / "unified") for group in (own, *own.parents)]
        elif "memory" in controllers.split(","):
            files += [cgroups / "memory" / group / "memory.limit_in_bytes" for group in (own, *own.parents)]
    return files


def available_bytes() -> int | None:
    """Bytes that could be taken now without swapping; None where the system does not say (only Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else min(found, usable_bytes())
