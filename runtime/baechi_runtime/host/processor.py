"""The machine a measurement is of, and the cores of it that are ours."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """The CPU's name as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def available_cores() -> tuple[int, ...]:
    """The cores this thread may use, in order: all of the process's until a device is entered."""
    return tuple(sorted(os.sched_getaffinity(0)))
