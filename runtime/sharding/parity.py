"""Parity of a step run split: it has to compute what the module computes, in double precision, where what is left is a mistake or 1e-10."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runtime.parity_result import Parity
from runtime.sharding.execute import ShardedStep
from runtime.sharding.forward import forward_graph
from runtime.sharding.layout import Layout
from runtime.step import TrainingStep

TOLERANCE = 1e-8
"""Largest difference of the loss, a gradient or a buffer, over the largest number in it."""
_SMALLEST = 1e-6
"""A gradient that is smaller than this part of the largest of all is compared with that part: some are 0 but for rounding (of a key's
bias, which softmax does not see)."""


def check_parity(step: TrainingStep, layouts: Mapping[str, Layout], mesh: DeviceMesh) -> Parity:
    """Runs a copy of the step whole and split, from the same weights and random numbers, and compares loss, gradients and buffers.

    Every process has to call it; each gets the same answer.
    """
    module = copy.deepcopy(step.module).double()
    inputs = [value.double() if value.is_floating_point() else value for value in step.inputs]
    split = ShardedStep(forward_graph(module, inputs, step.name), module, layouts, mesh)
    random = torch.get_rng_state()
    torch.manual_seed(step.seed)
    loss = split.run(*inputs)
    actual = _named(loss, {n: p.grad for n, p in split.parameters.items()}, split.buffers)
    torch.manual_seed(step.seed)
    loss = module(*inputs)
    loss.backward()
    torch.set_rng_state(random)
    expected = _named(loss, {n: p.grad for n, p in module.named_parameters()}, dict(module.named_buffers()))
    return compare_exact(expected, actual)


def _named(loss: Tensor, gradients: Mapping[str, Tensor | None], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {"loss": loss} | {f"gradient of {n}": g for n, g in gradients.items() if g is not None}
    named |= {f"new value of {n}": b for n, b in buffers.items()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach() for n, v in named.items()}


def compare_exact(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> Parity:
    """Compares tensors in double precision by name: "loss", "gradient of ...", and others."""
    largest = max((v.abs().max().item() for n, v in expected.items() if n.startswith("gradient")), default=0.0)
    worst, most, most_relative = "", 0.0, 0.0
    for name in sorted(expected.keys() | actual.keys()):
        a, b = expected.get(name), actual.get(name)
        absolute = relative = float("inf")
        if a is not None and b is not None and a.shape == b.shape:
            absolute = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
            least = _SMALLEST * largest if name.startswith("gradient") else 1e-30
            relative = absolute / max(a.double().abs().max().item() if a.numel() else 0.0, least)
        if not relative <= most_relative or not worst:  # a NaN is worst of all
            worst, most_relative = name, relative
        most = max(most, absolute)
    return Parity(most_relative <= TOLERANCE, most, most_relative, worst, len(expected), TOLERANCE)
