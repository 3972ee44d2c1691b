"""Every built-in model on a group of worker processes, against plain PyTorch: rank 0 prints what it found as JSON.

    python -m tests.runtime.models_on_processes NUM_DEVICES [--cuda | --untagged [--rendezvous]] MODEL...

--cuda: on CUDA devices, over NCCL. --untagged: over gloo as if it had no tags. --rendezvous: besides, every end of a transfer holds up its
process until it is done, which is the worst that NCCL may do.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from baechi_ext.capture.torch_joint import Binding, CaptureOptions, capture_joint
from baechi_ext.cost import attach_costs
from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.simulate import Timeline
from runtime import pipeline
from runtime.models.registry import make_step
from runtime.parity import check_parity
from runtime.processes.executor import ProcessExecutor, follow
from runtime.processes.launch import run_workers
from runtime.processes.worker_group import WorkerGroup, is_worker, worker_place
from runtime.profiler import ProfileOptions, profile_step
from runtime.step import EagerStep, TrainingStep, optimizer_spec
from runtime.torch_devices import cpu_devices, cuda_workers
from tests.torch_steps import SMALL_MODELS, scattered

TIMEOUT_SECONDS, STEPS = 120.0, 20


def small_step(name: str) -> TrainingStep:
    return make_step(name, SMALL_MODELS[name], optimizer_spec("momentum", 0.01))


def capture(step: TrainingStep) -> tuple[OpGraph, Binding]:
    return capture_joint(step.module, step.inputs, CaptureOptions("momentum", 1), step.name)


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
        "parity": {method: p.to_json() for method, p in parity.items()},
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


def main(num_devices: int, flags: set[str], models: list[str]) -> None:
    if not is_worker():
        run_workers(sys.argv[1:], num_devices, TIMEOUT_SECONDS, module="tests.runtime.models_on_processes")
        return
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
            step = small_step(name)
            graph, binding = capture(step)
            if rank:
                follow(group, devices[rank], graph, binding, lambda name=name: small_step(name))
                continue
            with ProcessExecutor(group, devices) as executor:
                found[name] = run(executor, graph, binding, step)
    if rank == 0:
        sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    given = {a for a in sys.argv[2:] if a.startswith("--")}
    main(int(sys.argv[1]), given, [a for a in sys.argv[2:] if a not in given])
