"""The work by which devices' speeds are compared: products of matrices that stay in a core's cache, or fill a GPU."""

import time

import torch

from baechi_runtime.measure.device_speeds import Pace
from baechi_runtime.torch.lowering.devices import TorchDevice

SIDE = {"cpu": 192, "cuda": 1536}
"""Side of the square matrices whose product is the unit of work: some 0.2 ms, and on CUDA well above what starting a kernel takes."""


def play_pace(device: TorchDevice, windows: int, window_seconds: float) -> Pace:
    """The pace of a device, whose thread calls this while those of the others do the same; the first window is for warming up."""
    where = device.torch_device
    matrix = torch.ones(SIDE[where.type], SIDE[where.type], device=where)
    wall_us, clock_us = [], []
    for _ in range(1 + windows):
        mark, begin, done = device.mark(), time.perf_counter(), 0
        while (spent := time.perf_counter() - begin) < window_seconds:
            torch.mm(matrix, matrix)
            device.synchronize()
            done += 1
        end = device.mark()
        device.synchronize()
        wall_us.append(spent * 1e6 / done)
        clock_us.append(device.elapsed_us(mark, end) / done)
    return Pace(tuple(wall_us[1:]), tuple(clock_us[1:]))
