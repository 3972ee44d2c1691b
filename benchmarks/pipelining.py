"""torch.distributed.pipelining's 1F1B schedule beside `baechi compare`, in the same two worker processes; the steps of all take turns.

    python -m benchmarks.pipelining --out=benchmarks/results/pipelining_alexnet.json -- --model_name=alexnet --batch_size=8 --dropout=0

What stands behind -- are flags of `baechi compare`. The model is cut into two stages where both take about as long. BatchNorm and dropout
see a microbatch at a time, so in the place of parity stand the losses of two steps, of the schedule and of the unplaced step.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from baechi_ext.errors import OptionError
from baechi_runtime.drivers.comparing import compared
from baechi_runtime.drivers.comparison import CompareRequest, Contender
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.models.training_step import EagerStep
from baechi_runtime.sharding.ranked import EngineStep
from baechi_runtime.torch.backend import Captured, TorchBackend, build_step, on_devices
from baechi_runtime.torch.processes.environment import is_worker
from baechi_runtime.torch.processes.launch import run_workers
from benchmarks.comparing import FLAGS, report, request_of
from benchmarks.runner import Benchmark, Row

NAME, STAGES, MICROBATCHES = "1F1B", 2, 4
NO_STAGES = {
    "wide_towers": "its towers stand side by side; there is no sequence to cut into stages",
    "gnmt_v2": "every decoder layer reads the encoder's memory, and torch refuses an output that two later stages use",
    "nasnet": "every cell reads the two before it, and torch refuses an output that two later stages use",
    "transformer": "encoder, decoder and output share one embedding, which stages would train apart",
    "gpt2": "the first and the last layer share one embedding, which stages would train apart",
    "rnnlm": "its layers pass a list of chunks of time steps, and stages pass batch-major tensors",
}
"""Why a model cannot be cut into stages as it is; the others are sequences of modules."""


class Stage:
    """A process's stage of the model; all processes call the same methods in the same order."""

    def __init__(self, request: TrainRequest, rank: int) -> None:
        self._request, self._rank = request, rank

    def load(self) -> None:
        """Cuts the model with its first weights, and drops the other stage's."""
        step = build_step(self._request)
        layers, (self._images, self._labels) = list(step.module.model), step.inputs
        first = halfway(layers, self._images)
        module = nn.Sequential(*(layers[first:] if self._rank else layers[:first]))
        stage = PipelineStage(module, self._rank, STAGES, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=functional.cross_entropy)
        self._optimizer = step.optimizer.make(list(module.parameters()))

    def step(self) -> float:
        """The batch's loss, which the last stage tells."""
        self._optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if self._rank:
            self._schedule.step(target=self._labels, losses=losses)
        else:
            self._schedule.step(self._images)
        self._optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, STAGES - 1)
        return loss.item()


def halfway(layers: Sequence[nn.Module], x: Tensor) -> int:
    """Where to cut so that both halves take about as long, forward and backward; rank 0's clock decides for all."""
    took = []
    for layer in layers:
        layer_ns = []
        for _ in range(3):
            y = x.detach().requires_grad_(x.is_floating_point())
            begin = time.thread_time_ns()
            out = layer(y)
            out.sum().backward()
            layer_ns.append(time.thread_time_ns() - begin)
        took.append(min(layer_ns))
        x = out.detach()
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    sums = [abs(sum(took[:i]) - sum(took[i:])) for i in range(1, len(layers))]
    first = torch.tensor([1 + sums.index(min(sums))])
    dist.broadcast(first, 0)
    return int(first)


class BesidePipeline(TorchBackend):
    """Measures the pipeline's steps, too."""

    losses: Mapping[str, list[float]]
    """The losses of the first two steps."""

    def measure(self, captured: Captured, loaded: Mapping[str, Any], num_steps: int, on_step: Callable[[int], None]) -> Measurement:
        stage, device = Stage(self.request, 0), self.executor.devices[0].torch_device
        self.executor.together(stage.load, do="stage: load")  # type: ignore[call-arg]  # a WorkerGroup's
        pipeline, eager = EngineStep(partial(self._step, stage)), EagerStep(build_step(self.request), device)
        self.losses = {
            NAME: [pipeline.run()[0].item() for _ in range(2)],
            "eager": [self.executor.call(0, eager.run).item() for _ in range(2)],
        }
        return super().measure(captured, {**loaded, NAME: pipeline}, num_steps, on_step)

    def _step(self, stage: Stage) -> tuple[float, float]:
        begin = time.perf_counter_ns()
        loss, _ = self.executor.together(stage.step, do="stage: step")  # type: ignore[call-arg]
        return loss, (time.perf_counter_ns() - begin) / 1e3


def beside(request: CompareRequest, backend: TorchBackend) -> Row:
    """The comparison, with a row of the pipeline's."""
    backend = BesidePipeline(backend.request, backend.executor)
    found = compared(request, backend, backend.capture(), request.train.model)
    pipeline = Contender(NAME, notes=[f"{STAGES} stages, {MICROBATCHES} microbatches"])
    return {"losses": backend.losses, **replace(found, contenders=(*found.contenders, pipeline)).to_json()}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Starts the workers; the first of them tells."""
    request = request_of(args)
    train = request.train
    if not is_worker():
        if train.num_devices != STAGES or train.model in NO_STAGES:
            raise OptionError(NO_STAGES.get(train.model, f"the model is cut into {STAGES} stages; drop --num_devices={train.num_devices}"))
        raise SystemExit(run_workers(args.words, STAGES, "benchmarks.pipelining"))

    def stages(request: TrainRequest, _devices: object, rank: int, _step: object) -> Mapping[str, Callable[..., object]]:
        stage = Stage(request, rank)
        return {"stage: load": stage.load, "stage: step": stage.step}

    found = on_devices(train, partial(beside, request), stages)
    if found is not None:
        yield found


main = Benchmark("pipelining", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
