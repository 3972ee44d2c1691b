"""The time that another process spends on cores, to the nanosecond."""

import time

_OF_PROCESS = 2
"""Linux's number for the clock of the time that a process's threads spend on cores."""


def cpu_ns(pid: int) -> int:
    """Nanoseconds on cores of a process with all the threads it ever had; 0 where the system does not say."""
    try:
        return time.clock_gettime_ns((~pid << 3) | _OF_PROCESS)
    except OSError:
        return 0
