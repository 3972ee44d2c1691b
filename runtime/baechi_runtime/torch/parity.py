"""Parity: the placed step must compute what the unplaced step computes: loss, every gradient, every buffer, every updated parameter."""

from collections.abc import Mapping

import torch
from torch import Tensor

from baechi_ext.capture.parts import Parts
from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline
from baechi_runtime.measure.comparator import compare
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.models.training_step import EagerStep, TrainingStep
from baechi_runtime.torch.lowering.executor import Executor
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.part_reference import part_after_part
from baechi_runtime.torch.threads.executor import PlacedStep

TOLERANCE = {"cpu": 1e-6, "cuda": 1e-4}
"""Largest relative difference. On CPU devices 0 is expected; CUDA kernels may add in another order from run to run."""

TOLERANCE_OF_PARTS = {"cpu": 1e-4, "cuda": 1e-3}
"""The same where a step over parts of its batch is compared with the whole one: sums over the batch are added up in another order, and
kernels for other sizes round differently. A part that is left out or counted twice differs by a share of the whole."""
SHARE_OF_PARTS = 1e-3
"""A gradient that ought to be 0, as of the bias of attention's keys, is what rounding leaves of sums of such a part of the largest one."""


def check_parity(executor: Executor, timeline: Timeline, binding: Binding, step: TrainingStep) -> Parity:
    """Runs one unplaced and one placed step from the same state and seed and compares them. The state is put back.

    Raises ExecutionError where the placed step fails.
    """
    with as_it_was(step) as saved:
        per_part = binding.parts if binding.parts is not None and binding.parts.batch_norm_per_part else None
        expected = executor.call(0, lambda: unplaced_results(step, executor.devices[0].torch_device, per_part))
        step.restore(saved)
        placed = executor.load(timeline, binding, step, keep_gradients=True)
        if isinstance(placed, PlacedStep):
            placed.rehearse()
        torch.manual_seed(step.seed)
        loss, _ = placed.run()
        actual = named_results(loss, *placed.gather())
    kind = executor.devices[0].torch_device.type
    if binding.parts is None or per_part is not None:
        return compare(expected, actual, TOLERANCE[kind])
    return compare(expected, actual, TOLERANCE_OF_PARTS[kind], share=SHARE_OF_PARTS)


def unplaced_results(step: TrainingStep, device: torch.device, parts: Parts | None) -> dict[str, Tensor]:
    """The unplaced step's loss, gradients and new values, by name; with `parts`, part after part, as the user lets it be normalised."""
    eager = EagerStep(step, device)
    torch.manual_seed(step.seed)
    loss = eager.run() if parts is None else part_after_part(eager, parts)
    gradients = {n: p.grad for n, p in eager.step.module.named_parameters() if p.grad is not None}
    results = named_results(loss, gradients, eager.step.state())
    eager.optimizer.zero_grad(set_to_none=True)
    return results


def named_results(loss: Tensor, gradients: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a step's loss, gradients and new values on the host, by the names that they have where steps are compared."""
    named = {"loss": loss}
    named |= {f"gradient of {name}": g for name, g in gradients.items()}
    named |= {f"new value of {name}": value for name, value in state.items()}
    return {name: value.detach().to("cpu", copy=True) for name, value in named.items()}
