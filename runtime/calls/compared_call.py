"""A script's training call that is compared: its forward and backward pass, as it is and placed, and whether they are the same."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from runtime.calls.capturing import TrainingCall
from runtime.calls.module_calls import Call
from runtime.calls.placed_function import LoadedCall
from runtime.calls.verify import Moment, hooks_off, largest_difference, outputs_by_number, relative_differences, require_same_tree
from runtime.parity_result import Parity, require_parity

Results = tuple[dict[int, Tensor], Mapping[str | int, Tensor]]
"""Outputs by number, and gradients by parameter's name or input's number."""


class ComparedCall:
    """The script's call and its backward pass, as it is and placed, from gradients of its outputs that are the same for all. The gradients
    that come out are handed over, not added to those of the parameters, and none of the script's hooks on these sees them.
    """

    def __init__(self, call: TrainingCall, module: nn.Module, plain: Call, inputs: Sequence[Tensor]) -> None:
        self.call, self._module, self._plain, self._inputs = call, module, plain, inputs
        self._before = Moment(module)
        outputs, tree = outputs_by_number(plain(), call.captured.returned)
        require_same_tree(call.captured.returned.fill([outputs[i] for i in range(len(outputs))], inputs), tree)
        self._tangents = _tangents(outputs, call.captured.differentiable)
        self._expected = self._named(self._with_gradients(outputs))
        self._after = Moment(module)

    def plain(self) -> Results:
        """As it is."""
        return self._with_gradients(outputs_by_number(self._plain(), self.call.captured.returned)[0])

    def placed(self, loaded: LoadedCall) -> Results:
        return self._with_gradients(dict(enumerate(loaded.run(self._inputs))))

    def _with_gradients(self, outputs: dict[int, Tensor]) -> Results:
        wanted, step = list(self.call.captured.reached_by), self.call.step
        sources = [step.live[n] if isinstance(n, str) else self._inputs[n] for n in wanted]
        used = [i for i in self._tangents if outputs[i].requires_grad]
        with hooks_off(sources):
            roots, given = [outputs[i] for i in used], [self._tangents[i] for i in used]
            values = torch.autograd.grad(roots, sources, given, allow_unused=True)
        return outputs, {n: value for n, value in zip(wanted, values, strict=True) if value is not None}

    def rewind(self) -> None:
        """Buffers and random state are again as they were before the call."""
        self._before.restore()

    def parity(self, loaded: LoadedCall, *, relaxed: bool) -> Parity:
        """Of outputs, gradients and buffers with those of the call as it is, from the same state; and unless random numbers are `relaxed`,
        raises ParityError where these or the random state differ."""
        self.rewind()
        expected, actual = self._expected, self._named(self.placed(loaded))
        found = relative_differences(expected, actual)
        worst = max(found, key=found.__getitem__)
        most = max(largest_difference(expected.get(name), actual.get(name)) for name in found)
        parity = Parity(found[worst] <= self.call.tolerance, most, found[worst], worst, len(expected), self.call.tolerance)
        if not relaxed:
            require_parity(parity)
            self._after.random.require_same()
        return parity

    def _named(self, results: Results) -> dict[str, Tensor]:
        outputs, gradients = results
        named = {f"output {i}": value.detach() for i, value in outputs.items()}
        named |= {f"gradient of {n}" if isinstance(n, str) else f"gradient of input {n}": g for n, g in gradients.items()}
        return named | {f"new value of {n}": buffer.detach().clone() for n, buffer in self._module.named_buffers()}


def _tangents(outputs: Mapping[int, Tensor], differentiable: Sequence[bool]) -> dict[int, Tensor]:
    """Gradients to begin with: of a number, as a loss is, 1; of other outputs random ones, as many ops' gradients of ones are 0."""
    generator = torch.Generator().manual_seed(0)

    def tangent(output: Tensor) -> Tensor:
        if output.dim() == 0:
            return torch.ones_like(output)
        return torch.randn(output.shape, generator=generator, dtype=output.dtype).to(output.device)

    return {i: tangent(outputs[i].detach()) for i, counts in enumerate(differentiable) if counts}
