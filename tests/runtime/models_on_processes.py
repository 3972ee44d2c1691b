"""Every built-in model on a group of worker processes, against plain PyTorch: rank 0 prints what it found as JSON.

    python -m tests.runtime.models_on_processes NUM_DEVICES [--untagged] MODEL...
"""

import json
import sys
from typing import Any

import torch

from baechi_ext.capture.torch_joint import Binding, CaptureOptions, capture_joint
from baechi_ext.cost import attach_costs
from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.simulate import Timeline
from runtime import pipeline
from runtime.launch import run_workers
from runtime.models.registry import make_step
from runtime.parity import check_parity
from runtime.process_executor import ProcessExecutor, follow
from runtime.profiler import ProfileOptions, profile_step
from runtime.step import EagerStep, TrainingStep, optimizer_spec
from runtime.torch_devices import cpu_devices
from runtime.worker_group import WorkerGroup, is_worker, worker_place
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
    eager = EagerStep(step, torch.device("cpu"))
    torch.manual_seed(5)
    eager_losses = [executor.call(0, eager.run).item() for _ in range(STEPS)]
    return {
        "parity": {method: p.to_json() for method, p in parity.items()},
        "devices": {method: sorted(set(timeline.placement)) for method, timeline in found.items()},
        "losses": {"placed": placed_losses, "eager": eager_losses},
        "trained_alike": {name: torch.equal(value, trained[name]) for name, value in step.state().items()},
    }


def main(num_devices: int, models: list[str], *, tagged: bool) -> None:
    if not is_worker():
        run_workers(sys.argv[1:], num_devices, TIMEOUT_SECONDS, module="tests.runtime.models_on_processes")
        return
    rank, size = worker_place()
    devices = cpu_devices(size)
    devices[rank].enter()
    found = {}
    with WorkerGroup.join(TIMEOUT_SECONDS) as group:
        group.tagged = tagged
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
    main(int(sys.argv[1]), [a for a in sys.argv[2:] if a != "--untagged"], tagged="--untagged" not in sys.argv)
