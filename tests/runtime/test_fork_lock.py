"""A lock that forks find free, whoever held it in their parent."""

import os
import signal
import threading

import pytest

from baechi_runtime.host.fork_lock import ForkLock

SOON = 10


def code_of_a_fork(lock: ForkLock, *, inside: bool) -> int:
    """The exit code of a fork that takes the lock, and another time where it was forked with it."""
    child = os.fork()
    if not child:
        signal.alarm(SOON)
        if inside:
            lock.__exit__()
        with lock:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_finds_it_free() -> None:
    lock, held, done = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    assert code_of_a_fork(lock, inside=False) == 0
    done.set()
    holder.join()
    with lock:
        assert code_of_a_fork(lock, inside=True) == 0


def test_one_at_a_time() -> None:
    lock, others = ForkLock(), []

    def take() -> None:
        with lock:
            others.append(1)

    with lock:
        other = threading.Thread(target=take)
        other.start()
        other.join(0.1)
        assert not others
    other.join()
    assert others
