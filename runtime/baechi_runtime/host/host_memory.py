"""Host memory: how much of it this process may use."""

import contextlib
import os
from pathlib import Path, PurePosixPath


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


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that could be taken now without swapping: what the machine has left, or the least that a control group has; None where the
    system does not say (only Linux does)."""
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    if found is None:
        return None
    left = [found, usable_bytes(proc, cgroups)]
    for file in _limit_files(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):
            left.append(int(file.read_text(encoding="ascii")) - _held_bytes(file))
    return max(0, min(left))


def _held_bytes(limit: Path) -> int:
    """Bytes that a control group holds, by the file of its limit, without files that it may drop. Raises OSError or ValueError where that
    is not said."""
    kind = "memory.current" if limit.name == "memory.max" else "memory.usage_in_bytes"
    held, files = int(limit.with_name(kind).read_text(encoding="ascii")), 0
    with contextlib.suppress(OSError):
        rows = dict(line.split() for line in limit.with_name("memory.stat").read_text(encoding="ascii").splitlines())
        files = sum(int(rows.get(f"total_{kind}", rows.get(kind, 0))) for kind in ("inactive_file", "active_file"))
    return max(0, held - files)
