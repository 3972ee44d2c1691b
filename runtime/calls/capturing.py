"""A module's training call, captured as one graph; the module is left as it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_joint import CaptureOptions
from baechi_ext.capture.torch_module import CapturedCall, capture_call
from baechi_ext.capture.torch_tree import Tree, flatten
from baechi_ext.errors import CaptureError
from runtime.calls.module_watch import Attributes
from runtime.calls.optimizers import optimizer_of
from runtime.calls.phases import ModuleStep
from runtime.calls.placing import home_of
from runtime.calls.verify import tolerance_of
from runtime.progress import progress
from runtime.train_request import TrainRequest


@dataclass(frozen=True)
class TrainingCall:
    """A captured call, and the step it is run and profiled as."""

    captured: CapturedCall
    step: ModuleStep
    """With the call's inputs."""
    home: torch.device
    """Where the caller expects outputs."""
    tolerance: float
    """Allowed relative difference."""
    note: str
    """What is to be said of the optimizer's memory."""


def plain_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Tree]:
    """The tensors of a call's arguments and the tree of (args, kwargs). Raises CaptureError for tensors of a special kind."""
    inputs, given = flatten((args, kwargs), arguments_of(module))
    if any(type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided for x in inputs):
        raise CaptureError(f"{arguments_of(module)} is a tensor of a special kind; pass plain dense tensors")
    return inputs, given


def arguments_of(module: nn.Module) -> str:
    """What errors call an argument of the module's call."""
    return f"an argument of {type(module).__name__}"


def capture_training_call(module: nn.Module, inputs: Sequence[Tensor], given: Tree, request: TrainRequest) -> TrainingCall:
    """The module's call with these arguments. Raises CaptureError where it is no one graph."""
    name, attributes = type(module).__name__, Attributes(module)
    for part in module.modules():
        vars(part).pop("_compiled_call_impl", None)
    optimizer = optimizer_of(module)
    options = CaptureOptions("in the caller's code", optimizer.slots, request.colocate_grads_with_ops, request.relaxed_random)
    try:
        with progress(f"capturing a training call of {name}"):
            captured = capture_call(module, inputs, given, options, name)
    finally:
        attributes.restore()
    live = dict(module.named_parameters()) | dict(module.named_buffers())
    written = tuple(dict.fromkeys(n for writes in captured.binding.buffer_writes.values() for n, _ in writes))
    step = ModuleStep(name, live, written, tuple(x.detach() for x in inputs))
    home = home_of(live, tuple(inputs))
    tolerance = tolerance_of([n.meta["val"].dtype for n in captured.binding.home if hasattr(n.meta["val"], "dtype")], home)
    return TrainingCall(captured, step, home, tolerance, optimizer.note)
