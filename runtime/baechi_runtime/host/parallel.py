"""Tasks in processes of their own."""

import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from baechi_ext.die_with_parent import die_with_parent
from baechi_ext.errors import ExecutionError

Task = TypeVar("Task")
Result = TypeVar("Result")


def each(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Generator[tuple[Task, Result]]:
    """Each task and what the function makes of it, in the order in which they are done; one worker is this process.

    Close the generator, and the tasks that are not done are dropped. Raises ExecutionError where a worker dies.
    """
    if workers == 1:
        yield from ((task, function(task)) for task in tasks)
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import active_children, get_context

    others, done = set(active_children()), False
    # They hold both ends of the pipe that tasks come through, which has no end for them where this process has one.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), die_with_parent, (os.getpid(),))
    try:
        with _interrupts_held_back():  # which is how the workers begin, and stay: they leave Ctrl-C to this process
            futures = {pool.submit(function, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
        done = True
    except BrokenProcessPool as e:
        raise ExecutionError(f"one of {workers} workers died ({e}); the same command goes on, with fewer --workers if it was memory") from e
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if not done:  # nobody will have the results of what is under way
            for worker in set(active_children()) - others:
                worker.terminate()
        pool.shutdown()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
