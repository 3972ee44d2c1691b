"""Keys that plans and verdicts are kept under: the machine, its devices, what runs there, and what it is that runs."""

from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx

from baechi_ext.capture.torch_joint import Binding, BoundOp
from baechi_ext.ir.made_by import versions
from baechi_ext.ir.op_graph import OpGraph
from baechi_runtime.host.cache_folder import key_of
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.host.processor import processor
from baechi_runtime.torch.lowering.devices import TorchDevice


def plan_key(choices: Mapping[str, Any], devices: Sequence[TorchDevice], graph: OpGraph, binding: Binding) -> str:
    """The key of a captured graph's plan; `choices` say how it is placed (`TrainRequest.choices`)."""
    held = [(op.persistent_bytes, op.output_bytes, op.expert) for op in graph.ops]  # what an optimizer holds is in no fingerprint
    parts = {"graph": graph.fingerprint, "ops": op_signatures(graph, binding), "held": held}
    return key_of({"kind": "plan", **parts, **_surroundings(choices, devices)})


def verdict_key(choices: Mapping[str, Any], devices: Sequence[TorchDevice], parts: Sequence[Any]) -> str:
    """The key of what `parts` say it is of (a script's path and content, a module's class, shapes: values of JSON, or what str tells
    apart), on this machine, placed by these choices."""
    return key_of({"kind": "verdict", "of": list(parts), **_surroundings(choices, devices)})


def _surroundings(choices: Mapping[str, Any], devices: Sequence[TorchDevice]) -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(d.torch_device) for d in devices if d.torch_device.type == "cuda"]
    return {
        "machine": {"processor": processor(), "cores": len(devices[0].cores), "memory": usable_bytes(), "gpus": gpus},
        "devices": [(d.name, str(d.torch_device), d.clock_name, d.share, d.node) for d in devices],
        "versions": versions(),
        "numbers": (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        "choices": dict(choices),
    }


def op_signatures(graph: OpGraph, binding: Binding) -> list[str]:
    """A text for each op, in the graph's order: its target, the types, shapes and strides of the tensors it reads and makes, and its
    constants. Ops with the same text do the same work.

    A graph's fingerprint has the bytes of tensors alone, which are the same for a matrix and its transpose.
    """
    return [" ".join((op.op, *_parts(bound))) for op, bound in zip(graph.ops, binding.ops, strict=True)]


def _parts(bound: BoundOp) -> Iterator[str]:
    if bound.node is not None:
        target = bound.node.target
        yield target.__name__ if isinstance(target, FunctionType) else str(target)
        yield from map(_described, bound.node.args)
        yield from (f"{name}={_described(value)}" for name, value in bound.node.kwargs.items())
        yield f"-> {_described(bound.node)}"
    for kind, nodes in (("g", bound.gradients), ("o", bound.outputs), ("t", bound.tangents)):
        yield from (f"{kind}:{_described(node)}" for node in nodes)
    yield f"{len(bound.views)} views"


def _described(value: Any) -> str:
    """An argument: of a node what it is a tensor of; a constant as it is written."""
    if isinstance(value, fx.Node):
        return _described(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        strided = value.layout == torch.strided
        return f"{value.dtype}{list(value.shape)}{list(value.stride()) if strided else value.layout}@{value.device}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, slice):
        return f"{_described(value.start)}:{_described(value.stop)}:{_described(value.step)}"
    return repr(value)
