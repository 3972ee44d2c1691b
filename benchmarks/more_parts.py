"""Predicted steps of the whole batch, of one part per device and of two, and what capturing and profiling them takes.

    python -m benchmarks.more_parts --batch_size=8 --out=benchmarks/results/more_parts.json

A graph over parts is captured once for each number of parts, and profiled in a few passes on a device that is alone; clusters have equal
devices and the link that two threads show. No plan takes less than all its ops where all devices are at work all the time, however long it
is searched for.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from baechi_ext.errors import BaechiError
from baechi_ext.ir import Cluster, Link
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.place.common import PlaceOptions
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.torch.backend import Captured, TorchBackend, capture, capture_sizes, costed, on_devices, sizes_of_parts
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.profiler import ProfileOptions
from baechi_runtime.torch.threads.executor import ThreadExecutor
from benchmarks.runner import Benchmark, Row, some_of, table
from benchmarks.sizes import SIZES

LEAST_GAIN = 0.02
PASSES = ProfileOptions(warmup=1, repeats=3)
GAINS = ("gain", "gain_at_most")
COLUMNS = {
    "model": "{model}",
    "devices": "{devices}",
    "whole, ms": lambda row: _ms(row, "1"),
    "a part per device, ms": lambda row: _ms(row, str(row["devices"])),
    "two parts per device, ms": lambda row: _ms(row, str(2 * row["devices"])),
    "at least, ms": lambda row: "-" if (us := row["least_us"].get(str(2 * row["devices"]))) is None else f"{us / 1e3:.1f}",
    "gain of two": lambda row: "-" if row["gain"] is None else f"{row['gain']:.3f}",
    "gain at most": lambda row: "-" if row["gain_at_most"] is None else f"{row['gain_at_most']:.3f}",
    "capture and profile, s": lambda row: str(row["seconds"].get(str(2 * row["devices"]), "-")),
}


def _ms(row: Row, parts: str) -> str:
    return f"{row['step_us'][parts] / 1e3:.1f}" if parts in row["step_us"] else "-"


def rows_of(backend: TorchBackend, args: argparse.Namespace, link: Link) -> Iterator[Row]:
    """A row per number of devices."""
    step, graph, binding = capture(backend.request)
    whole = Captured(graph, graph, None, step, binding)
    captured: dict[int, Captured] = {}
    seconds: dict[str, float] = {}
    for count in (2, 4):
        cluster = Cluster.uniform(count, link=link, parallel_transfers=True)
        step_us: dict[str, float] = {}
        least_us: dict[str, float] = {}
        refused: dict[str, str] = {}
        for parts in (1, count, 2 * count):
            try:
                if parts not in captured:
                    begun = time.perf_counter()
                    captured[parts] = _in_parts(backend, whole, parts)
                    seconds[str(parts)] = round(time.perf_counter() - begun, 1)
                    if args.graphs is not None:
                        captured[parts].graph.save(args.graphs / f"{backend.request.model}_{parts}.json", MadeBy())
                plan = pipeline.plan(captured[parts].graph, cluster, backend.request.plan)
                step_us[str(parts)] = plan.predicted_step_us
                least_us[str(parts)] = captured[parts].graph.total_compute_us() / count
            except BaechiError as e:
                refused[str(parts)] = str(e)
        best_us, more = min(us for parts, us in step_us.items() if parts != str(2 * count)), str(2 * count)
        gains = {"gain": best_us / step_us[more], "gain_at_most": best_us / least_us[more]} if more in step_us else dict.fromkeys(GAINS)
        row = {"model": backend.request.model, "devices": count, "step_us": step_us, "least_us": least_us, "refused": refused, **gains}
        yield {**row, "seconds": dict(seconds), "ops": {str(parts): len(found.graph) for parts, found in captured.items()}}


def _in_parts(backend: TorchBackend, whole: Captured, parts: int) -> Captured:
    """See TorchBackend.in_parts; one part is the whole batch."""
    graph, binding, request = whole.graph, whole.binding, backend.request
    if parts > 1:
        graph, binding = capture_sizes(request, whole.step, binding, sizes_of_parts(whole.step, parts))
    found = costed(request, backend.executor, graph, binding, whole.step, PASSES)
    return replace(whole, graph=found.graph, alone=found.alone, profile=found.profile, binding=binding)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    with ThreadExecutor(cpu_devices(2)) as threads:
        link = threads.probe_link().to_link()
    plan = pipeline.PlanRequest(options=PlaceOptions(time_limit_seconds=10.0))
    for name in args.models:
        options = replace(SIZES[name], batch_size=args.batch_size or SIZES[name].batch_size)
        request = TrainRequest(name, plan, options, num_devices=1, batch_norm_per_part=True)
        yield {"link": link.to_json(), "rows": on_devices(request, lambda backend: list(rows_of(backend, args, link))) or []}


def report(found: Row) -> str:
    gains = [row["gain"] for row in found["rows"] if row["gain"] is not None]
    ahead = sum(gain > 1 + LEAST_GAIN for gain in gains)
    return f"{table(COLUMNS, found['rows'])}\n\ntwo parts per device are ahead by more than {LEAST_GAIN:.0%} in {ahead} of {len(gains)}"


FLAGS = {
    "--models": some_of(SIZES),
    "--batch_size": {"type": int, "default": 0, "metavar": "N", "help": "instead of the models' own"},
    "--graphs": {"type": Path, "help": "keep the graphs in this folder"},
}
main = Benchmark("more_parts", __doc__, FLAGS, measure, report).main

if __name__ == "__main__":
    main()
