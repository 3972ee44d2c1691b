"""Parity: the placed step must compute what the unplaced step computes: loss, every gradient, every buffer, every updated parameter."""

from collections.abc import Mapping

import torch
from torch import Tensor

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline
from runtime.parity_result import Parity
from runtime.step import EagerStep, TrainingStep
from runtime.thread_executor import PlacedStep, ThreadExecutor

TOLERANCE = {"cpu": 1e-6, "cuda": 1e-4}
"""Largest relative difference. On CPU devices 0 is expected; CUDA kernels may add in another order from run to run."""


def check_parity(executor: ThreadExecutor, timeline: Timeline, binding: Binding, step: TrainingStep) -> Parity:
    """Runs one unplaced and one placed step from the same state and seed and compares them. The state is put back.

    Raises ExecutionError where the placed step fails.
    """
    saved, rng = step.snapshot(), torch.get_rng_state()
    try:
        expected = executor.call(0, lambda: _eager_results(step, executor.devices[0].torch_device))
        step.restore(saved)
        placed = executor.load(timeline, binding, step, keep_gradients=True)
        if isinstance(placed, PlacedStep):
            placed.rehearse()
        torch.manual_seed(step.seed)
        loss, _ = placed.run()
        actual = _results(loss, *placed.gather())
    finally:
        step.restore(saved)
        torch.set_rng_state(rng)
    return compare(expected, actual, TOLERANCE[executor.devices[0].torch_device.type])


def _eager_results(step: TrainingStep, device: torch.device) -> dict[str, Tensor]:
    eager = EagerStep(step, device)
    torch.manual_seed(step.seed)
    loss = eager.run()
    gradients = {n: p.grad for n, p in eager.step.module.named_parameters() if p.grad is not None}
    results = _results(loss, gradients, eager.step.state())
    eager.optimizer.zero_grad(set_to_none=True)
    return results


def _results(loss: Tensor, gradients: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {"loss": loss}
    named |= {f"gradient of {name}": g for name, g in gradients.items()}
    named |= {f"new value of {name}": value for name, value in state.items()}
    return {name: value.detach().to("cpu", copy=True) for name, value in named.items()}


def compare(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], tolerance: float) -> Parity:
    """Compares tensors by name; a name or shape that only one side has, and a NaN, differ infinitely."""
    worst, max_abs, max_rel = "", 0.0, 0.0
    for name in sorted(expected.keys() | actual.keys()):
        a, b = expected.get(name), actual.get(name)
        if a is None or b is None or a.shape != b.shape:
            absolute = relative = float("inf")
        else:
            absolute, relative = _difference(a, b)
        if relative > max_rel or not worst:
            worst, max_rel = name, max(relative, max_rel)
        max_abs = max(max_abs, absolute)
    return Parity(max_rel <= tolerance, max_abs, max_rel, worst, len(expected), tolerance)


def _difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0, 0.0
    absolute = (a.double() - b.double()).abs().max().item()
    if absolute != absolute:
        return float("inf"), float("inf")
    return absolute, absolute / max(a.double().abs().max().item(), 1e-30)
