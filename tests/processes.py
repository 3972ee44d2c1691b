"""Looks at processes: those that run, that have ended, and whose children they are."""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def runs(pid: int) -> bool:
    """True unless it has ended, whether or not anybody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids: Iterable[int], within_seconds: float = 60.0) -> bool:
    """True once all have; False where one still runs after so long, which is generous by default, since the machine may be busy."""
    until, left = time.monotonic() + within_seconds, list(pids)
    while any(map(runs, left)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def children_of(parent: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").glob("*"):
        with suppress(FileNotFoundError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found
