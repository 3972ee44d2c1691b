"""Parity of a step run split: it has to compute what the module computes, in double precision, where what is left is a mistake or 1e-10."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from baechi_runtime.measure.comparator import compare
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.sharding.captured import forward_graph
from baechi_runtime.sharding.execute import ShardedStep
from baechi_runtime.sharding.layout import Layout

TOLERANCE = 1e-8
"""Largest difference of the loss, a gradient or a buffer, over the largest number in it."""
SHARE = 1e-6
"""The part of the largest gradient that all are compared with at least: some are 0 but for rounding (of a key's bias, which softmax does
not see), and doubles are rounded less."""


def check_parity(step: TrainingStep, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> Parity:
    """Runs a copy of the step whole and split, from the same weights and random numbers, and compares loss, gradients and buffers.

    Every process has to call it; each gets the same answer.
    """
    module = copy.deepcopy(step.module).double()
    inputs = [value.double() if value.is_floating_point() else value for value in step.inputs]
    split = ShardedStep(forward_graph(module, inputs, step.name), module, layouts, mesh)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(step.seed)
        loss = split.run(*inputs)
        actual = _named(loss, {n: p.grad for n, p in split.parameters.items()}, split.buffers)
        torch.manual_seed(step.seed)
        loss = module(*inputs)
        loss.backward()
    expected = _named(loss, {n: p.grad for n, p in module.named_parameters()}, dict(module.named_buffers()))
    return compare(expected, actual, TOLERANCE, share=SHARE)


def _named(loss: Tensor, gradients: Mapping[str, Tensor | None], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {"loss": loss} | {f"gradient of {n}": g for n, g in gradients.items() if g is not None}
    named |= {f"new value of {n}": b for n, b in buffers.items()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for n, v in named.items()}
