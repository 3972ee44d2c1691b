"""The arguments of a graph that TorchDynamo made: which of them are parameters and buffers, and their names."""

from collections.abc import Sequence

from torch import Tensor, fx, nn

from baechi_ext.capture.module_names import name_in_frame
from baechi_ext.capture.torch_dynamo import source_of

_RECOMPUTED = (
    "it computes activations once more in its backward pass (torch.utils.checkpoint): a plan would keep them, and a graph would draw other "
    "random numbers"
)


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


def recomputes(graph: fx.GraphModule) -> str:
    """Say why a graph that recomputes activations is not placed; empty for any other graph."""
    return _RECOMPUTED if any("checkpoint" in str(node.target) for node in graph.graph.nodes if node.op == "call_function") else ""
