"""The functions that nodes of a traced step run: aten's own, but where autograd, which a step runs without, does more than call them."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from baechi_ext.capture.torch_private import as_if_recording, is_foreign

_LAID_OUT = {
    "aten.as_strided.default": 0,
    "aten.native_group_norm_backward.default": 0,
    "aten.view_as_complex.default": 0,
    "aten._weight_norm_interface_backward.default": 0,
    "aten.cudnn_batch_norm_backward.default": 1,
}
"""Ops that read a gradient by the strides of the trace, some past its end where it has others, and which argument that is. Autograd makes
it contiguous before; of gradients that are so in a trace, that leaves no node."""
_SEEDED = {"aten._scaled_dot_product_efficient_attention_backward.default": (7, 8), "aten._efficient_attention_backward.default": (12, 13)}
"""Ops that read their seed and its offset on the host, but in a CUDA graph, as the forward pass leaves them, and where these stand."""


def runnable(node: fx.Node, device: torch.device) -> Callable[..., Any]:
    """The function to call on a device for a node's target where gradients are not recorded."""
    target = cast(Callable[..., Any], node.target)
    if is_foreign(target):  # whose formula may have made a gradient contiguous
        return _with_strides(target, list(map(_strides, node.args)))
    if (position := _LAID_OUT.get(str(target))) is not None:
        return _with_strides(target, [_strides(a) if i == position else None for i, a in enumerate(node.args)])
    if device.type == "cuda" and (positions := _SEEDED.get(str(target))) is not None:
        return with_seeds_on_host(target, positions)
    if target is torch.ops.aten.view_as_real.default:  # a gradient that comes in may be one to be conjugated
        return lambda value: target(value.resolve_conj())
    if target is torch.ops.aten.native_dropout_backward.default and device.type == "cpu":
        return _dropout_backward
    if target is torch.ops.aten.view.default:  # autograd's own word: a gradient that comes in may have other strides than when captured
        return torch.ops.aten.reshape.default
    if target is not torch.ops.aten.mkldnn_rnn_layer.default:
        return target

    def with_workspace(*args: Any) -> Any:
        with as_if_recording():
            return target(*args)

    return with_workspace


def _strides(argument: Any) -> Any:
    """Those that an argument of a node has in the trace, a list of them for a list; None where it has none."""
    if isinstance(argument, (list, tuple)):
        return list(map(_strides, argument))
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value.stride() if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def _laid_out(value: Any, strides: Any) -> Any:
    """The value, or a copy with these strides where it has others."""
    if isinstance(strides, list):
        return type(value)(map(_laid_out, value, strides))
    if strides is None or value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _with_strides(target: Callable[..., Any], strides: list[Any]) -> Callable[..., Any]:
    """The function, with copies of those arguments that have others than these strides, as far as there are any."""
    return lambda *args, **named: target(*map(_laid_out, args, strides), **named)


def with_seeds_on_host(target: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
    """The function, which outside of a CUDA graph has the arguments at these positions on the host, also where a graph of the forward pass
    made them, or another GPU sent them. Where it found them on a GPU there, the process would end."""

    def call(*args: Any, **named: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return target(*args, **named)
        return target(*(value.cpu() if i in positions else value for i, value in enumerate(args)), **named)

    return call


def _dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient behind a dropout as autograd has it on a CPU, where the scale is rounded to the tensor's type."""
    if gradient.dtype in (torch.bfloat16, torch.float16):
        return gradient * (mask.to(gradient.dtype) * scale)
    native: torch.Tensor = torch.ops.aten.native_dropout_backward.default(gradient, mask, scale)
    return native
