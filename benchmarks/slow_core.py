"""A core that is half as fast as the other: a second program runs on it all the time, at the same priority.

    python -m benchmarks.slow_core --model_name=gpt2 --batch_size=6 --out=benchmarks/results/slow_core_gpt2.json

Steps take turns: plain eager; `auto` of the whole batch and of two equal parts, planned for equal devices; `auto` of parts in proportion to
the speeds, planned for a second device of half the speed; `auto` of the whole batch and of parts, planned for the speeds that the devices
show side by side; DistributedDataParallel, half of the batch each.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from msgspec import to_builtins

from baechi_ext.capture.parts import shared_sizes
from baechi_ext.die_with_parent import die_with_parent
from baechi_ext.ir import Cluster
from baechi_ext.place.common import PlaceOptions
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.parity_result import require_parity
from baechi_runtime.models.registry import ModelOptions
from baechi_runtime.report.report import ProbedLink
from baechi_runtime.torch.backend import Captured, TorchBackend, on_devices
from baechi_runtime.torch.cluster import with_measured_speeds
from baechi_runtime.torch.lowering.devices import CpuDevice
from benchmarks.data_parallel import DataParallel
from benchmarks.runner import Benchmark, Row, table
from benchmarks.sizes import SIZES

SLOW, NUM_STEPS = 0.5, 15
"""The speed of the core that is shared by two programs."""
AWARE = "auto, parts by speed"
MEASURED = "auto, parts by measured speed"
COLUMNS = {
    "variant": "{variant}",
    "predicted ms": lambda row: "" if row["predicted_us"] is None else f"{row['predicted_us'] / 1e3:.1f}",
    "measured ms": lambda row: f"{row['measured_us']['median'] / 1e3:.1f}",
    "x eager": lambda row: "{median:.2f} ({low:.2f} to {high:.2f})".format_map(row["times_eager"]),
    f"{AWARE}, x this": lambda row: "{median:.2f} ({low:.2f} to {high:.2f})".format_map(row["aware_gains"]),
}


@contextlib.contextmanager
def slowed(core: int) -> Iterator[None]:
    """Within, a program of no use takes its share of a core."""

    def begin() -> None:
        die_with_parent()
        os.sched_setaffinity(0, {core})

    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, preexec_fn=begin, stdout=subprocess.PIPE) as other:
        try:
            if other.stdout is not None:
                other.stdout.readline()  # it runs
            yield
        finally:
            other.kill()


def run(args: argparse.Namespace, backend: TorchBackend) -> Row:
    """All variants of one model, measured."""
    whole, (even, probe) = backend.capture(), backend.cluster()
    slow = replace(even, devices=(*even.devices[:-1], replace(even.devices[-1], speed=SLOW)))
    sizes = shared_sizes(whole.batch or 0, [device.speed for device in slow.devices])
    kinds: dict[str, tuple[Captured, Cluster]] = {
        "auto, whole batch": (whole, even),
        "auto, equal parts": (backend.in_parts(whole, len(even)), even),
        AWARE: (backend.in_parts(whole, sizes), slow),
    }
    devices = [device for device in backend.executor.devices if isinstance(device, CpuDevice)]
    with slowed(devices[-1].core):
        measured, _ = with_measured_speeds(even, backend.executor)
    shown = shared_sizes(whole.batch or 0, [device.speed for device in measured.devices])
    same = next((captured for captured, _ in kinds.values() if captured.microbatches == shown), None)
    kinds["auto, whole batch, measured speeds"] = whole, measured
    kinds[MEASURED] = same or backend.in_parts(whole, shown), measured
    plans = {name: pipeline.plan(captured.graph, cluster, backend.request.plan) for name, (captured, cluster) in kinds.items()}
    variants = {}
    for name, (captured, _) in kinds.items():
        require_parity(backend.check(captured, plans[name].timeline))
        variants[name] = backend.load(captured, plans[name].timeline)
    with DataParallel(backend.request, devices) as ddp, slowed(devices[-1].core):
        measurement = backend.measure(whole, {**variants, "ddp": ddp}, NUM_STEPS, lambda i: None)
    rows = [
        {
            "variant": name,
            "predicted_us": plans[name].predicted_step_us if name in plans else None,
            "measured_us": to_builtins(samples),
            "times_eager": to_builtins(measurement.ratio("eager", name)),
            "aware_gains": to_builtins(measurement.ratio(name, AWARE)),
        }
        for name, samples in measurement.samples.items()
    ]
    return {
        "model": backend.request.model,
        "sizes": list(sizes),
        "measured_speeds": [device.speed for device in measured.devices],
        "measured_sizes": list(shown),
        "link": None if probe is None else to_builtins(ProbedLink.of(probe)),
        "rows": rows,
    }


def measure(args: argparse.Namespace) -> Iterator[Row]:
    options = SIZES.get(args.model_name, ModelOptions())
    if args.batch_size:
        options = replace(options, batch_size=args.batch_size)
    plan = pipeline.PlanRequest(options=PlaceOptions(time_limit_seconds=10))
    request = TrainRequest(args.model_name, plan, options, num_devices=2, batch_norm_per_part=True, device_speeds=(1.0,))
    found = on_devices(request, partial(run, args))
    if found is not None:
        yield found


def report(found: Row) -> str:
    given, shown = (" and ".join(map(str, found[name])) for name in ("sizes", "measured_sizes"))
    speeds = " and ".join(map(str, found["measured_speeds"]))
    return f"{found['model']}, parts of {given} examples; measured speeds {speeds}, parts of {shown}\n\n{table(COLUMNS, found['rows'])}"


FLAGS = {"--model_name": {"default": "gpt2"}, "--batch_size": {"type": int, "default": 0, "metavar": "N"}}
main = Benchmark("slow_core", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
