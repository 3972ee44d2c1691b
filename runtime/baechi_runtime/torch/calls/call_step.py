"""Capturing a call, and the step that it is profiled as."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from baechi_ext.capture.torch_fragments import CapturedCall, Fragment, capture_fragments
from baechi_ext.capture.torch_joint import CaptureOptions
from baechi_ext.errors import CaptureError
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.torch.calls.dynamo_graph import argument_names
from baechi_runtime.torch.calls.optimizers import optimizer_slots
from baechi_runtime.torch.calls.phases import CallStep
from baechi_runtime.torch.parity import TOLERANCE

LOW_PRECISION = 2e-2
"""Allowed relative difference where ops compute in 16 bits."""
FULL_PRECISION = 1e-5
Given = tuple[fx.GraphModule, Sequence[Any], dict[int, tuple[int, int]]]
"""A fragment's graph, its arguments, and those of them that other fragments of the call make: (which one, which of its outputs)."""


@dataclass(frozen=True)
class TrainingCall:
    """A captured call, and the step it is run and profiled as."""

    fragments: tuple[Fragment, ...]
    captured: CapturedCall
    step: CallStep
    note: str
    """A note on the optimizer's memory, or empty."""


def captured_call(request: TrainRequest, given: Sequence[Given], name: str, module: nn.Module | None) -> TrainingCall:
    """A call of that name, captured from its fragments; of a module, if there is one. Raises CaptureError."""
    fragments = []
    for graph, args, links in given:
        _require_plain_tensors(args)
        fragments.append(Fragment(graph, tuple(args), argument_names(graph, args, module), links))
    slots, note = optimizer_slots([a for f in fragments for a, n in zip(f.args, f.names, strict=True) if n is not None])
    options = CaptureOptions("in the caller's code", slots, request.colocate_grads_with_ops, request.relaxed_random)
    captured = capture_fragments(fragments, options, name)
    return TrainingCall(tuple(fragments), captured, _step_of(name, fragments, captured), note)


def tolerance_of(dtypes: Collection[torch.dtype], live: Mapping[str, Tensor]) -> float:
    """The allowed relative difference of what is computed in these types where the parameters live."""
    if any(d in (torch.float16, torch.bfloat16) for d in dtypes):
        return LOW_PRECISION
    device = next(iter(live.values()), torch.empty(0)).device
    return max(FULL_PRECISION, TOLERANCE.get(device.type, FULL_PRECISION))


def _require_plain_tensors(args: Sequence[Any]) -> None:
    """Raise CaptureError for arguments that a graph of ops can't be run with."""
    for a in args:
        if not isinstance(a, Tensor):
            raise CaptureError(f"a fragment takes a {type(a).__name__} beside tensors")
        if type(a) not in (Tensor, nn.Parameter) or a.layout != torch.strided:
            raise CaptureError(f"a fragment takes a tensor of a special kind ({type(a).__name__}, {a.layout}); pass plain dense tensors")


def version_of(value: Any) -> int:
    """Autograd's count of a tensor's changes; 0 for anything else."""
    return value._version if isinstance(value, Tensor) else 0


def leaf_of(value: Any) -> Any:
    """Make an argument a leaf for autograd, so that what made it can be freed."""
    if not isinstance(value, Tensor) or value.is_leaf:
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _step_of(name: str, specs: Sequence[Fragment], captured: CapturedCall) -> CallStep:
    """The call as a step to be profiled, with the arguments it was captured with."""
    live = {part.state[i]: spec.args[i] for part, spec in zip(captured.fragments, specs, strict=True) for i in part.state}
    written = tuple(part.state[i] for part in captured.fragments for i in part.written)
    inputs = tuple(a.detach() for spec in specs for a in spec.args)
    return CallStep(name, live, written, inputs)
