"""The forward graph of a training step, in the ops that a person would name: linear, conv2d, layer_norm. Backward is left to autograd."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from baechi_ext.capture.torch_private import lstm_states_as_they_are
from baechi_ext.capture.why_not import not_capturable
from baechi_ext.errors import CaptureError


@dataclass(frozen=True)
class ForwardGraph:
    """torch.export's program of `module(*inputs)`, the scalar loss. Weights and inputs are placeholders; `parameters` and `buffers` have
    the module's own names of them (a weight of several names has its first), `constants` the values of tensors that forward makes,
    `inputs` the placeholders of the inputs, in order.
    """

    name: str
    program: ExportedProgram
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        """The calls, in the order that they run in."""
        return [node for node in self.program.graph.nodes if node.op == "call_function"]

    @property
    def loss(self) -> fx.Node:
        """The node whose value is the loss."""
        return next(node for node in self.program.graph.nodes if node.op == "output").args[0][0]


def forward_graph(module: nn.Module, inputs: Sequence[Tensor], name: str = "model") -> ForwardGraph:
    """The forward graph of a module that returns its scalar loss; nothing of the module is changed.

    Raises CaptureError where forward can't be captured, or returns something else.
    """
    with warnings.catch_warnings(), lstm_states_as_they_are():
        warnings.simplefilter("ignore")  # of nn.LSTM's list of its own weights, among others
        try:
            program = torch.export.export(module, tuple(inputs), strict=False)
        except Exception as e:  # noqa: BLE001 - whatever the user's forward raises
            raise not_capturable(f"the forward of {name}", e) from e
    signature = program.graph_signature
    targets = {kind: {s.arg.name: s.target for s in signature.input_specs if s.kind == kind} for kind in InputKind}
    graph = ForwardGraph(
        name=name,
        program=program,
        parameters=_first_names(targets[InputKind.PARAMETER], dict(module.named_parameters(remove_duplicate=False))),
        buffers=_first_names(targets[InputKind.BUFFER], dict(module.named_buffers(remove_duplicate=False))),
        constants={own: program.constants[target] for own, target in targets[InputKind.CONSTANT_TENSOR].items()},
        inputs=tuple(targets[InputKind.USER_INPUT]),
    )
    if len(signature.output_specs) != 1 or not _is_scalar(graph.loss):
        raise CaptureError(f"the forward of {name} does not return one scalar loss; wrap the model with its loss")
    return graph


def _first_names(targets: dict[str, str], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Each placeholder's tensor by the first of its names."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {own: first[id(tensors[target])] for own, target in targets.items()}


def _is_scalar(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
