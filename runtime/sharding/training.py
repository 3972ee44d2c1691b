"""`baechi train --sharding`: in each of a group of worker processes the model's step, split by some strategies, checked and timed."""

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from baechi_ext.errors import ExecutionError, OptionError
from baechi_ext.ir.files import make_folder, write_json
from baechi_ext.ir.made_by import MadeBy, versions
from baechi_ext.shard.explain import FORECAST_KINDS
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.plan import ShardPlan
from runtime.measure import oversubscribed
from runtime.models.registry import make_step
from runtime.parity_result import Parity, require_parity
from runtime.processes.worker_group import WorkerGroup, worker_place
from runtime.progress import progress
from runtime.run_folder import REPORT, SHARD_PLAN, STRATEGY_PLAN, TP_PLAN, begin_run, is_of_a_run
from runtime.samples import LoadOfOthers, Samples
from runtime.sharding.align import lay_out
from runtime.sharding.calibration import measured_machine
from runtime.sharding.execute import ShardedStep
from runtime.sharding.forecast import Forecast, Forecaster
from runtime.sharding.held import HeldByStep, counted_bytes
from runtime.sharding.mesh import checked_shape, make_mesh
from runtime.sharding.models import ShardedModel, model_of
from runtime.sharding.parity import check_parity
from runtime.sharding.replicas import REPLICAS, ReplicaForecaster, ReplicaStep
from runtime.sharding.report import WHOLE, ShardReport, StrategyRun
from runtime.sharding.strategies import NAMES, PASE, Predicted, Searched, predicted, search_measured, search_runnable
from runtime.sharding.tensor_parallel import tensor_parallel_plan
from runtime.sharding.traffic import Traffic, counted
from runtime.step import EagerStep, optimizer_spec
from runtime.torch_devices import TorchDevice, cpu_workers, cuda_workers
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
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # how gloo does things is no news
    with WorkerGroup.join(request.timeout_seconds, devices[rank].torch_device) as group:
        devices[rank].enter()
        report = _Run(request, shape, devices, rank).report()
        dist.barrier()
    if group.rank:
        return None
    if request.out is not None:
        write_json(Path(request.out) / REPORT, report.to_json())
    return report


def _check(request: TrainRequest) -> None:
    unknown = [name for name in request.sharding if name not in (*NAMES, *REPLICAS) and not name.endswith(".json")]
    if unknown:
        known = ", ".join((*NAMES, *REPLICAS))
        raise OptionError(f"unknown strategy {unknown[0]!r}; choose some of {known}, or name a shard plan (.json)")
    if request.run is not None and request.run.checkpoint is not None:
        raise OptionError("--checkpoint is for placed models; drop it, or --sharding")
    if request.out is not None:
        folder = Path(request.out).resolve()
        replaced = [name for name in request.sharding if Path(name).resolve().parent == folder and is_of_a_run(Path(name).name)]
        if replaced:
            raise OptionError(
                f"{replaced[0]} is in the folder of --out={request.out}, where this run replaces what an earlier one wrote; "
                "give another --out, or a copy of the plan"
            )
        make_folder(folder)


@dataclass
class _Loaded:
    """A strategy that is ready to run: a step of it, its optimizer's included."""

    name: str
    note: str
    forecast: Forecast
    step: Callable[[], Tensor]
    weights: Sequence[Tensor]
    """What it holds from step to step, gradients and the optimizer's state left out."""
    optimizer: torch.optim.Optimizer
    parity: Parity | None = None
    plan: str | None = None
    """The file of its shard plan."""


class _Run:
    """One process's part of it all."""

    def __init__(self, request: TrainRequest, shape: tuple[int, ...], devices: Sequence[TorchDevice], rank: int) -> None:
        self.request, self.shape, self.devices = request, shape, devices
        self.device = device = devices[rank].torch_device
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
            machine = replace(self.forecaster.machine(probed), optimizer_words=self.step.optimizer.slots)
        with progress(f"sharding {request.model} over {machine.devices} processes"):
            searched = search_runnable(self.model.forward, captured, machine, self.shape)
            own = [name for name in request.sharding if name not in REPLICAS]
            if PASE in own or (own and request.out is not None):  # plans say what other splits would cost by what was measured
                searched = search_measured(searched, self.forecaster)
            chosen = {name: predicted(searched, self.forecaster, name) for name in own}
        plans = self._save(searched, chosen)
        loaded = [self._load_replica(name) if name in REPLICAS else self._load(chosen[name], plans.get(name)) for name in request.sharding]
        single = self._load_whole(machine)
        names = ", ".join(request.sharding)
        one_machine = len({d.node for d in self.devices}) == 1
        load = LoadOfOthers(self._cpu_seconds, self.devices[0].cores if one_machine else ())
        if request.run is None:
            with progress(f"measuring {request.num_steps} steps of {names}"):
                (alone, _), *measured = self._timed([single, *loaded], request.num_steps)
        else:
            with progress(f"training {request.model} by {names} for {request.run.steps} steps"):
                alone, _ = self._timed([single], _WARMUP)[0]
                measured = [self._timed([one], request.run.steps, warmup=0)[0] for one in loaded]
        share = load.share()
        runs = [
            self._run_of(one, Samples(tuple(us)), losses if request.run else ()) for one, (us, losses) in zip(loaded, measured, strict=True)
        ]
        return ShardReport(
            model=request.model,
            mesh=self.shape,
            machine=machine,
            executable=searched.line(),
            single=self._run_of(single, Samples(tuple(alone)), ()),
            runs=tuple(runs),
            load_of_others=share,
            oversubscribed=oversubscribed(self.devices),
            in_turn=request.run is None,
            command=tuple(request.command),
            versions=versions(),
        )

    def _run_of(self, loaded: _Loaded, samples: Samples, losses: tuple[float, ...]) -> StrategyRun:
        traffic, held = self._traffic(loaded), self._held(loaded)
        return StrategyRun(loaded.name, loaded.note, loaded.forecast, samples, traffic, held, loaded.parity, losses, loaded.plan)

    def _save(self, searched: Searched, chosen: Mapping[str, Predicted]) -> dict[str, str]:
        """Writes a shard plan for each strategy, and the best or else the first one's as the run's own. The files' names, by the
        strategies'."""
        if self.request.out is None:
            return {}
        asked = enumerate(self.request.sharding, 1)
        files = {name: STRATEGY_PLAN.format(name if name in NAMES else f"file_{i}") for i, name in asked if name in chosen}
        if dist.get_rank():
            return files
        folder, made_by = Path(self.request.out), MadeBy(tuple(self.request.command))
        begin_run(folder)
        plans = {name: self._plan_of(searched, chosen[name]) for name in chosen}
        for name, file in files.items():
            plans[name].save(folder / file, made_by)
        own = PASE if PASE in chosen else next(iter(chosen), None)
        if own is not None:
            plans[own].save(folder / SHARD_PLAN, made_by)
            exported = tensor_parallel_plan(self.model.forward, self.model.captured, chosen[own].configurations)
            write_json(folder / TP_PLAN, exported.to_json())
        return files

    def _plan_of(self, searched: Searched, chosen: Predicted) -> ShardPlan:
        cost_model = "default" if searched.measured is None else "measured"
        plan = ShardPlan.of(searched.of(chosen.configurations), self.model.batch, cost_model, {"mesh": list(self.shape)})
        parts = {name: costs.to_json() for name, costs in chosen.forecast.layers.items()}
        named = {name: {FORECAST_KINDS[part]: us for part, us in costs.items() if us} for name, costs in parts.items()}
        return plan.predicted_as(chosen.forecast.step_us, named)

    def _load_whole(self, machine: Machine) -> _Loaded:
        """The step that every process runs whole: torch's own, as it was measured beforehand, not our program of it."""
        passes_us = machine.seconds(self.model.captured.flop) * 1e6
        forecast = Forecast(passes_us, update_us=self.forecaster.update_seconds * 1e6, traffic=Traffic())
        step = EagerStep(self.step, self.device)  # moves the weights, of which the others have copies
        return _Loaded(WHOLE, "", forecast, step.run, step.weights, step.optimizer)

    def _load_replica(self, name: str) -> _Loaded:
        forecast = ReplicaForecaster(self.step, self.model.batch, self.forecaster, self.device).forecast(name)
        step = ReplicaStep(name, self.step, self.model.batch)
        return _Loaded(name, "torch's own", forecast, step.run, (*step.module.parameters(), *step.module.buffers()), step.optimizer)

    def _load(self, chosen: Predicted, plan: str | None) -> _Loaded:
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

        weights = (*sharded.parts.values(), *sharded.buffers.values())
        return _Loaded(name, chosen.note, chosen.forecast, step, weights, optimizer, parity, plan)

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

    def _held(self, loaded: _Loaded) -> tuple[HeldByStep, ...]:
        """What each process holds in a step."""
        found: list[HeldByStep] = [HeldByStep(0, 0, 0, 0)] * dist.get_world_size()
        dist.all_gather_object(found, counted_bytes(loaded.step, loaded.weights, loaded.optimizer))
        return tuple(found)

    def _cpu_seconds(self) -> float:
        """CPU time that all processes have used."""
        used = torch.tensor([sum(os.times()[:2])], dtype=torch.float64, device=self.device)
        dist.all_reduce(used)
        return used.item()
