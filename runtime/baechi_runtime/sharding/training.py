"""`baechi train --sharding`: in each of a group of worker processes the model's step, split by some strategies, checked and timed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from msgspec import structs

from baechi_ext.errors import OptionError
from baechi_ext.ir.files import make_folder, write_json
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.shard.explain import FORECAST_KINDS
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import search
from baechi_runtime.drivers.comparison import UNPLACED
from baechi_runtime.drivers.train_request import RunOptions, TrainRequest
from baechi_runtime.drivers.training import measured, train_on
from baechi_runtime.files.run_folder import SHARD_PLAN, STRATEGY_PLAN, TP_PLAN, begin_run, is_of_a_run
from baechi_runtime.host.malloc import keep_freed_memory
from baechi_runtime.measure.parity_result import Parity, require_parity
from baechi_runtime.measure.samples import Noise, Samples
from baechi_runtime.report.progress import progress
from baechi_runtime.report.report import REPLICAS, MeasuredMachine, ParityCheck, Sharded, StepParts
from baechi_runtime.report.report import Strategy as StrategyReport
from baechi_runtime.sharding.backend import Captured, Loaded, ShardBackend, Whole
from baechi_runtime.sharding.binding import Searched, among_runnable
from baechi_runtime.sharding.forecast import Forecast
from baechi_runtime.sharding.replicas import another_step, equal_parts, replica_parity
from baechi_runtime.sharding.report import ShardReport, sharded_of, strategy_of
from baechi_runtime.sharding.strategies import NAMES, PASE, Predicted, predicted, search_measured
from baechi_runtime.sharding.tensor_parallel import tensor_parallel_plan
from baechi_runtime.torch.backend import worker_group
from baechi_runtime.torch.measure import load_of_others

T = TypeVar("T")
_WHOLE_STEPS = 2
"""The steps of the whole model that are timed before a training."""


def on_devices(request: TrainRequest, drive: Callable[[ShardBackend], T]) -> T | None:
    """The value of `drive`, which every process of the group runs, in step; None on those other than rank 0. Raises OptionError for a mesh
    of another number of processes or an unknown strategy, ExecutionError where another number runs."""
    _check(request)
    with worker_group(request) as (group, devices):
        keep_freed_memory()
        found = drive(ShardBackend(request, devices, group.rank))
        dist.barrier()
    return None if group.rank else found


def _check(request: TrainRequest) -> None:
    unknown = [name for name in request.sharding if name not in (*NAMES, *REPLICAS) and not name.endswith(".json")]
    if unknown:
        known = ", ".join((*NAMES, *REPLICAS))
        raise OptionError(f"unknown strategy {unknown[0]!r}; choose some of {known}, or name a shard plan (.json)")
    replicas = [name for name in request.sharding if name in REPLICAS]
    if request.device_memory is not None and replicas:
        raise OptionError(f"--device_memory limits what a search finds, and {replicas[0]} is torch's own; drop one of them")
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
class Strategy:
    """A strategy that is ready to run, and the file of its shard plan."""

    chosen: Predicted
    loaded: Loaded
    parity: Parity | None = None
    plan: str | None = None


def split(backend: ShardBackend) -> ShardReport:
    """The report of the strategies that were asked for, checked, and timed or trained. Raises ParityError, ExecutionError, ShardError."""
    request, captured = backend.request, backend.capture()
    machine = captured.machine
    with progress(f"sharding {request.model} over {machine.devices} processes"):
        searched = among_runnable(search(captured.graph.graph, machine), captured.graph, backend.shape)
        own = [name for name in request.sharding if name not in REPLICAS]
        if PASE in own or (own and request.out is not None):  # plans say what other splits would cost by what was measured
            searched = search_measured(searched, captured.forecaster)
        chosen = {name: predicted(searched, captured.forecaster, name) for name in own}
    plans = save(backend, captured, searched, chosen)
    chosen |= backend.replicated(captured, [name for name in request.sharding if name in REPLICAS])
    strategies = {name: _loaded(backend, captured, chosen[name], plans.get(name)) for name in request.sharding}
    measured_machine = MeasuredMachine(machine.tera_flops, machine.gigabytes_per_second, machine.latency_us)
    found = reported(backend, captured, captured.whole, strategies)
    return ShardReport(structs.replace(found, machine=measured_machine, executable=searched.line()))


def reported(backend: ShardBackend, captured: Whole, forecast: Forecast, strategies: Mapping[str, Strategy]) -> Sharded:
    """Steps of each strategy, timed in turn with those that are not split, or trained. `forecast` is of the latter. Every process has to
    call it."""
    request = backend.request
    whole = Strategy(Predicted(backend.unplaced, [], forecast), backend.unsplit(captured))
    loaded = {name: strategy.loaded for name, strategy in strategies.items()}
    losses: Mapping[str, Sequence[float]] = {}
    samples: Mapping[str, Samples]
    if request.run is None:
        measurement = measured(backend, captured, loaded, ", ".join(strategies))
        samples, share = measurement.samples, measurement.load_of_others
    else:
        measurement = backend.measure(captured, {}, _WHOLE_STEPS, lambda i: None)
        load = load_of_others(backend)
        samples, losses = _trained(request.model, loaded, request.run)
        share = load.share()
    unsplit = measurement.samples[UNPLACED]
    return sharded_of(
        _reported(backend, whole, unsplit),
        [_reported(backend, strategy, samples[name], losses.get(name, ())) for name, strategy in strategies.items()],
        Noise(share, measurement.oversubscribed),
        in_turn=request.run is None,
        model=request.model,
        num_devices=prod(backend.shape),
        mesh=list(backend.shape),
    )


def _loaded(backend: ShardBackend, captured: Captured, chosen: Predicted, plan: str | None) -> Strategy:
    with progress(f"checking parity of {chosen.name} with the step that is not split"):
        chosen, parity = _checked(backend, captured, chosen)
    if parity is not None:
        require_parity(parity)
    return Strategy(chosen, backend.load(captured, chosen), parity, plan)


def _checked(backend: ShardBackend, captured: Captured, chosen: Predicted) -> tuple[Predicted, Parity | None]:
    """The parity of a strategy; of torch's own data parallelism, where that computes another step, a note in its place."""
    if chosen.name not in REPLICAS:
        return chosen, backend.check(captured, chosen)
    difference = another_step(captured.step, captured.graph.forward.nodes, equal_parts(captured.step))
    if difference:
        return replace(chosen, note=f"{chosen.note}; another step than the whole batch's, and not compared with it: {difference}"), None
    return chosen, replica_parity(chosen.name, captured.step, backend.device)


def _trained(
    model: str, loaded: Mapping[str, Loaded], run: RunOptions
) -> tuple[dict[str, Samples], dict[str, tuple[float, ...]]]:
    """The times and the losses of each strategy's training."""
    samples, losses = {}, {}
    for name, one in loaded.items():
        with progress(f"training {model} by {name} until step {run.steps}") as show:
            progressed = train_on(one, run, {}, show)
        samples[name], losses[name] = Samples(progressed.step_us), progressed.losses
    return samples, losses


def _reported(backend: ShardBackend, strategy: Strategy, samples: Samples, losses: Sequence[float] = ()) -> StrategyReport:
    (traffic, held), chosen = backend.counts(strategy.loaded), strategy.chosen
    parity = None if strategy.parity is None else ParityCheck.of(strategy.parity)
    known = {"held_bytes": list(held), "parity": parity, "losses": list(losses), "plan": strategy.plan}
    return strategy_of(chosen.forecast, samples, traffic, name=chosen.name, note=chosen.note, **known)


def save(backend: ShardBackend, captured: Captured, searched: Searched, chosen: Mapping[str, Predicted]) -> dict[str, str]:
    """Writes a shard plan for each strategy, and the best or else the first one's as the run's own. Returns the files' names
    by strategy."""
    request = backend.request
    if request.out is None:
        return {}
    asked = enumerate(request.sharding, 1)
    files = {name: STRATEGY_PLAN.format(name if name in NAMES else f"file_{i}") for i, name in asked if name in chosen}
    if dist.get_rank():
        return files
    folder, made_by = Path(request.out), MadeBy(tuple(request.command))
    begin_run(folder)
    plans = {name: _plan_of(backend, captured, searched, chosen[name]) for name in chosen}
    for name, file in files.items():
        plans[name].save(folder / file, made_by)
    own = PASE if PASE in chosen else next(iter(chosen), None)
    if own is not None:
        plans[own].save(folder / SHARD_PLAN, made_by)
        exported = tensor_parallel_plan(captured.graph, chosen[own].configurations)
        write_json(folder / TP_PLAN, exported.to_json())
    return files


def _plan_of(backend: ShardBackend, captured: Captured, searched: Searched, chosen: Predicted) -> ShardPlan:
    cost_model = "default" if searched.measured is None else "measured"
    plan = ShardPlan.of(searched.of(chosen.configurations), captured.graph.batch, cost_model, {"mesh": list(backend.shape)})
    parts = StepParts.__struct_fields__
    named = {layer.name: {FORECAST_KINDS[part]: us for part in parts if (us := getattr(layer, part))} for layer in chosen.forecast.layers}
    return plan.predicted_as(chosen.forecast.step_us, named)
