"""The training step that is captured, placed and timed: forward, loss, backward, optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baechi_ext.errors import OptionError


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer by name. `slots` is the number of state tensors it keeps per parameter."""

    name: str
    learning_rate: float
    slots: int
    _make: Callable[[Sequence[Tensor], float], torch.optim.Optimizer]

    def make(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        return self._make(parameters, self.learning_rate)


OPTIMIZERS: dict[str, tuple[int, Callable[[Sequence[Tensor], float], torch.optim.Optimizer]]] = {
    "sgd": (0, lambda p, lr: torch.optim.SGD(p, lr=lr)),
    "momentum": (1, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)),
    "rmsprop": (1, lambda p, lr: torch.optim.RMSprop(p, lr=lr)),
    "adam": (2, lambda p, lr: torch.optim.Adam(p, lr=lr)),
    "adamw": (2, lambda p, lr: torch.optim.AdamW(p, lr=lr)),
}


def optimizer_spec(name: str, learning_rate: float) -> OptimizerSpec:
    """Raises OptionError for an unknown name."""
    if name not in OPTIMIZERS:
        raise OptionError(f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    slots, make = OPTIMIZERS[name]
    return OptimizerSpec(name, learning_rate, slots, make)


class WithLoss(nn.Module):
    """A model and its loss: (inputs, labels) -> scalar cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(inputs), labels)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """`module(*inputs)` is the scalar loss; `seed` is set before a step that must draw known random numbers."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    optimizer: OptimizerSpec
    seed: int = 0

    def state(self) -> dict[str, Tensor]:
        """The live parameters and buffers by their first name, tied ones once."""
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the state, on the host."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self.state().items()}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.state().items():
                value.copy_(snapshot[name])


class EagerStep:
    """The unplaced step, as a user writes it, with an optimizer of its own."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self.optimizer = step.optimizer.make([p for p in step.module.parameters() if p.requires_grad])

    def run(self) -> Tensor:
        """One step; the loss. Gradients stay on the parameters until the next step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.step.module(*self.step.inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
