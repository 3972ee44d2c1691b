"""`baechi train --sharding`: in each of a group of worker processes the model's step, split by some strategies, checked and timed."""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from baechi_ext.errors import ExecutionError, OptionError
from baechi_ext.ir.files import make_folder, write_json
from baechi_ext.ir.made_by import versions
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import Found
from runtime.models.registry import make_step
from runtime.parity_result import Parity, require_parity
from runtime.processes.worker_group import WorkerGroup, worker_place
from runtime.progress import progress
from runtime.samples import Samples
from runtime.sharding.align import lay_out
from runtime.sharding.calibration import measured_machine
from runtime.sharding.execute import ShardedStep
from runtime.sharding.forecast import Forecast, Forecaster
from runtime.sharding.mesh import checked_shape, make_mesh
from runtime.sharding.models import ShardedModel, model_of
from runtime.sharding.parity import check_parity
from runtime.sharding.replicas import REPLICAS, ReplicaForecaster, ReplicaStep
from runtime.sharding.report import ShardReport, StrategyRun
from runtime.sharding.strategies import NAMES, PASE, Predicted, predicted, search_runnable
from runtime.sharding.tensor_parallel import tensor_parallel_plan
from runtime.sharding.traffic import Traffic, counted
from runtime.step import EagerStep, optimizer_spec
from runtime.torch_devices import cpu_workers, cuda_workers
from runtime.train_request import TrainRequest

_WARMUP = 2


def train(request: TrainRequest) -> ShardReport | None:
    """The report of the strategies that were asked for; None on ranks other than 0, whose part this process plays.

    Raises OptionError for a mesh of another number of processes or an unknown strategy, ParityError, ExecutionError, ShardError.
    """
    rank, size = worker_place()
    if size != request.num_devices:
        raise ExecutionError(f"{size} workers were started for --num_devices={request.num_devices}; start one worker per device")
    shape = checked_shape(size, request.mesh)
    _check(request)
    devices = (cuda_workers if request.cuda else cpu_workers)(size)
    device = devices[rank].torch_device
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # how gloo does things is no news
    with WorkerGroup.join(request.timeout_seconds, device) as group:
        devices[rank].enter()
        report = _Run(request, device, shape).report()
        dist.barrier()
    if group.rank:
        return None
    if request.out is not None:
        write_json(Path(request.out) / "report.json", report.to_json())
    return report


def _check(request: TrainRequest) -> None:
    unknown = [name for name in request.sharding if name not in (*NAMES, *REPLICAS) and not name.endswith(".json")]
    if unknown:
        known = ", ".join((*NAMES, *REPLICAS))
        raise OptionError(f"unknown strategy {unknown[0]!r}; choose some of {known}, or name a shard plan (.json)")
    if request.run is not None and request.run.checkpoint is not None:
        raise OptionError("--checkpoint is for placed models; drop it, or --sharding")
    if request.out is not None:
        make_folder(Path(request.out))


@dataclass
class _Loaded:
    """A strategy that is ready to run: a step of it, its optimizer's included."""

    name: str
    note: str
    forecast: Forecast
    step: Callable[[], Tensor]
    parity: Parity | None


class _Run:
    """One process's part of it all."""

    def __init__(self, request: TrainRequest, device: torch.device, shape: tuple[int, ...]) -> None:
        self.request, self.device, self.shape = request, device, shape
        with progress(f"capturing the training step of {request.model}"):
            step = make_step(request.model, request.model_options, optimizer_spec(request.optimizer, request.learning_rate))
            self.step = step if device.type == "cpu" else step.replica(device)
            self.model: ShardedModel = model_of(request.model, request.model_options)
        self.mesh: DeviceMesh = make_mesh(device.type, shape)

    def report(self) -> ShardReport:
        request, captured = self.request, self.model.captured
        with progress("measuring the processes and their links"):
            probed = measured_machine(self.step, captured.flop, self.device)
            self.forecaster = Forecaster(self.model, self.step, self.mesh, self.device)
            machine = self.forecaster.machine(probed)
        with progress(f"sharding {request.model} over {machine.devices} processes"):
            searched = search_runnable(self.model.forward, captured, machine, self.shape)
            chosen = {name: predicted(searched, self.forecaster, name) for name in request.sharding if name not in REPLICAS}
        self._save(searched.of(chosen[PASE].configurations) if PASE in chosen else searched.found)
        loaded = [self._load_replica(name) if name in REPLICAS else self._load(chosen[name]) for name in request.sharding]
        whole = EagerStep(self.step, self.device).run  # moves the weights, of which the others have copies
        single = _Loaded("", "", Forecast(0.0), whole, None)
        names = ", ".join(request.sharding)
        if request.run is None:
            with progress(f"measuring {request.num_steps} steps of {names}"):
                (alone, _), *measured = self._timed([single, *loaded], request.num_steps)
        else:
            with progress(f"training {request.model} by {names} for {request.run.steps} steps"):
                alone, _ = self._timed([single], _WARMUP)[0]
                measured = [self._timed([one], request.run.steps, warmup=0)[0] for one in loaded]
        runs = [
            StrategyRun(o.name, o.note, o.forecast, Samples(tuple(us)), self._traffic(o), o.parity, losses if request.run else ())
            for o, (us, losses) in zip(loaded, measured, strict=True)
        ]
        single, command = Samples(tuple(alone)), tuple(request.command)
        return ShardReport(request.model, self.shape, machine, searched.line(), single, tuple(runs), command, versions())

    def _save(self, found: Found) -> None:
        if self.request.out is not None and dist.get_rank() == 0:
            plan = ShardPlan.of(found, self.model.batch, "default", {"mesh": list(self.shape)})
            plan.save(Path(self.request.out) / "shard_plan.json")
            exported = tensor_parallel_plan(self.model.forward, self.model.captured, found.strategy)
            write_json(Path(self.request.out) / "tp_plan.json", exported.to_json())

    def _load_replica(self, name: str) -> _Loaded:
        forecast = ReplicaForecaster(self.step, self.model.batch, self.forecaster, self.device).forecast(name)
        return _Loaded(name, "torch's own", forecast, ReplicaStep(name, self.step, self.model.batch).run, None)

    def _load(self, chosen: Predicted) -> _Loaded:
        name = chosen.name
        layouts = lay_out(self.model.forward, self.model.captured, chosen.configurations, self.shape)
        with progress(f"checking parity of {name} with the step that is not split"):
            parity = check_parity(self.step, layouts, self.mesh)
        require_parity(parity)
        sharded = ShardedStep(self.model.forward, self.step.module, layouts, self.mesh)
        optimizer = self.step.optimizer.make([p for p in sharded.parts.values() if p.requires_grad])

        def step() -> Tensor:
            loss = sharded.run_parts(*self.step.inputs)
            optimizer.step()
            return loss

        return _Loaded(name, chosen.note, chosen.forecast, step, parity)

    def _timed(self, loaded: list[_Loaded], steps: int, warmup: int = _WARMUP) -> list[tuple[list[float], tuple[float, ...]]]:
        """Microseconds and losses of each one's steps, which take turns. A step takes as long as its slowest process."""
        taken: list[list[float]] = [[] for _ in loaded]
        losses: list[list[Tensor]] = [[] for _ in loaded]
        torch.manual_seed(self.step.seed)
        gc.collect()
        gc.disable()
        for i in range(warmup + steps):
            for k, one in enumerate(loaded):
                dist.barrier()
                began = time.perf_counter_ns()
                losses[k].append(one.step())
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                us = torch.tensor([(time.perf_counter_ns() - began) / 1000.0], dtype=torch.float64, device=self.device)
                dist.all_reduce(us, dist.ReduceOp.MAX)
                if i >= warmup:
                    taken[k].append(us.item())
        gc.enable()
        return [(us, tuple(loss.item() for loss in lost)) for us, lost in zip(taken, losses, strict=True)]

    def _traffic(self, loaded: _Loaded) -> Traffic:
        """What a step sends."""
        with counted() as traffic:
            loaded.step()
        return traffic
