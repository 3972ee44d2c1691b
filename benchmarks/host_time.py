"""The host's time for a step on CUDA devices: what PyTorch's own step takes, our program op by op, and as one CUDA graph.

    python -m benchmarks.host_time [--rounds=20] --out=benchmarks/results/host_time

Writes NAME.json and NAME.md. A step is timed until its devices are done: by the wall clock, and in CPU time of this process, of which other
programs take nothing. Where kernels take no time, as on the tests' stand-in for CUDA with CUDA_STUB_KERNELS=none, that is the host's time.
The launch of a graph is said apart: the stand-in goes through all that the graph holds then, which a GPU does by itself. Beside steps op by
op stands what the simulator takes their host to need, by the profile of the ops and a probe of transfers.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from baechi_ext.cost import attach_costs
from baechi_ext.ir import Cluster, Link
from baechi_ext.simulate import Timeline, simulate
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.models.registry import ModelOptions
from baechi_runtime.models.training_step import EagerStep
from baechi_runtime.torch.backend import capture
from baechi_runtime.torch.lowering.devices import cuda_devices
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from baechi_runtime.torch.streams.executor import StreamExecutor, StreamStep
from baechi_runtime.torch.streams.step_graph import CudaRecorder
from baechi_runtime.torch.streams.walk import WARM_UP_STEPS
from benchmarks.runner import Benchmark, Row, in_turn

SIZES = {
    "inception_v3": ModelOptions(8),
    "gnmt_v2": ModelOptions(16, num_devices=2, vocab_size=2000, max_seq_length=20, rnn_units=256, num_layers=4),
}
EAGER, OP_BY_OP, GRAPH = "eager", "op by op", "one graph"
QUICK = ProfileOptions(warmup=1, repeats=2)
LINK = Link(us_per_byte=1e-5, latency_us=10)
"""About NVLink's: that several devices get work at all."""
DEVICES = (1, 4)


class TimedRecorder(CudaRecorder):
    """Notes the CPU time of the last launch."""

    launch_us = 0.0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        replay = super().capture(work)

        def timed() -> None:
            TimedRecorder.launch_us = _sample(replay)[1]

        return timed


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """One model after the other."""
    for name in SIZES:
        yield {"gpu": torch.cuda.get_device_name(0), "rows": _of_model(name, args.rounds)}


def _of_model(name: str, rounds: int) -> list[Row]:
    step, graph, binding = capture(TrainRequest(name, pipeline.PlanRequest(), SIZES[name], num_devices=1, cuda=True))
    devices = cuda_devices(max(DEVICES))
    with StreamExecutor(devices) as executor, StreamExecutor(devices, recorder=TimedRecorder) as graphs:
        profile = profile_step(executor, graph, binding, step, QUICK)
        costed = attach_costs(graph, profile)
        eager = EagerStep(step, executor.devices[0].torch_device)

        def unplaced() -> None:
            eager.run()
            executor.devices[0].synchronize()

        steps: dict[tuple[str, int], Callable[[], tuple[float, ...]]] = {
            (EAGER, 1): partial(executor.call, 0, partial(_sample, unplaced))
        }
        hosted = attach_costs(graph, profile, host="one")
        link = replace(LINK, issue_us=executor.probe_link().issue_us) if len(devices) > 1 else LINK
        plans: dict[int, Timeline] = {}
        graphed: dict[int, StreamStep] = {}
        for count in DEVICES:
            cluster = Cluster.uniform(count, link=LINK)
            request = pipeline.PlanRequest("m_etf")
            timeline = plans[count] = one_device_timeline(costed) if count == 1 else pipeline.plan(costed, cluster, request).timeline
            graphed[count] = graphs.load(timeline, binding, step)
            steps[OP_BY_OP, count] = partial(_sample, executor.load(timeline, binding, step).run)
            steps[GRAPH, count] = partial(_sample_of_graph, graphed[count].run)
        for step_of in steps.values():
            for _ in range(WARM_UP_STEPS + 2):
                step_of()
        notes = {count: placed.note for count, placed in graphed.items()}
        samples = in_turn(steps, rounds)
    rows: list[Row] = []
    for (kind, count), taken in samples.items():
        wall_us, cpu_us, *launch_us = (statistics.median(column) for column in zip(*taken, strict=True))
        rows.append({"model": name, "step": kind, "devices": count, "samples_us": taken, "wall_us": wall_us, "cpu_us": cpu_us})
        if kind != EAGER:
            plan = plans[count]
            rows[-1] |= {"ops": len(plan.graph), "devices_used": len(set(plan.placement)), "transfers": len(plan.transfers)}
            if kind == GRAPH:
                rows[-1] |= {"launch_us": launch_us[0], "note": notes[count]}
            else:
                predicted = simulate(hosted, Cluster.uniform(len(plan.cluster), link=link), plan.placement)
                rows[-1] |= {"predicted_us": predicted.host_us, "issue_us_of_a_transfer": link.issue_us}
    return rows


def _sample(run: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of the wall clock, and of CPU time."""
    begin, used = time.perf_counter_ns(), time.process_time_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1000, (time.process_time_ns() - used) / 1000


def _sample_of_graph(run: Callable[[], object]) -> tuple[float, float, float]:
    """And of CPU time that its launch took."""
    TimedRecorder.launch_us = 0.0
    return (*_sample(run), TimedRecorder.launch_us)


COLUMNS = {
    **{key: f"{{{key}}}" for key in ("model", "step", "devices")},
    "ops": lambda row: str(row.get("ops", "")),
    "transfers": lambda row: str(row.get("transfers", "")),
    "ms of CPU a step": lambda row: f"{row['cpu_us'] / 1000:.2f}",
    "of which the launch": lambda row: f"{row['launch_us'] / 1000:.2f}" if "launch_us" in row else "",
    "us an op": lambda row: f"{row['cpu_us'] / row['ops']:.1f}" if "ops" in row else "",
    "predicted": lambda row: f"{row['predicted_us'] / 1000:.2f}" if "predicted_us" in row else "",
    "wall ms": lambda row: f"{row['wall_us'] / 1000:.2f}",
}
main = Benchmark("host_time", __doc__, {"--rounds": 20}, measure, COLUMNS, "On {gpu}. `{command}`", markdown=True).main

if __name__ == "__main__":
    main()
