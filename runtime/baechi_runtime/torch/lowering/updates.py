"""Updates of parameters on CUDA devices: those that follow each other on a device are one call of an optimizer, with few kernels for all.

An update by itself takes the host 10 to 40 us, which is more than its kernel takes the device. Until the last of those together is due,
the gradients of the others are kept, TOGETHER_BYTES of them at most.
"""

from collections.abc import Iterable

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.memory_limit import TOGETHER_BYTES


def optimizers_by_device(
    timeline: Timeline, binding: Binding, step: TrainingStep, devices: Iterable[int], **options: bool
) -> dict[str, torch.optim.Optimizer]:
    """Fresh optimizers for the parameters that these devices update, by the parameters' names; `options` as for OptimizerSpec.make. None
    where the optimizer is in the caller's code."""
    state, found = step.state(), dict[str, torch.optim.Optimizer]()
    if binding.loss is None:
        return found
    for device in devices:
        names = [binding.state_names[binding.ops[v].parameters[0]] for v in timeline.device_order()[device] if binding.ops[v].parameters]
        for together in _cut(names, state):
            optimizer = step.optimizer.make([state[name] for name in together], foreach=True, **options)
            found |= dict.fromkeys(together, optimizer)
    return found


def _cut(names: Iterable[str], state: dict[str, torch.Tensor]) -> list[list[str]]:
    """The names in runs whose parameters take no more than TOGETHER_BYTES, or one each."""
    runs: list[list[str]] = []
    held = 0
    for name in names:
        held += state[name].nbytes
        if not runs or held > TOGETHER_BYTES:
            runs.append([])
            held = state[name].nbytes
        runs[-1].append(name)
    return runs
