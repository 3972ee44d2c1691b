"""Worker processes of which rank 0 gives many commands, and prints by how many keys the store has grown with them."""

import os
from collections.abc import Callable

from baechi_runtime.torch.lowering.devices import cpu_workers
from baechi_runtime.torch.processes.executor import ProcessExecutor, follow
from baechi_runtime.torch.processes.worker_group import WorkerGroup

TIMEOUT_SECONDS, COMMANDS = 60, 5


def prepared(count: int) -> Callable[[], None]:
    """The work of each worker."""

    def work() -> None:
        rank, devices = int(os.environ["RANK"]), cpu_workers(count)
        with WorkerGroup.join(TIMEOUT_SECONDS, devices[rank].torch_device) as group:
            if rank:
                follow(group, devices[rank])
                return
            with ProcessExecutor(group, devices) as executor:
                executor.cpu_seconds()
                before = group.store.num_keys()
                for _ in range(COMMANDS):
                    executor.cpu_seconds()
                print(group.store.num_keys() - before)

    return work
