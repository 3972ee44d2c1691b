"""Signs of life: rank 0 gives them through the store, the other workers listen. A worker waits for commands as long as rank 0 plans, which
may be hours; without signs of life it would wait as long for a rank 0 that was stopped, or whose machine was cut off.

A thread that is in the store while python ends is killed there, and the whole process with it (SIGABRT): leaving waits for the threads.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import Store

from baechi_runtime.host.error_line import error_line

_BEAT_SECONDS = 1.0
_ENDING_SECONDS = 10.0
"""Time for a thread to end: the store has to answer it, which takes longer where the machine is cut off."""
_KEY, _LEFT = "sign of life", "no further signs of life"


def _clone(store: Store) -> Store:
    """A store of a thread's own: one does one thing at a time, and may be waiting."""
    own: Store = store.clone()  # type: ignore[attr-defined]  # torch's types leave it out
    return own


def give(store: Store) -> Callable[[], None]:
    """Gives signs of life in a thread until the returned function is called."""
    own, enough = _clone(store), threading.Event()

    def beat() -> None:
        count = 0
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever uses it next says so
            while not enough.wait(_BEAT_SECONDS):
                count += 1
                own.set(_KEY, str(count))

    return _started([beat], enough)


def leave(store: Store) -> None:
    """Says that no more signs come since all went well, and gives the others, which take longer, the time to hear it."""
    store.set(_LEFT, "")
    time.sleep(2 * _BEAT_SECONDS)


def listen(store: Store, timeout_seconds: float) -> Callable[[], None]:
    """Ends this process with an error where no sign of life comes for that long, until the returned function is called, or rank 0 leaves.

    Two threads, since one that asks a machine that is cut off gets stuck.
    """
    own, enough, fresh = _clone(store), threading.Event(), threading.Event()

    def hear() -> None:
        last = None
        with contextlib.suppress(RuntimeError):  # the store is gone: whoever uses it next says so
            while not enough.wait(_BEAT_SECONDS):
                if own.check([_LEFT]):
                    enough.set()
                elif own.check([_KEY]) and (count := own.get(_KEY)) != last:
                    last = count
                    fresh.set()

    def judge() -> None:
        silent = 0.0  # counted, not read off a clock, which goes on while this process itself is stopped
        while not enough.wait(_BEAT_SECONDS):
            silent = 0.0 if fresh.is_set() else silent + _BEAT_SECONDS
            fresh.clear()
            if silent > timeout_seconds:
                why = f"the worker of device 0 gave no sign of life for {timeout_seconds:g} s"
                sys.stderr.write(error_line(f"{why}; check whether it still runs, and whether its machine can be reached"))
                sys.stderr.flush()
                os._exit(1)

    return _started([hear, judge], enough, timeout_seconds)


def _started(tasks: Sequence[Callable[[], None]], enough: threading.Event, ending_seconds: float = _ENDING_SECONDS) -> Callable[[], None]:
    """Runs each in a thread. The returned function tells them that it is enough, and waits for them, for so long at most."""
    threads = [threading.Thread(target=task, name=f"baechi {task.__name__}", daemon=True) for task in tasks]
    for thread in threads:
        thread.start()

    def end() -> None:
        enough.set()
        for thread in threads:
            thread.join(min(ending_seconds, _ENDING_SECONDS))

    return end
