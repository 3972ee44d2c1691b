"""A small step recorded on worker processes, each as if on a machine of its own, whose clock has to be asked for."""

import json
import sys
from collections.abc import Callable
from functools import partial

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.ir import OpGraph
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.devices import CpuDevice
from baechi_runtime.torch.processes.environment import worker_place
from baechi_runtime.torch.processes.executor import ProcessExecutor, RankCapture, follow
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from tests.torch_steps import capture, make_step, scattered

TIMEOUT_SECONDS = 120.0


def prepared(_: int) -> Callable[[], None]:
    """The work of each worker; the step is captured already."""
    step = make_step("branches")
    return partial(work, step, *capture(step))


def work(step: TrainingStep, graph: OpGraph, binding: Binding) -> None:
    rank, size = worker_place()
    devices = [CpuDevice(i, node=i) for i in range(size)]
    devices[rank].enter()
    with WorkerGroup.join(TIMEOUT_SECONDS, devices[rank].torch_device) as group:
        if rank:
            follow(group, devices[rank], RankCapture(graph, binding, lambda: make_step("branches")))
            return
        with ProcessExecutor(group, devices) as executor:
            placed = executor.load(scattered(graph, size, 5), binding, step)
            before = placed.run()[0].item()
            measured = placed.record().measured(graph, "process")
            after = placed.run()[0].item()
    sys.stdout.write(json.dumps({"measured": measured.to_json(), "losses": [before, after]}))
