"""The memory that this process holds, as the system reports it: now, and at most since a reset. Only Linux does."""

import contextlib
import ctypes
import platform
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CLEAR_HIGH_WATER = "5"


def trim() -> None:
    """Gives back to the system what malloc holds free."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Bytes that this process holds in memory. Raises OSError where the system does not tell."""
    return _field("VmRSS")


def data_bytes() -> int | None:
    """Bytes of its private writable memory, resident or not; None where the system does not tell."""
    with contextlib.suppress(OSError):
        return _field("VmData")
    return None


def high_water_bytes() -> int:
    """The most bytes it has held since `reset_high_water`. Raises OSError where the system does not tell."""
    return _field("VmHWM")


def reset_high_water() -> None:
    """Starts a new measurement of the most bytes held. Raises OSError where the system cannot."""
    _CLEAR.write_text(_CLEAR_HIGH_WATER, encoding="ascii")


def can_tell() -> bool:
    """True if the most bytes held can be measured here."""
    try:
        reset_high_water()
        return high_water_bytes() > 0
    except OSError:
        return False


def _field(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
