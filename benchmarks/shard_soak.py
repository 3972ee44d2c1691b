"""Split steps by strategies of chance, over and over, each in worker processes of its own: whether they equal the whole step, and end.

    python -m benchmarks.shard_soak --minutes=10

A run that fails, or whose workers do not end in peace, is printed with its seed and what was said; the exit code is then 1. Runs differ in
model, number of processes and strategies; the first seed is --seed, and each run is repeated by its own.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from random import Random

import torch
from rich.console import Console

from baechi_ext.errors import ExecutionError
from baechi_ext.shard.machine import Machine
from runtime.models.registry import ModelOptions, make_step
from runtime.processes.launch import run_workers
from runtime.processes.worker_group import WorkerGroup
from runtime.sharding.align import lay_out
from runtime.sharding.layout import mesh_shape
from runtime.sharding.mesh import make_mesh
from runtime.sharding.models import model_of
from runtime.sharding.parity import check_parity
from runtime.sharding.strategies import search_runnable
from runtime.step import optimizer_spec

MODELS = {
    "inception_v3": ModelOptions(batch_size=4, image_size=75),
    "rnnlm": ModelOptions(batch_size=4, vocab_size=64, rnn_units=16, max_seq_length=8, rnn_chunk=4),
    "transformer": ModelOptions(batch_size=4, vocab_size=64, max_seq_length=8, num_layers=1, d_model=16, d_ff=32, num_heads=4),
}
_STRATEGIES = 3
"""Strategies a run, in the same processes."""
_TIMEOUT_SECONDS = 300.0


def worker(seed: int) -> None:
    """One process's part of a run. Raises ExecutionError where a step differs."""
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    random = Random(seed)
    name = random.choice(list(MODELS))
    with WorkerGroup.join(_TIMEOUT_SECONDS, torch.device("cpu")) as group:
        shape = mesh_shape(group.size)
        mesh = make_mesh("cpu", shape)
        model, step = model_of(name, MODELS[name]), make_step(name, MODELS[name], optimizer_spec("sgd", 0.1))
        tables = search_runnable(model.forward, model.captured, Machine(devices=group.size), shape).tables
        for _ in range(_STRATEGIES):
            strategy = tables.strategy([random.randrange(size) for size in tables.sizes])
            parity = check_parity(step, lay_out(model.forward, model.captured, strategy, shape), mesh)
            if not parity.passed:
                raise ExecutionError(f"{name}: {parity.max_rel_diff:g} in {parity.worst}")


def soak(minutes: float, seed: int, processes: Sequence[int], console: Console) -> int:
    """How many runs failed."""
    until, failed, runs = time.monotonic() + 60 * minutes, 0, 0
    while time.monotonic() < until:
        count = processes[runs % len(processes)]
        code = f"from benchmarks.shard_soak import soak_once; soak_once({seed + runs}, {count})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * _TIMEOUT_SECONDS)
        if done.returncode or "terminate" in done.stderr:
            failed += 1
            console.print(f"seed {seed + runs}, {count} processes: {json.dumps(done.stderr[-2000:])}")
        runs += 1
    console.print(f"{runs} runs, {failed} failed")
    return failed


def soak_once(seed: int, processes: int) -> None:
    """One run, in workers."""
    sys.exit(run_workers([f"--worker={seed}"], processes, _TIMEOUT_SECONDS, "benchmarks.shard_soak"))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the soak; as a worker, its part of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        worker(args.worker)
        return
    sys.exit(1 if soak(args.minutes, args.seed, args.processes, Console(file=sys.stdout, highlight=False)) else 0)


if __name__ == "__main__":
    main()
