"""The machine a measurement is of."""

import platform
from pathlib import Path


def processor() -> str:
    """The CPU's name as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
