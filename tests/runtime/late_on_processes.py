"""Worker processes of which rank 0, which has the store, has nothing to do, and another one reads late that it is to stop."""

import os
import time
from collections.abc import Callable
from typing import Any

from baechi_runtime.torch.lowering.devices import cpu_workers
from baechi_runtime.torch.processes.executor import ProcessExecutor, follow
from baechi_runtime.torch.processes.worker_group import WorkerGroup

TIMEOUT_SECONDS, LATE_SECONDS = 60, 1


class LateStore:
    """A store from whose waits a process comes back late, as one does that gets no core."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, *arguments: Any) -> None:
        self._store.wait(*arguments)
        time.sleep(LATE_SECONDS)


def prepared(count: int) -> Callable[[], None]:
    """The work of each worker."""

    def work() -> None:
        rank, devices = int(os.environ["RANK"]), cpu_workers(count)
        with WorkerGroup.join(TIMEOUT_SECONDS, devices[rank].torch_device) as group:
            if rank:
                group.store = LateStore(group.store)
                follow(group, devices[rank])
            else:
                with ProcessExecutor(group, devices):
                    pass

    return work
