"""The training step that is captured, placed and timed: forward, loss, backward, optimizer."""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature

import torch
from torch import Tensor, nn

from baechi_ext.errors import OptionError


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer by name. `slots` is the number of state tensors it keeps per parameter."""

    name: str
    learning_rate: float
    slots: int
    _make: Callable[..., torch.optim.Optimizer]

    def make(self, parameters: Sequence[Tensor], **options: bool) -> torch.optim.Optimizer:
        """A torch.optim optimizer of `parameters`; `options` go to its constructor (foreach, fused)."""
        return self._make(parameters, lr=self.learning_rate, **options)

    @property
    def capturable(self) -> bool:
        """True if the optimizer takes that option, by which a CUDA optimizer counts its steps on the device."""
        made = self._make.func if isinstance(self._make, partial) else self._make
        return "capturable" in signature(made).parameters


OPTIMIZERS: dict[str, tuple[int, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (0, torch.optim.SGD),
    "momentum": (1, partial(torch.optim.SGD, momentum=0.9)),
    "rmsprop": (1, torch.optim.RMSprop),
    "adagrad": (1, torch.optim.Adagrad),
    "adadelta": (2, torch.optim.Adadelta),
    "adam": (2, torch.optim.Adam),
    "adamw": (2, torch.optim.AdamW),
}


def optimizer_spec(name: str, learning_rate: float) -> OptimizerSpec:
    """Raises OptionError for an unknown name."""
    if name not in OPTIMIZERS:
        raise OptionError(f"unknown optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    slots, make = OPTIMIZERS[name]
    return OptimizerSpec(name, learning_rate, slots, make)


class WithLoss(nn.Module):
    """A model and its loss: (inputs, labels) -> scalar cross-entropy."""

    baechi_model = "model"
    """Modules are called by their names in there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(inputs), labels)

    def expert_device(self, parameter: str) -> int | None:
        """The model's own hint where an expert would put a parameter's ops, if it gives any."""
        hint = getattr(self.model, "expert_device", None)
        return None if hint is None else hint(parameter.removeprefix("model."))


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """`module(*inputs)` is the scalar loss; `seed` is set before a step that must draw known random numbers, `batch` the number of its
    examples, where that is known, and `batch_dim` the dimension of each input that they stand along."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    optimizer: OptimizerSpec
    seed: int = 0
    batch: int | None = None
    batch_dim: int = 0

    def state(self) -> dict[str, Tensor]:
        """The live parameters and buffers by their first name, tied ones once."""
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def optimizers(self, names: Collection[str] | None = None) -> dict[str, torch.optim.Optimizer]:
        """A fresh optimizer for each parameter, or each of those called so, by name."""
        # Said outright, foreach=False spares each of hundreds of small optimizers torch's own search for the best variant (0.1 ms a step).
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad and (names is None or n in names)}
        return {n: self.optimizer.make([p], foreach=False) for n, p in trained.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the state, on the host."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self.state().items()}

    def replica(self, device: torch.device | str) -> "TrainingStep":
        """The same step with parameters, buffers and inputs of its own on `device`."""
        return replace(self, module=copy.deepcopy(self.module).to(device), inputs=tuple(i.to(device) for i in self.inputs))

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.state().items():
                value.copy_(snapshot[name])


class EagerStep:
    """The unplaced step on one device, as a user writes it, with an optimizer of its own; a replica where the device is not the host."""

    def __init__(self, step: TrainingStep, device: torch.device) -> None:
        self.step = step if device.type == "cpu" else step.replica(device)
        self.optimizer = step.optimizer.make([p for p in self.step.module.parameters() if p.requires_grad])
        self.forward: Callable[..., Tensor] = self.step.module

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The parameters and buffers that it runs with, tied ones once."""
        return tuple(self.step.state().values())

    def run(self) -> Tensor:
        """One step; the loss. Gradients stay on the parameters until the next step."""
        loss = self.passes()
        self.optimizer.step()
        return loss

    def passes(self) -> Tensor:
        """Its forward and backward pass; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(*self.step.inputs)
        loss.backward()
        return loss.detach()
