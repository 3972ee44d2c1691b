"""What torch itself offers for two workers, on the same step: DistributedDataParallel and torch.distributed.pipelining.

A Baseline is a group of worker processes of its own, which do one step each time they are told to, so that its steps can take turns with
others. The workers are `python -m benchmarks.baselines REQUEST`, the request being JSON.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from baechi_ext.errors import ExecutionError
from runtime import process_memory
from runtime.host_memory import freed_memory_given_back, keep_freed_memory
from runtime.models.registry import ModelOptions, make_step
from runtime.step import TrainingStep, WithLoss, optimizer_spec
from runtime.thread_executor import StepTimes
from runtime.torch_devices import TorchDevice
from runtime.train_request import TrainRequest

DDP, PIPELINE = "ddp", "pipelining"
TITLES = {DDP: "DistributedDataParallel", PIPELINE: "torch.distributed.pipelining"}
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
        self._timeout_seconds = request.timeout_seconds
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=request.timeout_seconds))
        self._store = store
        asked = {
            "kind": kind,
            "cores": [device.core for device in devices],  # this process may be pinned to one, and with it what it starts
            "model": request.model,
            "options": asdict(request.model_options),
            "optimizer": request.optimizer,
            "learning_rate": request.learning_rate,
            "timeout_seconds": request.timeout_seconds,
        }
        place = {"WORLD_SIZE": str(request.num_devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.baselines", json.dumps(asked)],
                env={**os.environ, **place, "RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(request.num_devices)
        ]
        self._seconds = 0.0
        self._ask("ready")

    def _ask(self, what: str) -> list[dict[str, Any]]:
        """What each worker answers."""
        for worker in self._workers:
            worker.stdin.write(what + "\n")
            worker.stdin.flush()
        lines = [worker.stdout.readline() for worker in self._workers]
        if not all(lines):
            raise ExecutionError("a worker of the baseline ended; what it said stands above")
        answers = [json.loads(line) for line in lines]
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
        """Of each worker during one step, as runtime.processes.local_share measures it."""
        return [a["peak_bytes"] for a in self._ask("memory")]

    def cpu_seconds(self) -> float:
        """That all workers had used when they last answered."""
        return self._seconds

    def __enter__(self) -> "Baseline":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.kill()
            worker.stdout.close()


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
    """Of one step here: its growth, and the parameters, buffers and gradients that are there anyway."""
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


def work(asked: dict[str, Any]) -> None:
    """What a worker does: a line from stdin, a line to stdout."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keep_freed_memory()
    dist.init_process_group("gloo", timeout=timedelta(seconds=asked["timeout_seconds"]))
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {asked["cores"][rank]})
    step = make_step(asked["model"], ModelOptions(**asked["options"]), optimizer_spec(asked["optimizer"], asked["learning_rate"]))
    step, run = (data_parallel if asked["kind"] == DDP else pipelined)(step, rank, size)
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if line.strip() == "step":
            begin = time.process_time_ns()
            loss = run()
            answer = {"busy_us": (time.process_time_ns() - begin) / 1000, "loss": None if loss is None else loss.item()}
        elif line.strip() == "memory":
            answer = {"peak_bytes": _peak_bytes(step, run)}
        print(json.dumps({**answer, "cpu_seconds": sum(os.times()[:2])}), flush=True)
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


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
