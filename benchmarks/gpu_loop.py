"""A user's own training loop on one GPU, its module as it is, compiled by PyTorch, and placed on that GPU op by op and as
CUDA graphs, in turn.

    python -m benchmarks.gpu_loop [--model_names=A,B] --out=benchmarks/results/gpu_loop

Writes NAME.json and NAME.md. A step is zero_grad(), forward, backward and step() of AdamW; each model has a process of its own, and their
steps are timed one model after the other, once all are set up. `as eager` is the ratio of pairs; `loss` the largest relative difference
from the eager module's loss, which is not 0 where other random numbers are drawn (compiled dropout).
"""

import argparse
import copy
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.synchronize import Barrier, Lock

import torch
from torch import nn

import baechi_ext
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.torch.backend import build_step
from benchmarks.runner import Benchmark, Row, in_turn, some_of
from benchmarks.sizes import SIZES

STEPS, WARM_UP, AGAIN = 20, 17, 2
"""Steps that are timed, and those before: placed calls are verified and captured, compiled ones recorded; and some more behind the wait for
the other models."""
LONGEST_SECONDS = 600.0
"""The time that the others may take to be set up."""
PLACED = {"devices": ["cuda:0"], "method": "contiguous", "keep_placed": True, "strict": True, "cache": False}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda module: module,
    "torch.compile": torch.compile,
    "reduce-overhead": partial(torch.compile, mode="reduce-overhead"),
    "op by op": partial(baechi_ext.parallelize, cuda_graphs=False, **PLACED),
    "graphs": partial(baechi_ext.parallelize, **PLACED),
}
PLACED_WAYS = ("op by op", "graphs")
MODELS = ("gpt2", "wide_towers", "transformer", "inception_v3")
FLAGS = {"--model_names": some_of(SIZES, MODELS)}


class Loop:
    """One module's training."""

    def __init__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], way: str) -> None:
        self.module = WAYS[way](copy.deepcopy(module))
        self._inputs = inputs
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        self._steps = 0

    def step(self) -> tuple[float, float]:
        """Milliseconds of a step, and its loss."""
        torch.manual_seed(self._steps)
        self._steps += 1
        torch.compiler.cudagraph_mark_step_begin()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self.module(*self._inputs)
        loss.backward()
        self._optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) * 1e3, loss.item()


_of_all: list[tuple[Barrier, Lock]] = []
"""In a model's process: where it waits for the others, and what it holds while its steps are timed."""


def share(all_set_up: Barrier, timing: Lock) -> None:
    _of_all.append((all_set_up, timing))


def rows_of(model: str) -> list[Row]:
    try:
        return timed_rows(model, *_of_all[0])
    except BaseException:
        _of_all[0][0].abort()  # the others need not wait
        raise


def timed_rows(model: str, all_set_up: Barrier, timing: Lock) -> list[Row]:
    step = build_step(TrainRequest(model, PlanRequest(), SIZES[model], num_devices=1, cuda=True)).replica("cuda:0")
    loops = {way: Loop(step.module, step.inputs, way) for way in WAYS}
    before = {way: [loop.step() for _ in range(WARM_UP)] for way, loop in loops.items()}
    all_set_up.wait(LONGEST_SECONDS)
    with timing:
        for way, loop in loops.items():
            before[way] += [loop.step() for _ in range(AGAIN)]
        found = in_turn({way: loop.step for way, loop in loops.items()}, STEPS)
    losses = {way: [loss for _, loss in (*before[way], *found[way])] for way in WAYS}
    eager = [ms for ms, _ in found["eager"]]
    rows = []
    for way, samples in found.items():
        ms = [taken for taken, _ in samples]
        gain = statistics.median(a / b for a, b in zip(eager, ms, strict=True))
        differs = max(abs(a - b) / abs(a) for a, b in zip(losses["eager"], losses[way], strict=True))
        notes = [note for note in baechi_ext.report(loops[way].module).notes if "graph" in note] if way in PLACED_WAYS else []
        rows.append({"model": model, "way": way, "samples_ms": ms, "gain": gain, "loss": differs, "notes": notes})
    return rows


def measure(args: argparse.Namespace) -> Iterator[Row]:
    names, spawn = args.model_names, multiprocessing.get_context("spawn")
    together = spawn.Barrier(len(names)), spawn.Lock()
    with ProcessPoolExecutor(len(names), spawn, initializer=share, initargs=together) as pool:
        yield {"gpu": torch.cuda.get_device_name(0), "rows": [row for rows in pool.map(rows_of, names) for row in rows]}


COLUMNS = {
    "model": "{model}",
    "module": "{way}",
    "ms a step": lambda row: f"{statistics.median(row['samples_ms']):.2f}",
    "min to max": lambda row: f"{min(row['samples_ms']):.2f} to {max(row['samples_ms']):.2f}",
    "as eager": "{gain:.2f}",
    "loss": "{loss:.1e}",
}
main = Benchmark("gpu_loop", __doc__, FLAGS, measure, COLUMNS, "On {gpu}. `{command}`", markdown=True).main

if __name__ == "__main__":
    main()
