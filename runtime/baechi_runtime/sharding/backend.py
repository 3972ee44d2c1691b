"""A group of worker processes, each of which runs its part of a step that is split by a strategy. All of them drive, in step."""

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from msgspec.structs import astuple
from torch import Tensor

from baechi_ext.shard.machine import Machine
from baechi_runtime.drivers.backend import Backend, Trained
from baechi_runtime.drivers.comparison import UNPLACED
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.malloc import mind_shortage
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.rehearsal import Rehearsal
from baechi_runtime.measure.samples import Measurement
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.registry import make_step
from baechi_runtime.models.training_step import EagerStep, TrainingStep, optimizer_spec
from baechi_runtime.report.progress import progress
from baechi_runtime.report.report import Held, StepParts
from baechi_runtime.sharding.binding import lay_out
from baechi_runtime.sharding.calibration import agreed, fastest_passes, seconds_of
from baechi_runtime.sharding.captured import CapturedGraph, captured_module
from baechi_runtime.sharding.counts import Traffic, counted, counted_bytes
from baechi_runtime.sharding.execute import ShardedStep, check_parity
from baechi_runtime.sharding.forecast import Forecast, Forecaster
from baechi_runtime.sharding.layout import checked_shape, make_mesh
from baechi_runtime.sharding.replicas import forecast, mean_of_all, own_part, replica_step
from baechi_runtime.sharding.report import WHOLE
from baechi_runtime.sharding.strategies import Predicted
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.measure import load_of_others, measure_on

_BY_CLOCK = Rehearsal()


@dataclass(frozen=True)
class Whole:
    """A step that every process has."""

    step: TrainingStep


@dataclass(frozen=True)
class Captured(Whole):
    """A step, its graph and what a strategy of it is predicted from, the same on every process."""

    graph: CapturedGraph
    machine: Machine
    forecaster: Forecaster

    @property
    def whole(self) -> Forecast:
        """The step that every process runs whole: torch's own, as it was measured beforehand, not our program of it."""
        passes_us = self.machine.seconds(self.graph.flop) * 1e6
        return Forecast(StepParts(calls_us=passes_us, update_us=self.forecaster.update_seconds * 1e6), traffic=Traffic())


@dataclass(frozen=True)
class Loaded(Trained):
    """A step that is ready to run, its optimizer's included; see Trained. Every process runs it at once."""

    step: TrainingStep
    device: torch.device
    once: Callable[[], Tensor]
    """Runs it, and returns the loss."""
    weights: Sequence[Tensor]
    """Tensors that it holds from step to step, gradients and the optimizer's state left out."""
    optimizer: torch.optim.Optimizer
    of_parts: bool = False
    """True if the loss is of this process's part of the batch."""

    @property
    def seed(self) -> int:
        """The seed that this process draws by: where each drops out of a part of its own, another one on each."""
        return self.step.seed + (dist.get_rank() if self.of_parts else 0)

    def begin(self) -> None:
        torch.manual_seed(self.seed)

    def run(self) -> tuple[float, float]:
        """See Trained; the loss is the whole batch's, and the microseconds are the slowest process's."""
        losses: list[Tensor] = []
        us = 1e6 * agreed(seconds_of(self.device, lambda: losses.append(self.once()))[0], self.device)
        mind_shortage()
        return (mean_of_all(losses[0]) if self.of_parts else losses[0]).item(), us


class ShardBackend(Backend[Whole, Predicted, Loaded]):
    """This process among the others, over which a mesh is laid. Every process calls the same methods in the same order."""

    unplaced = WHOLE

    def __init__(self, request: TrainRequest, devices: Sequence[TorchDevice], rank: int) -> None:
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # how gloo does things is no news
        self.request, self.devices = request, tuple(devices)
        self.shape = checked_shape(len(devices), request.mesh)
        self.device = devices[rank].torch_device
        self.mesh = make_mesh(self.device.type, self.shape)

    def capture(self) -> Captured:
        """The request's model, with the costs that the processes and their links are measured to have."""
        request, device = self.request, self.device
        with progress(f"capturing the training step of {request.model}"):
            step = make_step(request.model, request.model_options, optimizer_spec(request.optimizer, request.learning_rate))
            step = step if device.type == "cpu" else step.replica(device)
            graph = captured_module(step.module, step.inputs, name=step.name, batch_dim=step.batch_dim)
        with progress("measuring the processes and their links"):
            tera_flops = graph.flop / fastest_passes(step, step.inputs, device) / 1e12
            forecaster = Forecaster(graph, step, self.mesh, device)
            machine = forecaster.machine(tera_flops, step.optimizer.slots, request.plan_memory)
        return Captured(step, graph, machine, forecaster)

    def replicated(self, whole: Whole, names: Sequence[str], rehearsal: Rehearsal = _BY_CLOCK) -> dict[str, Predicted]:
        """Some of torch's own ways to split the batch, REPLICAS, and their predicted steps."""
        alone = fastest_passes(whole.step, own_part(whole.step), self.device) if names else 0.0
        found = {}
        for name in names:
            replica = replica_step(name, whole.step)
            its = forecast(rehearsal, replica, alone, self.device, partial(load_of_others, self))
            found[name] = Predicted(name, [], its, "torch's own")
            del replica
            gc.collect()  # its copy of the model is in cycles
        return found

    def load(self, captured: Whole, plan: Predicted) -> Loaded:
        """The step, split by a strategy, or as torch does it."""
        step = captured.step
        if plan.graph is None:
            replica = replica_step(plan.name, step)
            return Loaded(step, self.device, replica.run, replica.weights, replica.optimizer, of_parts=True)
        layouts = lay_out(plan.graph, plan.configurations, self.shape)
        sharded = ShardedStep(plan.graph.forward, step.module, layouts, self.mesh)
        optimizer = step.optimizer.make([p for p in sharded.parts.values() if p.requires_grad])

        def run() -> Tensor:
            loss = sharded.run_parts(*step.inputs)
            optimizer.step()
            return loss

        return Loaded(step, self.device, run, (*sharded.parts.values(), *sharded.buffers.values()), optimizer)

    def unsplit(self, captured: Whole) -> Loaded:
        """The step that every process runs whole. It moves the captured step's weights, of which the others have copies."""
        eager = EagerStep(captured.step, self.device)
        return Loaded(captured.step, self.device, eager.run, eager.weights, eager.optimizer)

    def check(self, captured: Whole, plan: Predicted) -> Parity | None:
        """The parity of a split step with the whole one; None for torch's own data parallelism; see `replica_parity`."""
        if plan.graph is None:
            return None
        return check_parity(captured.step, lay_out(plan.graph, plan.configurations, self.shape), self.mesh)

    def counts(self, loaded: Loaded) -> tuple[Traffic, tuple[Held, ...]]:
        """Run a step, and count what this process sends, and the bytes that each one holds."""
        with counted() as traffic:
            held = counted_bytes(loaded.once, loaded.weights, loaded.optimizer)
        own = torch.tensor(astuple(held), dtype=torch.int64, device=self.device)
        of_all = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, own)
        return traffic, tuple(Held(*each.tolist()) for each in of_all)

    def measure(self, captured: Whole, loaded: Mapping[str, Loaded], num_steps: int, on_step: Callable[[int], None]) -> Measurement:
        """Times `num_steps` rounds of the step that is not split and one of each loaded one; `on_step` is called with each round's number.
        Random numbers begin anew."""
        steps = {UNPLACED: self.unsplit(captured), **loaded}
        steps[UNPLACED].begin()
        timed = {name: partial(_timed, one) for name, one in steps.items()}
        return measure_on(self, timed, num_steps=num_steps, on_step=on_step)

    def cpu_seconds(self) -> float:
        """CPU time that all processes have used."""
        return agreed(time.process_time(), self.device, dist.ReduceOp.SUM)


def _timed(loaded: Loaded) -> StepTimes:
    return StepTimes(loaded.run()[1], ())
