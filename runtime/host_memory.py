"""Host memory that stays mapped: large tensors come and go hundreds of times a step, and giving their pages back to the system each time
costs a few per cent of the step in page faults, most of all in threads that are not the main one."""

import ctypes
import platform
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024
"""What glibc takes at most on 64-bit machines."""


@cache
def keep_freed_memory() -> bool:
    """Tells this process's malloc to keep what is freed, in one heap for all threads. Whether that was possible (glibc alone can).

    It holds for the whole process, so for an eager step in it as well: comparisons in one process stay fair.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_M_ARENA_MAX, 1))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)
