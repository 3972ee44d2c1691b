"""A thread per device for the blocks of modules, and the order in which tasks that wait for one another run on them."""

import heapq
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from baechi_ext.errors import ExecutionError
from runtime.torch_devices import TorchDevice

CALLER = -1
"""The device number of the thread that waits for the others."""
_inside = threading.local()


def inside_a_block() -> bool:
    """Whether the calling thread is one of a device's."""
    return getattr(_inside, "now", False)


class BlockThreads:
    """The threads, which end with the process. Of the tasks that a device has, the one of the lowest order runs next."""

    def __init__(self, devices: Sequence[TorchDevice], timeout_seconds: float = 300.0) -> None:
        self.timeout_seconds = timeout_seconds
        """How long a device may take for a task."""
        self.devices = tuple(devices)
        self.lock = threading.RLock()
        """Held while a forward or backward pass runs: tasks of two passes could wait for one another."""
        self._count = itertools.count()
        self._queues: list[queue.PriorityQueue] = [queue.PriorityQueue() for _ in devices]
        threads, entered = torch.get_num_threads(), threading.Barrier(len(self.devices) + 1)
        for device, tasks in zip(self.devices, self._queues, strict=True):
            loop = threading.Thread(target=_loop, args=(device, tasks, entered), name=f"baechi blocks {device.name}", daemon=True)
            loop.start()
        entered.wait()
        torch.set_num_threads(threads)  # which the devices' threads set for themselves, and for all threads to come

    def submit(self, device: int, order: int, task: Callable[[], None]) -> None:
        """Gives a device a task, which must not raise."""
        self._queues[device].put((order, next(self._count), task))


def _loop(device: TorchDevice, tasks: queue.PriorityQueue, entered: threading.Barrier) -> None:
    _inside.now = True
    device.enter()
    entered.wait()
    while True:
        _, _, task = tasks.get()
        task()
        del task


@dataclass(eq=False)
class Task:
    """Something to do on a device, once the tasks before it are done."""

    device: int
    order: int
    """Of several that may run, the one of the lowest order does."""
    work: Callable[[], None]
    after: "list[Task]" = field(default_factory=list)
    missing: int = 0

    def follow(self, others: "Sequence[Task]") -> None:
        """Makes the task wait for others."""
        for other in dict.fromkeys(others):
            other.after.append(self)
            self.missing += 1


def run_tasks(threads: BlockThreads, tasks: Sequence[Task]) -> None:
    """Runs all tasks; those of CALLER in this thread. Raises the first error; what waits for its task is not done then."""
    _Pass(threads, tasks).run()


class _Pass:
    def __init__(self, threads: BlockThreads, tasks: Sequence[Task]) -> None:
        self.threads = threads
        self.tasks = tasks
        self.changed = threading.Condition()
        self.left = len(tasks)
        self.own: list[tuple[int, int, Task]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        for task in [task for task in self.tasks if task.missing == 0]:
            self._start(task)
        while True:
            with self.changed:
                while self.left and not self.own:
                    before = self.left
                    if not self.changed.wait(self.threads.timeout_seconds) and before == self.left:
                        raise self.error or ExecutionError(
                            f"{before} tasks of a backward pass are not done, and no device has ended one within "
                            f"{self.threads.timeout_seconds:g} s; raise the time-out"
                        )
                if not self.left:
                    break
                task = heapq.heappop(self.own)[-1]
            self._do(task)
        if self.error is not None:
            raise self.error

    def _start(self, task: Task) -> None:
        if task.device == CALLER:
            with self.changed:
                heapq.heappush(self.own, (task.order, id(task), task))
                self.changed.notify()
        else:
            self.threads.submit(task.device, task.order, lambda: self._do(task))

    def _do(self, task: Task) -> None:
        try:
            if self.error is None:
                task.work()
        except BaseException as e:  # noqa: BLE001 - raised in the caller's thread
            self.error = self.error or e
        with self.changed:
            self.left -= 1
            ready = []
            for other in task.after:
                other.missing -= 1
                if other.missing == 0:
                    ready.append(other)
            self.changed.notify()
        for other in ready:
            self._start(other)
