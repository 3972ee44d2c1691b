"""DistributedDataParallel in a group of worker processes of its own, which do a step each time that they are told to, so that its steps can
take turns with those of others."""

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from baechi_ext.errors import ExecutionError
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.malloc import keep_freed_memory
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.report.report import DDP
from baechi_runtime.sharding.replicas import replica_step
from baechi_runtime.torch.backend import build_step
from baechi_runtime.torch.lowering.devices import CpuDevice


class DataParallel:
    """Workers that run the step of `request`, each on the core of one of `devices`; the same face as a loaded step. Use as a context
    manager."""

    def __init__(self, request: TrainRequest, devices: Sequence[CpuDevice]) -> None:
        timeout = timedelta(seconds=request.timeout_seconds)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._pipes: list[Connection] = []
        self._workers = []
        context = multiprocessing.get_context("spawn")
        for rank, device in enumerate(devices):
            here, there = context.Pipe()
            # This process may be pinned to one core, and with it what it starts.
            self._workers.append(context.Process(target=work, args=(there, request, self._store.port, rank, device.core), daemon=True))
            self._workers[-1].start()
            there.close()
            self._pipes.append(here)

    def run(self) -> tuple[torch.Tensor, StepTimes]:
        """One step: the batch's loss, its wall time, and the CPU time of each worker."""
        begin = time.perf_counter_ns()
        try:
            for pipe in self._pipes:
                pipe.send("step")
            losses, busy_us = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        except (EOFError, OSError) as e:
            raise ExecutionError("a worker of DistributedDataParallel ended; what it said stands above") from e
        return torch.tensor(statistics.mean(losses)), StepTimes((time.perf_counter_ns() - begin) / 1000, busy_us)

    def __enter__(self) -> "DataParallel":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(timeout=10)
            worker.kill()


def work(pipe: Connection, request: TrainRequest, port: int, rank: int, core: int) -> None:
    """Runs a worker: a step for each word from the pipe, until that is closed."""
    keep_freed_memory()
    timeout = timedelta(seconds=request.timeout_seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=request.num_devices, timeout=timeout)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    replica = replica_step(DDP, build_step(request))
    with contextlib.suppress(EOFError):
        while pipe.recv():
            begin = time.process_time_ns()
            loss = replica.run().item()
            pipe.send((loss, (time.process_time_ns() - begin) / 1000))
    dist.destroy_process_group()
