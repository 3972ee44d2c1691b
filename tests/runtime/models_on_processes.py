"""Every built-in model on a group of worker processes, against plain PyTorch: rank 0 prints what it found as JSON.

    python -m tests.runtime.models_on_processes NUM_DEVICES [--cuda | --untagged [--rendezvous]] [--parts] MODEL...

--cuda: on CUDA devices, over NCCL. --untagged: over gloo as if it had no tags. --rendezvous: besides, every end of a transfer holds up its
process until it is done, which is the worst that NCCL may do. --parts: one step of each model over two parts of its batch.
"""

import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec import to_builtins

from baechi_ext.capture.parts import Parts, shared_sizes
from baechi_ext.capture.torch_joint import Binding, CaptureOptions, capture_joint
from baechi_ext.capture.torch_parts import capture_parts
from baechi_ext.cost import attach_costs
from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.models.training_step import EagerStep, TrainingStep, optimizer_spec
from baechi_runtime.report.report import ParityCheck
from baechi_runtime.torch.lowering.devices import cpu_devices, cuda_workers
from baechi_runtime.torch.parity import check_parity
from baechi_runtime.torch.processes.environment import is_worker, worker_place
from baechi_runtime.torch.processes.executor import ProcessExecutor, RankCapture, follow
from baechi_runtime.torch.processes.launch import run_workers
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from tests.torch_steps import SMALL_MODELS, narrow_step, scattered

TIMEOUT_SECONDS, STEPS = 120.0, 20


def small_step(name: str) -> TrainingStep:
    return narrow_step(name, SMALL_MODELS[name], optimizer_spec("momentum", 0.01))


@cache
def captured(name: str, device: str = "cpu") -> tuple[TrainingStep, OpGraph, Binding]:
    step = small_step(name)
    return step, *capture_joint(step.module, step.inputs, CaptureOptions("momentum", 1, device=device), step.name)


@cache
def parted(name: str, sizes: Sequence[int]) -> tuple[OpGraph, Binding]:
    """The step over parts, each normalised by itself where there is BatchNorm."""
    step, _, binding = captured(name)
    parts = Parts.of(step.inputs, sizes, step.batch_dim, batch_norm_per_part=True)
    return capture_parts(step.module, binding, CaptureOptions("momentum", 1), parts, step.name)


def parity_of_parts(executor: ProcessExecutor, name: str) -> dict[str, Any]:
    """Parity of plans that send about every tensor somewhere, parameters too."""
    step = captured(name)[0]
    graph, binding = parted(name, shared_sizes(step.batch or 0, [1, 1]))
    plans = [scattered(graph, len(executor.devices), seed) for seed in range(3)]
    found = [check_parity(executor, timeline, binding, step) for timeline in plans]
    return {str(seed): to_builtins(ParityCheck.of(parity)) for seed, parity in enumerate(found)}


def plans(executor: ProcessExecutor, graph: OpGraph, binding: Binding, step: TrainingStep) -> dict[str, Timeline]:
    """A placer's plan for real costs, and others that send about every tensor somewhere; more of these where order alone counts."""
    num_devices = len(executor.devices)
    costed = attach_costs(graph, profile_step(executor, graph, binding, step, ProfileOptions(warmup=1, repeats=2)))
    cluster = Cluster.uniform(num_devices, link=Link(0.0, 30.0))
    method = "single" if num_devices == 1 else "m_etf"
    return {
        method: pipeline.plan(costed, cluster, pipeline.PlanRequest(method=method)).timeline,
        **{f"scattered {seed}": scattered(costed, num_devices, seed) for seed in range(1, 2 if executor.group.tagged else 4)},
    }


def run(executor: ProcessExecutor, graph: OpGraph, binding: Binding, step: TrainingStep) -> dict[str, Any]:
    """Parity of one step of either plan, and of a training run: its losses, and the parameters and buffers it ends with."""
    found = plans(executor, graph, binding, step)
    parity = {method: check_parity(executor, timeline, binding, step) for method, timeline in found.items()}
    saved = step.snapshot()
    placed = executor.load(next(iter(found.values())), binding, step)
    torch.manual_seed(5)
    placed_losses = [placed.run()[0].item() for _ in range(STEPS)]
    trained = {name: value.detach().clone() for name, value in placed.gather()[1].items()}
    step.restore(saved)
    eager = EagerStep(step, executor.devices[0].torch_device)
    torch.manual_seed(5)
    eager_losses = [executor.call(0, eager.run).item() for _ in range(STEPS)]
    return {
        "parity": {method: to_builtins(ParityCheck.of(p)) for method, p in parity.items()},
        "devices": {method: sorted(set(timeline.placement)) for method, timeline in found.items()},
        "losses": {"placed": placed_losses, "eager": eager_losses},
        "trained_alike": {name: torch.equal(value.cpu(), trained[name].cpu()) for name, value in eager.step.state().items()},
    }


class _Done:
    """A transfer that has been waited for."""

    def wait(self, _: timedelta) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def waited_for(start: Callable[..., dist.Work]) -> Callable[..., _Done]:
    """`start` returns when its transfer is done."""

    def whole(*args: Any, **kwargs: Any) -> _Done:
        start(*args, **kwargs).wait(timedelta(seconds=TIMEOUT_SECONDS))
        return _Done()

    return whole


def prepared(_: int | str, *arguments: str) -> Callable[[], None]:
    """The work of each worker: capture is done, unless it is left to the worker, as these arguments can ask for: one with a CUDA device. A
    build of torch for CUDA has threads for backward passes, which a fork loses."""
    flags = {a for a in arguments if a.startswith("--")}
    models = [a for a in arguments if a not in flags]
    if "--cuda" not in flags and torch.version.cuda is None:
        for name in models:
            captured(name)
            if "--parts" in flags:
                parted(name, tuple(shared_sizes(captured(name)[0].batch or 0, [1, 1])))
    return partial(work, flags, models)


def work(flags: set[str], models: list[str]) -> None:
    rank, size = worker_place()
    devices = (cuda_workers if "--cuda" in flags else cpu_devices)(size)
    devices[rank].enter()
    torch.use_deterministic_algorithms("--cuda" in flags, warn_only=True)
    if "--rendezvous" in flags:
        dist.isend, dist.irecv = waited_for(dist.isend), waited_for(dist.irecv)
    found = {}
    with WorkerGroup.join(TIMEOUT_SECONDS, devices[rank].torch_device) as group:
        group.tagged = group.tagged and "--untagged" not in flags
        for name in models:
            step, graph, binding = captured(name, devices[rank].torch_device.type)
            if rank:
                follow(group, devices[rank], RankCapture(graph, binding, lambda name=name: small_step(name), partial(parted, name)))
                continue
            with ProcessExecutor(group, devices) as executor:
                found[name] = parity_of_parts(executor, name) if "--parts" in flags else run(executor, graph, binding, step)
    if rank == 0:
        sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    if is_worker():
        prepared(*sys.argv[1:])()
    else:
        run_workers(sys.argv[1:], int(sys.argv[1]), module="tests.runtime.models_on_processes")
