"""Torch's own ways to use two workers, on the same step: DistributedDataParallel and torch.distributed.pipelining.

A Baseline is a group of worker processes of its own, which do one step each time they are told to, so that its steps can take turns with
others.
"""

import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from baechi_ext.errors import ExecutionError
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host import process_memory
from baechi_runtime.host.host_memory import freed_memory_given_back, keep_freed_memory
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.registry import make_step
from baechi_runtime.models.training_step import TrainingStep, WithLoss, optimizer_spec
from baechi_runtime.torch.lowering.devices import TorchDevice

DDP, PIPELINE = "ddp", "pipelining"
MICROBATCHES = 4
_TIME_MAJOR = ("gnmt_v2", "rnnlm")
"""Models whose inputs have the batch as their second dimension."""
NO_STAGES = {
    "wide_towers": "its towers stand side by side; there is no sequence to cut into stages",
    "gnmt_v2": "every decoder layer reads the encoder's memory, and torch refuses an output that two later stages use",
    "nasnet": "every cell reads the two before it, and torch refuses an output that two later stages use",
    "transformer": "encoder, decoder and output share one embedding, which stages would train apart",
    "gpt2": "the first and the last layer share one embedding, which stages would train apart",
    "rnnlm": "its layers pass a list of chunks of time steps, and stages pass batch-major tensors",
}
"""Why a model cannot be cut into stages as it is; the others are sequences of modules."""


class Baseline:
    """Workers that run the step of `request` as `kind` does, each on the core of one of `devices`; the same face as a loaded step. Use as
    a context manager."""

    def __init__(self, kind: str, request: TrainRequest, devices: Sequence[TorchDevice]) -> None:
        timeout = timedelta(seconds=request.timeout_seconds)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._seconds = 0.0
        self._pipes: list[Connection] = []
        self._workers = []
        context = multiprocessing.get_context("spawn")
        for rank in range(request.num_devices):
            here, there = context.Pipe()
            # This process may be pinned to one core, and with it what it starts.
            work_of = (there, kind, request, self._store.port, rank, devices[rank].core)
            self._workers.append(context.Process(target=work, args=work_of, daemon=True))
            self._workers[-1].start()
            there.close()
            self._pipes.append(here)
        self._ask("ready")

    def _ask(self, what: str) -> list[dict[str, Any]]:
        """The answer of each worker."""
        try:
            for pipe in self._pipes:
                pipe.send(what)
            answers = [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as e:
            raise ExecutionError("a worker of the baseline ended; what it said stands above") from e
        self._seconds = sum(a["cpu_seconds"] for a in answers)
        return answers

    def run(self) -> tuple[Tensor, StepTimes]:
        """One step: its loss (of rank 0, or the last stage), its wall time, and the CPU time of each worker."""
        begin = time.perf_counter_ns()
        answers = self._ask("step")
        wall_us = (time.perf_counter_ns() - begin) / 1000
        loss = next(a["loss"] for a in answers if a["loss"] is not None)
        return torch.tensor(loss), StepTimes(wall_us, tuple(a["busy_us"] for a in answers))

    def peak_bytes(self) -> list[int]:
        """Peak bytes of each worker during one step, as baechi_runtime.torch.processes.rank_part measures them."""
        return [a["peak_bytes"] for a in self._ask("memory")]

    def cpu_seconds(self) -> float:
        """CPU seconds that all workers had used when they last answered."""
        return self._seconds

    def __enter__(self) -> "Baseline":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(timeout=10)
            worker.kill()


def data_parallel(step: TrainingStep, rank: int, size: int) -> tuple[TrainingStep, Callable[[], Tensor]]:
    """The step, and how this worker does its part of the batch."""
    inputs = [x.chunk(size, _batch_dimension(step))[rank].contiguous() for x in step.inputs]
    module = nn.parallel.DistributedDataParallel(step.module)
    optimizer = step.optimizer.make(list(module.parameters()))

    def run() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, run


def pipelined(step: TrainingStep, rank: int, size: int) -> tuple[TrainingStep, Callable[[], Tensor | None]]:
    """The step with this worker's stage of its model alone, and how it is done over MICROBATCHES microbatches."""
    layers = list(step.module.model)
    images, labels = step.inputs
    first = halfway(layers, images)
    module = nn.Sequential(*(layers[:first] if rank == 0 else layers[first:]))
    step.module.model = module  # the other stage's parameters are not held here
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=functional.cross_entropy)
    optimizer = step.optimizer.make(list(module.parameters()))

    def run() -> Tensor | None:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(images)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None

    return step, run


def halfway(layers: list[nn.Module], x: Tensor) -> int:
    """Where to cut so that both halves take about as long, forward and backward; rank 0's clock decides for all."""
    took = []
    for layer in layers:
        layer_us = []
        for _ in range(3):
            y = x.detach().requires_grad_(x.is_floating_point())
            begin = time.thread_time_ns()
            out = layer(y)
            out.sum().backward()
            layer_us.append(time.thread_time_ns() - begin)
        took.append(min(layer_us))
        x = out.detach()
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    sums = [abs(sum(took[:i]) - sum(took[i:])) for i in range(1, len(layers))]
    first = torch.tensor([1 + sums.index(min(sums))])
    dist.broadcast(first, 0)
    return int(first)


def _peak_bytes(step: TrainingStep, run: Callable[[], Any]) -> int:
    """Peak bytes of one step here: its growth, and the parameters, buffers and gradients that are there anyway."""
    with freed_memory_given_back():
        run()
        gc.collect()
        process_memory.trim()
        before = process_memory.resident_bytes()
        process_memory.reset_high_water()
        run()
        grown = process_memory.high_water_bytes() - before
    state = step.state().values()
    return grown + sum(v.numel() * v.element_size() for v in [*state, *(p.grad for p in step.module.parameters() if p.grad is not None)])


def work(pipe: Connection, kind: str, request: TrainRequest, port: int, rank: int, core: int) -> None:
    """Runs a worker: an answer to each word from the pipe, until that is closed."""
    keep_freed_memory()
    timeout = timedelta(seconds=request.timeout_seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=request.num_devices, timeout=timeout)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    step = make_step(request.model, request.model_options, optimizer_spec(request.optimizer, request.learning_rate))
    step, run = (data_parallel if kind == DDP else pipelined)(step, rank, request.num_devices)
    with contextlib.suppress(EOFError):
        while asked := pipe.recv():
            answer: dict[str, Any] = {}
            if asked == "step":
                begin = time.process_time_ns()
                loss = run()
                answer = {"busy_us": (time.process_time_ns() - begin) / 1000, "loss": None if loss is None else loss.item()}
            elif asked == "memory":
                answer = {"peak_bytes": _peak_bytes(step, run)}
            pipe.send({**answer, "cpu_seconds": sum(os.times()[:2])})
    dist.destroy_process_group()


def reason_against(kind: str, step: TrainingStep, size: int) -> str | None:
    """Why `kind` cannot run the step on `size` CPU workers as it is; None where it can."""
    batch = step.inputs[0].shape[_batch_dimension(step)]
    if kind == DDP:
        return None if batch % size == 0 else f"a batch of {batch} does not divide among {size} workers"
    if step.name in NO_STAGES:
        return NO_STAGES[step.name]
    if size != 2:
        return f"it is cut into two stages here, not {size}"
    if not isinstance(step.module, WithLoss) or not isinstance(step.module.model, nn.Sequential):
        return "it is no sequence of modules"
    return None if batch % MICROBATCHES == 0 else f"its batch of {batch} does not divide into {MICROBATCHES} microbatches"


def _batch_dimension(step: TrainingStep) -> int:
    return 1 if step.name in _TIME_MAJOR else 0
