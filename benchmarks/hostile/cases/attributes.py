"""Attributes of modules, changed between steps or in forward."""

import enum
import math
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.hostile.suite import Net, Wrap, case, seeded, train


class Scaled(Net):
    scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def number_doubles_each_step(given: Scaled, model: nn.Module) -> Any:
    return train(model, lambda step: setattr(given, "scale", 0.1 * 2**step))


def number_changes_its_type(given: Scaled, model: nn.Module) -> Any:
    values = [1, True, 1.0, 2, False, torch.tensor(0.5)]
    return train(model, lambda step: setattr(given, "scale", values[step]))


@case(lambda given, model: train(model, {2: lambda: setattr(given, "zero", -0.0), 4: lambda: setattr(given, "zero", 0.0)}))
class ZeroChangesItsSign(Net):
    zero = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * math.copysign(1.0, self.zero)


@case(lambda given, model: train(model, {2: lambda: setattr(given, "scale", float("nan")), 4: lambda: setattr(given, "scale", 2.0)}))
class NumberIsNanForAStep(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super(Scaled, self).forward(x) * (0.5 if math.isnan(self.scale) else self.scale)


@case(
    lambda given, model: train(model, {2: lambda: setattr(given, "activation", "tanh"), 4: lambda: setattr(given, "activation", "sigmoid")})
)
class StringNamesTheActivation(Net):
    activation = "relu"

    def hidden(self, x: Tensor) -> Tensor:
        return getattr(torch, self.activation)(self.second(torch.tanh(self.first(x))))


@case(lambda given, model: train(model, lambda step: setattr(given, "deep", step % 2 == 0)))
class FlagFlipsEachStep(Net):
    deep = True

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) if self.deep else torch.relu(self.first(x))


def none_becomes_a_tensor(wrap: Wrap) -> Any:
    class Masked(Net):
        mask: Tensor | None = None

        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            return hidden if self.mask is None else hidden * self.mask

    model = seeded(Masked)
    mask = (torch.arange(32) % 3 > 0).float()
    return train(wrap(model), {2: lambda: setattr(model, "mask", mask), 4: lambda: setattr(model, "mask", None)})


@case(lambda given, model: train(model, {2: lambda: setattr(given, "extra", nn.Linear(32, 32))}))
class NoneBecomesAModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = None

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        return hidden if self.extra is None else hidden + self.extra(hidden)


def tensor_attribute_is_replaced(given: Scaled, model: nn.Module) -> Any:
    return train(model, lambda step: setattr(given, "scale", torch.full((4,), 1.0 + step)))


def tensor_attribute_changes_in_place(wrap: Wrap, given: Scaled) -> Any:
    given.scale = torch.ones(4)
    return train(wrap(given), lambda step: given.scale.mul_(0.9))


@case(lambda given, model: train(model, lambda step: setattr(given.config.inner, "scale", 1.0 / (1 + step))))
class ObjectAttribute(Net):
    config = SimpleNamespace(inner=SimpleNamespace(scale=1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.inner.scale


@dataclass
class Config:
    scale: float = 1.0
    layers: tuple[str, ...] = ("first", "second")


@dataclass(frozen=True)
class FrozenConfig:
    scale: float = 1.0


class OfConfig(Net):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.scale


def dataclass_is_changed(wrap: Wrap) -> Any:
    model = seeded(OfConfig, Config())
    return train(wrap(model), lambda step: setattr(model.config, "scale", 1.0 + step))


def dataclass_chooses_layers(wrap: Wrap) -> Any:
    class Chosen(OfConfig):
        def hidden(self, x: Tensor) -> Tensor:
            for name in self.config.layers:
                x = torch.relu(getattr(self, name)(x))
            return x

    model = seeded(Chosen, Config())
    return train(wrap(model), {3: lambda: setattr(model.config, "layers", ("first", "second", "second"))})


def frozen_dataclass_is_replaced(wrap: Wrap) -> Any:
    model = seeded(OfConfig, FrozenConfig())
    return train(wrap(model), lambda step: setattr(model, "config", replace(model.config, scale=0.5 + step)))


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


@case(lambda given, model: train(model, {3: lambda: setattr(given, "mode", Mode.DOUBLE)}))
class EnumAttribute(Net):
    mode = Mode.PLAIN

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.mode is Mode.DOUBLE else 1.0)


class Sizes(NamedTuple):
    scale: float
    shift: float


@case(lambda given, model: train(model, lambda step: setattr(given, "sizes", Sizes(1.0 + step, 0.1 * step))))
class NamedTupleIsReplaced(Net):
    sizes = Sizes(1.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.sizes.shift) * self.sizes.scale


def slots_are_changed(wrap: Wrap) -> Any:
    class Slotted:
        __slots__ = ("scale",)

    config = Slotted()
    config.scale = 1.0
    return train(wrap(seeded(OfConfig, config)), lambda step: setattr(config, "scale", 1.0 + step))


@case(lambda model: train(model, lambda step: setattr(ClassAttributeIsChanged, "scale", 1.0 + step)))
class ClassAttributeIsChanged(Scaled):
    scale = 1.0


def base_class_attribute_is_changed_then_shadowed(wrap: Wrap) -> Any:
    class Base(Scaled):
        scale = 1.0

    class Derived(Base):
        pass

    model = seeded(Derived)
    actions = {1: lambda: setattr(Base, "scale", 2.0), 3: lambda: setattr(Derived, "scale", 3.0), 5: lambda: setattr(model, "scale", 4.0)}
    return train(wrap(model), actions)


def attribute_is_deleted(wrap: Wrap) -> Any:
    class Optional(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (self.factor if hasattr(self, "factor") else 1.0)

    model = seeded(Optional)
    model.factor = 3.0
    return train(wrap(model), {3: lambda: delattr(model, "factor")})


@case(lambda given, model: train(model, lambda step: setattr(given, "epoch", step)))
class PropertyReadsACounter(Net):
    epoch = 0

    @property
    def temperature(self) -> float:
        return 1.0 / (1.0 + self.epoch)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def cached_property_is_made_anew(wrap: Wrap) -> Any:
    class Cached(Net):
        base = 1.0

        @cached_property
        def factor(self) -> float:
            return self.base * 2

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    model = seeded(Cached)

    def anew() -> None:
        model.base = 0.25
        del model.factor

    return train(wrap(model), {2: lambda: setattr(model, "base", 9.0), 4: anew})


@case(lambda model: train(model, lambda step: GetattrMakesAttributesUp.table.update(gain=1.0 + step)))
class GetattrMakesAttributesUp(Net):
    table = {"gain": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.table[name] if name == "gain" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@case(lambda given, model: (train(model), given.calls))
class ForwardCountsItsCalls(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


@case(lambda given, model: (train(model), given.seen, given.history))
class ForwardCountsOnlyInTraining(Net):
    seen = 0
    history: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.history = (*self.history, self.seen)
        return super().forward(x) * min(1.0, self.seen / 40)


@case(lambda given, model: (train(model), given.last_hidden))
class ForwardKeepsItsLastActivation(Net):
    last_hidden: Tensor | None = None

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        if self.last_hidden is not None:
            hidden = hidden + 0.1 * self.last_hidden
        self.last_hidden = hidden.detach()
        return hidden


@case(lambda given, model: (train(model, loss_of=lambda out, y: nn.functional.cross_entropy(out, y) + 0.1 * given.penalty), given.penalty))
class ForwardStoresAnAuxiliaryLoss(Net):
    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        self.penalty = hidden.pow(2).mean()
        return hidden
