"""Eager steps of the built-in models on one core, where malloc keeps all that is freed and where it does as it does by itself, in turn.

    python -m benchmarks.kept_memory --out=benchmarks/results/kept_memory

Writes NAME.json and NAME.md. Each kind has a process of its own; neither has huge pages.
"""

import argparse
import os
import resource
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from baechi_runtime.host.malloc import keep_freed_memory
from baechi_runtime.report.tables import as_size
from benchmarks.runner import Benchmark, Row, in_turn, timed
from benchmarks.sizes import SIZES

CASES = {**SIZES, "gpt2/50257": replace(SIZES["gpt2"], vocab_size=50_257)}
"""gpt2/50257 has as many words as GPT-2 was trained with."""
KINDS = ("given back", "kept")
WARMUP, ROUNDS = 3, 10
STEP: Any = None
"""This process's."""


def build(case: str, kind: str) -> None:
    """Makes this process's step."""
    global STEP
    import torch

    from baechi_runtime.drivers.pipeline import PlanRequest
    from baechi_runtime.drivers.train_request import TrainRequest
    from baechi_runtime.models.training_step import EagerStep
    from baechi_runtime.torch.backend import build_step

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    if kind == "kept":
        keep_freed_memory()
    STEP = EagerStep(build_step(TrainRequest(case.partition("/")[0], PlanRequest(), CASES[case])), torch.device("cpu"))
    for _ in range(WARMUP):
        STEP.run()


def step() -> tuple[float, int]:
    """Milliseconds and page faults of one step."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _, taken = timed(STEP.run)
    return taken["seconds"] * 1e3, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(args: argparse.Namespace) -> Iterator[Row]:
    for case in CASES:
        with ExitStack() as stack:
            pools = {kind: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"))) for kind in KINDS}
            for kind, pool in pools.items():
                pool.submit(build, case, kind).result()
            rows: list[Row] = []
            samples = in_turn({kind: lambda pool=pool: pool.submit(step).result() for kind, pool in pools.items()}, ROUNDS)
            for kind, found in samples.items():
                ms, faults = zip(*found, strict=True)
                peak = pools[kind].submit(peak_bytes).result()
                rows.append({"model": case, "freed": kind, "samples_ms": ms, "faults": statistics.median(faults), "peak_bytes": peak})
        gains = [a / b for a, b in zip(*(row["samples_ms"] for row in rows), strict=True)]
        rows[-1]["gain"] = statistics.median(gains)
        yield {"rows": rows}


COLUMNS = {
    "model": "{model}",
    "freed memory": "{freed}",
    "ms a step": lambda row: f"{statistics.median(row['samples_ms']):.1f}",
    "min to max": lambda row: f"{min(row['samples_ms']):.1f} to {max(row['samples_ms']):.1f}",
    "page faults": "{faults:.0f}",
    "peak memory": lambda row: as_size(row["peak_bytes"]),
    "times as fast": lambda row: f"{row['gain']:.2f}" if "gain" in row else "",
}
main = Benchmark("kept_memory", __doc__, {}, measure, COLUMNS, "`{command}`", markdown=True).main

if __name__ == "__main__":
    main()
