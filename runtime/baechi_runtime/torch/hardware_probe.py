"""This machine's cores as hardware: what PyTorch gets out of them, measured in a fifth of a second."""

import time
from collections.abc import Callable

import torch

from baechi_ext.cost.hardware import CPU, Hardware, hardware_named
from baechi_ext.ir.cluster import Link
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.host.processor import processor
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.lowering.devices import one_thread

_SIDE, _NUMBERS, _REPEATS = 768, 1 << 23, 12
_HANDOVER_US = 30.0
"""The latency between two threads, rounded up: the probed links in benchmarks/results/compiled_*.json have 20 to 26 us."""


def hardware_of(name: str) -> Hardware:
    """The hardware of a name in the table, or of this machine's cores. Raises OptionError for an unknown name."""
    return cpu_hardware() if name == CPU else hardware_named(name)


def cpu_hardware() -> Hardware:
    """A core of this machine. The least of a few repeats counts, by the thread's CPU time, as costs are profiled: others only add to it."""
    with one_thread(), torch.no_grad(), progress("probing what a core of this machine can do"):
        a, b = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
        numbers, target = torch.ones(_NUMBERS), torch.ones(_NUMBERS)
        product_us = _least_us(lambda: torch.mm(a, b))
        copy_us = _least_us(lambda: target.copy_(numbers))
    flop_per_us, bytes_per_us = 2 * _SIDE**3 / product_us, 2 * numbers.nbytes / copy_us
    link = Link(2 / bytes_per_us, _HANDOVER_US)
    source = f"a core of {processor()}: FP32 {flop_per_us / 1e3:.4g} GFLOP/s, {bytes_per_us / 1e3:.3g} GB/s, probed now"
    return Hardware(CPU, flop_per_us, flop_per_us, bytes_per_us, usable_bytes(), link, source, shares_memory=True)


def _least_us(run: Callable[[], object]) -> float:
    found = []
    for _ in range(_REPEATS + 1):
        begin = time.thread_time_ns()
        run()
        found.append((time.thread_time_ns() - begin) / 1000)
    return min(found[1:])
