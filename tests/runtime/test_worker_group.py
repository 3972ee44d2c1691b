"""A group of workers that was left has no threads any more: one that gives a tensor back while python ends would abort the process."""

import os

import pytest
import torch
import torch.distributed as dist

from baechi_ext.errors import ExecutionError
from baechi_runtime.torch.processes import worker_group
from baechi_runtime.torch.processes.environment import of_worker
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from tests.runtime.forked import Forked
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.workers import finish

PROGRAM = """
import torch
import torch.distributed as dist
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from tests.runtime.workers import threads_of_a_group

failed = RuntimeError if {fails} else None
group = WorkerGroup.join(60, torch.device("cpu"))
import torch.distributed.nn  # functions with the group that is there for a default
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (1,))
cycle = [distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])]
cycle.append((cycle, cycle[0] @ cycle[0]))
dist.all_reduce(torch.ones(4))
assert threads_of_a_group()
del cycle, mesh
group.__exit__(failed)
assert bool(threads_of_a_group()) == {fails}
"""
"""After an error its threads may wait for a peer that never comes, so they are not waited for."""


def left(fails: bool) -> tuple[int, str]:
    """The exit code and stderr of a worker that leaves its group."""
    code, _, err = finish(Forked(["-c", PROGRAM.format(fails=fails)], {**os.environ, **of_worker(0, 1, 0)}))
    return code, err


def test_a_group_that_was_left_has_no_threads() -> None:
    assert left(fails=False) == (0, "")


def test_nobody_waits_for_the_threads_of_a_group_left_by_an_error() -> None:
    assert left(fails=True) == (0, "")


def test_a_worker_that_met_the_others_and_is_not_heard_of_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(worker_group, "_met", lambda timeout: (store, 0, 2))
    monkeypatch.setattr(dist, "init_process_group", lambda **_: None)
    for name, value in of_worker(0, 2, store.port).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExecutionError, match=r"the workers could not meet at 127.0.0.1:\d+ within 0.5 s: .*every worker was started"):
        WorkerGroup.join(0.5, torch.device("cpu"))


def test_commands_that_were_answered_are_not_kept(workers: ForkedWorkers) -> None:
    """A step is one, with the state of a generator in it. The sign of life is a key, too, that may come meanwhile."""
    assert int(workers.run("commands_on_processes", 3)) <= 1
