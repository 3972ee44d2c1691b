"""Tasks in processes of their own."""

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from baechi_ext.errors import ExecutionError

Task = TypeVar("Task")
Result = TypeVar("Result")


def each(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Iterator[tuple[Task, Result]]:
    """Each task and what the function makes of it, in the order in which they are done; one worker is this process.

    Close the generator, and tasks that have not begun are dropped. Raises ExecutionError where a worker dies.
    """
    if workers == 1:
        yield from ((task, function(task)) for task in tasks)
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(workers, get_context("spawn"), _leave_interrupts_to_the_parent)
    try:
        futures = {pool.submit(function, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as e:
        raise ExecutionError(f"one of {workers} workers died ({e}); the same command goes on, with fewer --workers if it was memory") from e
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
