"""`baechi compare` on more devices than the machine has cores: each is a share of a core, half of one where there are two to a core.

    python -m benchmarks.half_cores --out=benchmarks/results/four_halves_gpt2.json -- --model_name=gpt2 --dropout=0 --num_devices=4

What stands behind -- are flags of `baechi compare`; steps are run by worker processes. Each worker is a control group of its own, and has a
thread that computes whatever the worker leaves of its share, as time that a slow core is idle is lost, too: so all groups of a core always
compute, and the system gives each as much. It looks at them every half a millisecond, for which a thread of one worker of each core wakes
it up. Time that a thread has computed counts as the time that it takes a core of that speed. Needs Linux, control groups of version 1, and
root.
"""

import argparse
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numba import njit

from baechi_ext.errors import OptionError
from baechi_runtime.host.interrupts import wait_for_imports
from baechi_runtime.torch.processes.environment import is_worker, worker_place
from baechi_runtime.torch.processes.launch import run_workers
from benchmarks import comparing
from benchmarks.runner import Benchmark, Row

GROUPS, PREFIX = Path("/sys/fs/cgroup/cpu"), "baechi_part_of_a_core"
_PRIORITY, _BEAT_US = 50, 500
"""The priority of the real-time threads that wake the system up, and how long they sleep between."""
_WINDOW_SECONDS, _UNSETTLED = 0.5, 6
"""In the first windows others may still begin, and leave more than they will."""
_usleep = ctypes.CDLL(None).usleep
_usleep.argtypes = (ctypes.c_uint,)


@njit(nogil=True)
def _burn(x: int) -> int:
    while x:
        x = x * 5 + 2
    return x


@njit(nogil=True)
def _beat(us: int) -> None:
    while True:
        _usleep(us)


@contextlib.contextmanager
def groups(count: int) -> Iterator[None]:
    """Within, there are control groups for the workers that this process starts; and none left of processes that are gone."""
    for path in GROUPS.glob(f"{PREFIX}_*"):
        with contextlib.suppress(OSError):  # in use
            path.rmdir()
    paths = [_group(os.getpid(), rank) for rank in range(count)]
    try:
        for path in paths:
            path.mkdir()
        yield
    finally:
        for path in paths:
            with contextlib.suppress(OSError):
                path.rmdir()


def _group(parent: int, rank: int) -> Path:
    return GROUPS / f"{PREFIX}_{parent}_{rank}"


def become_part_of_a_core(rank: int, cores: Sequence[int], windows: int = 20) -> float:
    """Makes this process, in its group, one of those that share these cores; returns its share of a core: the most that it gets in one of
    these windows of time, since others only ever take away from it. All have to do it at about the same time."""
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    (_group(os.getppid(), rank) / "cgroup.procs").write_text(str(os.getpid()))
    if rank < len(cores):
        threading.Thread(target=_keep_waking, daemon=True).start()
    rest = threading.Thread(target=_use_up, daemon=True)
    rest.start()
    clock = time.pthread_getcpuclockid(rest.ident or 0)
    shares = []
    for _ in range(_UNSETTLED + windows):
        begin, used = time.perf_counter(), time.clock_gettime(clock)
        time.sleep(_WINDOW_SECONDS)
        shares.append((time.clock_gettime(clock) - used) / (time.perf_counter() - begin))
    return max(shares[_UNSETTLED:])


def _use_up() -> None:
    """Computes with what the process's other threads leave."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _burn(1)


def _keep_waking() -> None:
    """Has the system choose, every so often, who computes: by itself it does so some 250 times a second."""
    (GROUPS / "tasks").write_text(str(threading.get_native_id()))  # other groups may have no real-time threads
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    _beat(_BEAT_US)


def count_by_share(share: float, cores: Sequence[int]) -> None:
    """Has the clocks of devices tell the time of a core of that speed, and the devices know the whole machine's cores."""
    from baechi_runtime.torch import profiler
    from baechi_runtime.torch.lowering import devices

    own = time.thread_time_ns
    time.thread_time_ns = lambda: int(own() / share)
    profiler._waited_for_core_ns = lambda: 0
    devices.available_cores = lambda: tuple(cores)  # type: ignore[attr-defined]  # which it imports


def compared(request: Any) -> Iterator[Row]:
    """A worker's part; the first one's is the comparison."""
    cores = sorted(os.sched_getaffinity(0))
    share = become_part_of_a_core(worker_place()[0], cores)
    count_by_share(share, cores)
    from baechi_runtime.drivers.comparing import compare
    from baechi_runtime.sharding.ranked import TorchEngines, on_devices

    comparison = compare(request, on_devices, TorchEngines)
    if comparison is not None:
        yield {"share_of_a_core": share, **comparison.to_json()}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Starts the workers; the first of them tells."""
    request = comparing.request_of(args)
    count = request.train.num_devices
    if is_worker():
        yield from compared(request)
        return
    if os.getuid() or not (GROUPS / "cgroup.procs").exists():
        raise OptionError(f"control groups are made in {GROUPS}, which needs Linux with version 1 of them, and root")
    wait_for_imports()  # SIGTERM ends the workers, and their groups
    with groups(count):
        run_workers(args.words, count, "benchmarks.half_cores")


def report(found: Row) -> str:
    return f"{found['model']}, each device {found['share_of_a_core']:.3f} of a core\n\n{comparing.report(found)}"


main = Benchmark("half_cores", __doc__, comparing.FLAGS, measure, report).main

if __name__ == "__main__":
    main()
