"""From the fragments of a call to one captured graph, and to the step that it is profiled and run as."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from baechi_ext.capture.module_names import name_in_frame
from baechi_ext.capture.torch_autocast import Autocast
from baechi_ext.capture.torch_dynamo import source_of
from baechi_ext.capture.torch_fragments import CapturedCall, CapturedFragment, Fragment, capture_fragments
from baechi_ext.capture.torch_joint import CaptureOptions
from baechi_ext.capture.torch_private import is_foreign
from baechi_ext.errors import CaptureError
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.comparator import SHARE
from baechi_runtime.torch.calls.optimizers import optimizer_slots
from baechi_runtime.torch.parity import SHARE_OF_NORMALISED, SHARE_OF_PARTS, TOLERANCE, TOLERANCE_OF_PARTS

LOW_PRECISION = 2e-2
"""Allowed relative difference where ops compute in 16 bits."""
ROUNDINGS = 2.5
"""The same of a batch in parts, in units in the last place: 2e-2 for bfloat16, 2.4e-3 for float16. A sum over parts is rounded once for
each, and once more."""
FULL_PRECISION = 1e-5
SMALL_US = 200.0
"""A forward pass below this gains nothing: handing it to devices takes as long."""
MANY_OPS = 1000
"""Capturing takes milliseconds an op, so a fragment of more is looked at before."""
TINY_OP_US = 50.0
"""Ops that are so short on a CPU gain nothing from other devices: starting one there takes as long."""
Given = tuple[fx.GraphModule, Sequence[Any], dict[int, tuple[int, int]], Autocast]
"""A fragment's graph, its arguments, those of them that other fragments of the call make, (which one, which of its outputs), and the
autocast around it; none: that of now."""


@dataclass
class CallStep:
    """The tensors that ops read and hand over while a call or a fragment of it runs: a TrainingStep without a loss or an optimizer."""

    name: str
    live: Mapping[str, Tensor]
    """Parameters and buffers of the call that was captured, by their first name."""
    written: tuple[str, ...]
    """Buffers that the step changes."""
    inputs: Sequence[Tensor] | Mapping[int, Tensor]
    """By their numbers among the arguments of all fragments."""
    tangents: Sequence[Tensor | None] | None = None
    """The gradients that come in; None: ones, as when the step is profiled."""
    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str | int, Tensor] = field(default_factory=dict)
    """Parameter's name or input's number -> gradient."""

    def state(self) -> Mapping[str, Tensor]:
        return self.live

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """No optimizers: the optimizer is in the caller's code."""
        return {}

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of what the step changes, on the host."""
        return {name: self.live[name].detach().to("cpu", copy=True) for name in self.written}

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Put a snapshot back, and let go of what the step handed over."""
        for name, value in snapshot.items():
            self.live[name].data.copy_(value)
        self.forget()

    def forget(self) -> None:
        """Let go of all tensors of a call but its inputs."""
        self.tangents, self.outputs, self.gradients = None, [], {}

    def replica(self, device: torch.device | str) -> "CallStep":
        """The same step with tensors of its own on `device`."""
        live = {name: value.detach().to(device, copy=True) for name, value in self.live.items()}
        given = [self.inputs[number] for number in range(len(self.inputs))]
        return CallStep(self.name, live, self.written, tuple(i.detach().to(device, copy=True) for i in given))


@dataclass(frozen=True)
class TrainingCall:
    """A captured call, and the step it is run and profiled as."""

    fragments: tuple[Fragment, ...]
    captured: CapturedCall
    step: CallStep
    note: str
    """A note on the optimizer's memory, or empty."""


Parts = int | Sequence[float]
"""The number of parts that a batch goes in, or the shares of each."""


def captured_call(request: TrainRequest, given: Sequence[Given], name: str, module: nn.Module | None, parts: Parts = 1) -> TrainingCall:
    """A call of that name, captured from its fragments; of a module, if there is one. See `call_of_fragments`. Raises CaptureError."""
    for _, args, *_ in given:
        _require_plain_tensors(args)
    fragments = tuple(
        Fragment(graph, tuple(args), argument_names(graph, args, module), links, autocast) for graph, args, links, autocast in given
    )
    return call_of_fragments(request, fragments, name, parts)


def call_of_fragments(request: TrainRequest, fragments: tuple[Fragment, ...], name: str, parts: Parts) -> TrainingCall:
    """The call of these fragments, over parts of its batch where that can be split. Raises CaptureError."""
    slots, note = optimizer_slots([a for f in fragments for a, n in zip(f.args, f.names, strict=True) if n is not None])
    options = CaptureOptions(
        "in the caller's code",
        slots,
        request.colocate_grads_with_ops,
        request.relaxed_random,
        request.batch_norm_per_part,
        "cuda" if request.cuda else "cpu",
    )
    captured = capture_fragments(fragments, options, name, 1 if request.cuda else parts)
    if request.cuda and parts != 1:
        captured = replace(captured, why_whole="CUDA devices run a script's batch as a whole")
    pairs = list(zip(captured.fragments, fragments, strict=True))
    step = CallStep(
        name,
        live={part.state[i]: f.args[i] for part, f in pairs for i in part.state},
        written=tuple(part.state[i] for part, _ in pairs for i in part.written),
        inputs=tuple(a.detach() for f in fragments for a in f.args),
    )
    return TrainingCall(fragments, captured, step, note)


def _require_plain_tensors(args: Sequence[Any]) -> None:
    """Raise CaptureError for arguments that a graph of ops can't be run with."""
    for a in args:
        if not isinstance(a, Tensor):
            raise CaptureError(f"a fragment takes a {type(a).__name__} beside tensors")
        if type(a) not in (Tensor, nn.Parameter) or a.layout != torch.strided:
            raise CaptureError(f"a fragment takes a tensor of a special kind ({type(a).__name__}, {a.layout}); pass plain dense tensors")


def argument_names(graph: fx.GraphModule, args: Sequence[Tensor], module: nn.Module | None) -> tuple[str | None, ...]:
    """For each argument, the name of its parameter or buffer, as in `module` if it belongs to that; None for other tensors."""
    known = {} if module is None else {id(v): n for n, v in (*module.named_buffers(), *module.named_parameters())}
    names: list[str | None] = []
    taken: dict[str, int] = {}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for number, (node, value) in enumerate(zip(placeholders, args, strict=True)):
        source, is_state = source_of(node)
        name = known.get(id(value))
        if name is None and (is_state or isinstance(value, nn.Parameter)):
            name = name_in_frame(source) or node.name
        if name is not None and taken.setdefault(name, id(value)) != id(value):
            name = f"{name}.{number}"
        names.append(name)
    return tuple(names)


def require_kept_activations(graph: fx.GraphModule) -> None:
    """Raise CaptureError for a graph that recomputes activations."""
    if any("checkpoint" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"):
        raise CaptureError(
            "it computes activations once more in its backward pass (torch.utils.checkpoint): a plan would keep them, and a graph would "
            "draw other random numbers"
        )


def require_results_read(graph: fx.GraphModule) -> None:
    """Raise CaptureError for a graph that calls an op for what it does besides its result, as a user's op that logs: a plan holds what is
    computed alone."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and not node.users and is_foreign(node.target) and node.target.namespace != "higher_order":
            raise CaptureError(f"it calls {node.target} for something else than its result, which a plan would leave out")


def why_too_small(plain_us: float, values: Iterable[Any], args: Iterable[Any] = ()) -> str:
    """The reason not to place a fragment whose first forward pass took `plain_us` from `args` to `values`; empty where there is none."""
    if plain_us < SMALL_US:
        return f"it is too small to gain: its forward pass takes {plain_us:.0f} us"
    tensors = [v for v in values if isinstance(v, Tensor) and v.grad_fn is not None]
    if any(t.device.type != "cpu" for t in tensors):  # the host does not wait for the ops
        return ""
    ops = backward_ops(tensors, [a for a in args if isinstance(a, Tensor)])
    if ops < MANY_OPS or plain_us / ops >= TINY_OP_US:
        return ""
    return f"its ops are too small to gain: {ops} with a gradient, {plain_us / ops:.0f} us each in the forward pass"


def backward_ops(tensors: Iterable[Tensor], begun_from: Iterable[Tensor] = ()) -> int:
    """The number of ops that autograd noted for the tensors, not counting those behind `begun_from`, nor leaves."""
    before = {t.grad_fn for t in begun_from}
    waiting, seen = [t.grad_fn for t in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in before or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        waiting += [behind for behind, _ in node.next_functions]
    return len(seen)


def limits_of(fragments: Collection[CapturedFragment], live: Mapping[str, Tensor], *, parted: bool) -> tuple[float, float]:
    """The allowed relative difference of what fragments of a call compute where the parameters live, the whole batch at once
    or `parted`, and the part of the largest gradient that a gradient counts as at least."""
    half = [torch.finfo(d).eps for f in fragments for d in f.dtypes if d in (torch.float16, torch.bfloat16)]
    device = next(iter(live.values()), torch.empty(0)).device
    kinds = TOLERANCE_OF_PARTS if parted else TOLERANCE
    tolerance = max(FULL_PRECISION, kinds.get(device.type, FULL_PRECISION))
    if half:
        tolerance = ROUNDINGS * max(half) if parted else LOW_PRECISION
    if any(f.normalised for f in fragments):
        return tolerance, SHARE_OF_NORMALISED
    # On CUDA devices unplaced modules have other kernels, cuDNN's BatchNorm, so a gradient that ought to be 0 differs there as well.
    return tolerance, SHARE_OF_PARTS if parted or device.type == "cuda" else SHARE


def leaf_of(value: Any) -> Any:
    """Make an argument a leaf for autograd, so that what made it can be freed."""
    if not isinstance(value, Tensor) or value.is_leaf:
        return value
    return value.detach().requires_grad_(value.requires_grad)
