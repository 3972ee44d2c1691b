"""The unplaced step over parts of its batch, part after part: the reference where the user allows parts to be normalised by themselves."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.parts import Parts
from baechi_ext.capture.torch_private import dispatched
from baechi_ext.errors import ParityError
from baechi_runtime.models.training_step import EagerStep, TrainingStep

_ROUNDING = 1e-3
_BERNOULLI = torch.ops.aten.bernoulli_.float
_LABELLED = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)


def part_after_part(eager: EagerStep, parts: Parts) -> Tensor:
    """One step whose gradients are added up over the parts of its batch; returns the loss. Buffers become what the first part makes of
    them. Dropout masks are those of the whole batch, which is run for them first.

    Raises ParityError where the loss is no mean over the examples: normalised by running values, the whole batch's is not its parts'.
    """
    module, inputs = eager.step.module, eager.step.inputs
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    masks = _Masks()
    with dispatched(masks.noted), torch.no_grad():
        module(*inputs)
    _require_mean(module, inputs, parts, masks)
    _set(module, buffers)
    eager.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for k, weight in enumerate(parts.weights):
        masks.begin(sum(parts.weights[:k]))
        with dispatched(masks.handed_out):
            loss = module(*parts.inputs_of(inputs, k)) * weight
        loss.backward()
        total = total.to(loss.device) + loss.detach()
        if k == 0:
            buffers = {name: value.clone() for name, value in module.named_buffers()}
    _set(module, buffers)
    eager.optimizer.step()
    return total


def is_mean_of_parts(step: TrainingStep, parts: Parts) -> bool:
    """True if the loss of the batch is the mean of those of its parts: not where these have different numbers of labels that count. Random
    numbers are drawn for each."""
    labels = _Labels()
    whole, total = _losses(step.module, step.inputs, parts, labels)
    return _alike(whole, total) and all(counts == labels.counts[1] for counts in labels.counts[1:])


def _require_mean(module: torch.nn.Module, inputs: Sequence[Tensor], parts: Parts, masks: "_Masks") -> None:
    whole, total = _losses(module, inputs, parts, masks)
    if not _alike(whole, total):
        raise ParityError(
            f"the loss of the whole batch is {whole:.6g}, that of its parts {total:.6g}: it is no mean over the examples, so "
            "the batch can't be split; give --microbatches=1"
        )


def _alike(whole: float, total: float) -> bool:
    return not math.isfinite(whole) or math.isclose(whole, total, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _losses(module: torch.nn.Module, inputs: Sequence[Tensor], parts: Parts, calls: "_Masks | _Labels") -> tuple[float, float]:
    """The loss of the whole batch, and the mean of those of its parts, normalised by running values."""
    norms = [m for m in module.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and m.training]
    for norm in norms:
        norm.eval()
    try:
        losses = []
        for values, share in [(inputs, 0.0), *((parts.inputs_of(inputs, k), sum(parts.weights[:k])) for k in range(len(parts.sizes)))]:
            calls.begin(share)
            with dispatched(calls.handed_out), torch.no_grad():
                losses.append(float(module(*values)))
    finally:
        for norm in norms:
            norm.train()
    return losses[0], sum(weight * loss for weight, loss in zip(parts.weights, losses[1:], strict=True))


def _set(module: torch.nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in module.named_buffers():
            value.copy_(buffers[name])


class _Labels:
    """The weight of the labels that each loss of the whole batch, and then of each part, is a mean over."""

    def __init__(self) -> None:
        self.counts: list[list[float]] = []

    def begin(self, share: float) -> None:
        """Begins the whole batch, or the next part."""
        self.counts.append([])

    def handed_out(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls an op, and notes what it counts."""
        result = func(*args, **kwargs)
        if func in _LABELLED:
            self.counts[-1].append(float(result[1]))
        return result


class _Masks:
    """The masks that dropout draws for a whole batch, of which each part gets its rows."""

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []
        self._left: list[Tensor] = []
        self._share = 0.0

    def begin(self, share: float) -> None:
        """Begins a part, before which this share of the batch stands."""
        self._left, self._share = list(self._drawn), share

    def noted(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls an op, and notes its mask where it draws one: a tensor to multiply with, as on the host, or one beside the result."""
        result = func(*args, **kwargs)
        if func is _BERNOULLI:
            self._drawn.append(result.clone())
        elif _drops(func, args):
            self._drawn.append(result[1])
        return result

    def handed_out(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls an op; one that draws a mask gets the part's rows of the whole batch's."""
        if func is _BERNOULLI:
            return args[0].copy_(self._rows(args[0].shape))
        if _drops(func, args):
            mask = self._rows(args[0].shape)
            return torch.ops.aten.native_dropout_backward.default(args[0], mask, 0.0 if args[1] == 1 else 1 / (1 - args[1])), mask
        return func(*args, **kwargs)

    def _rows(self, shape: Sequence[int]) -> Tensor:
        mask = self._left.pop(0)
        dim = next((d for d, length in enumerate(shape) if length != mask.shape[d]), 0)
        return mask.narrow(dim, round(self._share * mask.shape[dim]), shape[dim])


def _drops(func: Any, args: Sequence[Any]) -> bool:
    """True for a dropout that draws its mask itself."""
    return func is torch.ops.aten.native_dropout.default and bool(args[2]) and args[1] > 0
