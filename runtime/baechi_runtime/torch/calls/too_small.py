"""Fragments that are not worth capturing: they are over in no time, or consist of tiny ops."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

SMALL_US = 200.0
"""A forward pass below this gains nothing: handing it to devices takes as long."""
MANY_OPS = 1000
"""Capturing takes milliseconds an op, so a fragment of more is looked at before."""
TINY_OP_US = 50.0
"""Ops that are so short on a CPU gain nothing from other devices: starting one there takes as long."""


def why_too_small(plain_us: float, values: Iterable[Any]) -> str:
    """The reason not to place a fragment whose first forward pass took `plain_us` and returned `values`; empty where there is none."""
    if plain_us < SMALL_US:
        return f"it is too small to gain: its forward pass takes {plain_us:.0f} us"
    tensors = [v for v in values if isinstance(v, Tensor) and v.grad_fn is not None]
    if any(t.device.type != "cpu" for t in tensors):  # the host does not wait for the ops
        return ""
    ops = backward_ops(tensors)
    if ops < MANY_OPS or plain_us / ops >= TINY_OP_US:
        return ""
    return f"its ops are too small to gain: {ops} with a gradient, {plain_us / ops:.0f} us each in the forward pass"


def backward_ops(tensors: Iterable[Tensor]) -> int:
    """The number of ops that autograd noted for the tensors; leaves are not counted."""
    waiting, seen = [t.grad_fn for t in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return len(seen)
