"""A worker: rank 0 prints the paces of all."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from baechi_runtime.drivers.link_report import ProbeRequest
from baechi_runtime.torch.backend import with_executor
from baechi_runtime.torch.lowering.devices import TorchDevice
from baechi_runtime.torch.processes.executor import Executor, follow
from baechi_runtime.torch.processes.worker_group import WorkerGroup


def drive(executor: Executor) -> None:
    json.dump([asdict(pace) for pace in executor.paces(3, 0.01)], sys.stdout)


def obey(group: WorkerGroup, devices: Sequence[TorchDevice]) -> None:
    follow(group, devices[group.rank])


with_executor(ProbeRequest(num_devices=2, workers="process"), drive, obey)
