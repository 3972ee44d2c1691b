"""A small step recorded on worker processes; rank 0 prints the measured step.

    python -m tests.runtime.recorded_on_processes NUM_DEVICES [--apart]

--apart: as if each worker were on a machine of its own, whose clock has to be asked for.
"""

import json
import sys

from runtime.processes.executor import ProcessExecutor, follow
from runtime.processes.launch import run_workers
from runtime.processes.worker_group import WorkerGroup, is_worker, worker_place
from runtime.step_recorder import record_step
from runtime.torch_devices import CpuDevice
from tests.torch_steps import capture, make_step, scattered

TIMEOUT_SECONDS = 120.0


def main(num_devices: int, *flags: str) -> None:
    if not is_worker():
        run_workers([str(num_devices), *flags], num_devices, TIMEOUT_SECONDS, module="tests.runtime.recorded_on_processes")
        return
    rank, size = worker_place()
    devices = [CpuDevice(i, i if "--apart" in flags else 0) for i in range(size)]
    devices[rank].enter()
    step = make_step("branches")
    graph, binding = capture(step)
    with WorkerGroup.join(TIMEOUT_SECONDS, devices[rank].torch_device) as group:
        if rank:
            follow(group, devices[rank], graph, binding, lambda: make_step("branches"))
            return
        with ProcessExecutor(group, devices) as executor:
            placed = executor.load(scattered(graph, size, 5), binding, step)
            before = placed.run()[0].item()
            measured = record_step(placed, binding).measured(graph, "process")
            after = placed.run()[0].item()
    sys.stdout.write(json.dumps({"measured": measured.to_json(), "losses": [before, after]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
