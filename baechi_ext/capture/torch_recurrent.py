"""Recurrent layers while a step is captured: nn.LSTM as one op per layer and direction, as it runs uncaptured on a CPU.

Traced as it is, torch writes a recurrent layer out, some fifty ops per time step, and forgets the dropout between stacked layers. So
stacked layers are taken apart here, with their dropout, and a layer of an LSTM becomes the very op that it is in an ordinary step.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

_LSTM_MODE = 2
"""oneDNN's number for an LSTM cell."""


def recurrent_layers_kept() -> "AbstractContextManager[Any]":
    """While it is entered, calls of torch's recurrent functions go layer by layer."""
    import torch
    from torch.overrides import TorchFunctionMode

    functions = {getattr(torch, name): name == "lstm" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}

    class Layers(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in functions and not kwargs and len(args) == 9 and isinstance(args[3], bool):
                return _stacked(func, args, functions[func])
            return func(*args, **(kwargs or {}))

    return Layers()


def _stacked(function: Any, args: Sequence[Any], is_lstm: bool) -> "tuple[torch.Tensor, ...]":
    import torch

    x, state, weights, biased, layers, dropout, train, both, batch_first = args
    states = list(state) if is_lstm else [state]
    directions = 2 if both else 1
    per_layer = len(weights) // layers
    x = x.transpose(0, 1) if batch_first else x
    last: list[Any] = []
    for layer in range(layers):
        if layer and dropout and train:
            x = torch.dropout(x, dropout, True)
        rows = slice(layer * directions, (layer + 1) * directions)
        here = [s[rows] for s in states]
        own = list(weights[layer * per_layer : (layer + 1) * per_layer])
        if is_lstm and _fuses(x, here, own):
            x, *ends = _lstm_layer(x, here, own, biased, directions)
        else:
            x, *ends = function(x, tuple(here) if is_lstm else here[0], own, biased, 1, 0.0, train, both, False)
        last.append(ends)
    stacked = [torch.cat(parts, 0) for parts in zip(*last, strict=True)]
    return (x.transpose(0, 1) if batch_first else x, *stacked)


def _fuses(x: "torch.Tensor", state: "Sequence[torch.Tensor]", weights: "Sequence[torch.Tensor]") -> bool:
    """True if an ordinary step runs the layer as one op."""
    import torch

    tensors = [x, *state, *weights]
    return (
        all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
        and state[0].shape[2] == state[1].shape[2]
        and x.numel() > 0
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")
    )


def _lstm_layer(
    x: "torch.Tensor", state: "Sequence[torch.Tensor]", weights: "list[torch.Tensor]", biased: bool, directions: int
) -> "list[torch.Tensor]":
    """Outputs, last h and last c of one layer."""
    import torch

    per_direction = len(weights) // directions
    parts = []
    for d in range(directions):
        own = weights[d * per_direction : (d + 1) * per_direction]
        if not biased:
            own += [torch.zeros(own[0].shape[:1], dtype=x.dtype)] * 2
        h, c = (s[d : d + 1].contiguous() for s in state)
        units = h.shape[2]
        y, last_h, last_c, _ = torch.ops.aten.mkldnn_rnn_layer.default(
            x.contiguous(), *own, h, c, d == 1, [], _LSTM_MODE, units, 1, biased, False, False, True
        )
        parts.append((y, last_h, last_c))
    if directions == 1:
        return list(parts[0])
    return [torch.cat([p[0] for p in parts], 2), *(torch.cat([p[i] for p in parts], 0) for i in (1, 2))]
