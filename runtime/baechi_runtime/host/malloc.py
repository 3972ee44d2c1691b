"""This process's malloc, told to keep what is freed while the machine has memory to spare. Only glibc's can be told so."""

import contextlib
import ctypes
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from baechi_runtime.host import process_memory
from baechi_runtime.host.host_memory import available_bytes, usable_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_LARGE_BYTES, _SMALL_BYTES = 32 * 1024 * 1024, 128 * 1024
"""Sizes from which on a block is mapped, and given back when it is freed: the largest that glibc takes on 64-bit machines, and the one that
it begins with."""
_MAPPINGS = 65_536
"""Blocks that glibc maps at one time, at most, when it begins."""
_LOOK_SECONDS = 5.0


@dataclass
class _State:
    mappings: int = 0
    """Blocks that may be mapped now, but for those of `freed_memory_given_back`."""
    next_look: float = 0.0


_STATE = _State()


def _tell(*settings: tuple[int, int]) -> bool:
    mallopt = ctypes.CDLL(None).mallopt
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)


@cache
def keep_freed_memory() -> bool:
    """Tells malloc to keep what is freed, in one heap for all threads. True if that was possible.

    Large tensors come and go hundreds of times a step, and giving their pages back to the system costs page faults: a quarter of a step of
    GPT-2 with 50,257 words (benchmarks/results/kept_memory.md). It holds for the whole process, so for an eager step in it as well:
    comparisons in one process stay fair. A process holds up to 1.4 times as much then, so see `mind_shortage`.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    return _tell((_M_TRIM_THRESHOLD, -1), (_M_MMAP_THRESHOLD, _LARGE_BYTES), (_M_MMAP_MAX, _STATE.mappings), (_M_ARENA_MAX, 1))


def map_large_blocks() -> None:
    """From now on what is larger than 32 MiB, and has no room in the heap as it is, goes back to the system when it is freed."""
    _STATE.mappings = _MAPPINGS
    if keep_freed_memory():
        _tell((_M_MMAP_MAX, _MAPPINGS))


def mind_shortage() -> None:
    """Gives back what is free where this process holds more than is left for it; from then on the heap does not grow by large blocks. To
    be called after each step: it looks once in five seconds."""
    now = time.monotonic()
    if now < _STATE.next_look or not keep_freed_memory():
        return
    _STATE.next_look = now + _LOOK_SECONDS
    with contextlib.suppress(OSError):  # not Linux
        held, left = process_memory.resident_bytes(), available_bytes()
        if left is not None and held > min(left, usable_bytes() - held):
            map_large_blocks()
            process_memory.trim()


@contextlib.contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """While its body runs, all but small blocks that have no room in the heap go back to the system when they are freed. What is held then
    is what is used, once the heap is trimmed, and a step takes a fifth to two fifths more CPU time, in page faults."""
    if keep_freed_memory():
        _tell((_M_MMAP_THRESHOLD, _SMALL_BYTES), (_M_MMAP_MAX, _MAPPINGS))
    try:
        yield
    finally:
        if keep_freed_memory():
            _tell((_M_MMAP_THRESHOLD, _LARGE_BYTES), (_M_MMAP_MAX, _STATE.mappings))
