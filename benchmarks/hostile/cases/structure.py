"""The tree of modules: layers added, removed, exchanged and shared while training; what a module is asked about itself."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Wrap, batches, case, seeded, state, train


class Deep(Net):
    """Has a list of layers in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def hidden(self, x: Tensor) -> Tensor:
        x = super().hidden(x)
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return x


def layer_is_appended(given: Deep, model: nn.Module) -> Any:
    return train(model, {3: lambda: given.middle.append(nn.Linear(32, 32))})


def layer_is_removed(given: Deep, model: nn.Module) -> Any:
    return train(model, {3: lambda: given.middle.__delitem__(1)})


def layers_change_places(given: Deep, model: nn.Module) -> Any:
    def swap() -> None:
        given.middle[0], given.middle[2] = given.middle[2], given.middle[0]

    return train(model, {3: swap})


def layer_is_exchanged(given: Deep, model: nn.Module) -> Any:
    changes = {2: lambda: setattr(given, "second", nn.Linear(32, 32, bias=False)), 4: lambda: setattr(given, "second", nn.Identity())}
    return train(model, changes)


def layer_is_exchanged_for_one_alike(given: Deep, model: nn.Module) -> Any:
    return train(model, lambda step: setattr(given, "second", copy.deepcopy(given.second)))


def sequential_grows(wrap: Wrap) -> Any:
    model = seeded(nn.Sequential, nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    grow, exchange = lambda: model.insert(2, nn.Linear(64, 64)), lambda: model.__setitem__(1, nn.Tanh())
    changes = {2: grow, 4: exchange, 5: lambda: model.append(nn.Tanh())}
    return train(wrap(model), changes)


def dictionary_of_modules_changes(wrap: Wrap) -> Any:
    class Keyed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
            self.key = "a"

        def hidden(self, x: Tensor) -> Tensor:
            return self.table[self.key](super().hidden(x))

    model = seeded(Keyed)

    def use(key: str) -> None:
        model.key = key

    changes = {1: lambda: use("b"), 3: lambda: model.table.update({"b": nn.Tanh()}), 5: lambda: use("a")}
    return train(wrap(model), changes)


def two_names_for_one_layer(wrap: Wrap, given: Deep) -> Any:
    given.middle[2] = given.middle[0]
    given.also = given.first
    return train(wrap(given), {3: lambda: given.middle.__setitem__(2, nn.Linear(32, 32))})


@case(lambda given, model: train(model, lambda step: setattr(given, "depth", step % 4), steps=8))
class NumberOfLayersUsedChanges(Deep):
    depth = 3

    def hidden(self, x: Tensor) -> Tensor:
        x = Net.hidden(self, x)
        for layer in list(self.middle)[: self.depth]:
            x = torch.tanh(layer(x))
        return x


@case
class LayerIsMadeInForward(Net):
    def hidden(self, x: Tensor) -> Tensor:
        x = super().hidden(x)
        if not hasattr(self, "made"):
            self.made = nn.Linear(x.shape[1], 32)
        return self.made(x)


@case(lambda given, model: (train(model, {3: lambda: setattr(given, "registered", given.unregistered[0])}), state(given.unregistered[0])))
class RegisteredModuleIsHiddenAndFound(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unregistered = [nn.Linear(32, 32)]

    def hidden(self, x: Tensor) -> Tensor:
        return self.unregistered[0](super().hidden(x))


def asked_what_it_is(given: Deep, model: nn.Module) -> Any:
    train(model, steps=3)
    return {
        "type": type(model) is Deep,
        "isinstance": (isinstance(model, Deep), isinstance(model, nn.Module)),
        "class": model.__class__.__name__,
        "repr": repr(model),
        "names": [name for name, _ in model.named_modules()],
        "parameters": [name for name, _ in model.named_parameters()],
        "state": list(model.state_dict()),
        "children": [type(child).__name__ for child in model.children()],
        "attributes": (model.training, len(model.middle), hasattr(model, "nothing"), callable(model.hidden)),
        "submodule": model.get_submodule("middle.1") is given.middle[1],
        "vars": sorted(name for name in vars(model) if not name.startswith("_")),
    }


def other_methods_are_called(model: Deep) -> Any:
    found = [train(model, steps=2)]
    loss = F.cross_entropy(model.last(model.hidden(torch.ones(4, 16))), torch.arange(4))
    loss.backward()
    direct = model.forward(torch.ones(4, 16))
    return found, loss.detach(), direct.detach(), state(model)


def used_as_a_layer_of_another(wrap: Wrap) -> Any:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.tail = inner, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.tail(torch.tanh(self.inner(x)))

    inner = wrap(seeded())
    return train(Outer(inner)), train(wrap(Outer(inner)))


def layer_of_it_is_used_alone(given: Deep, model: nn.Module) -> Any:
    found = train(model, steps=3)
    alone = given.middle[0](torch.ones(2, 32)).sum()
    alone.backward()
    return found, alone.detach(), state(given)


def wrapped_before_and_after_training(wrap: Wrap, given: Deep) -> Any:
    before = train(given, steps=2)
    return before, train(wrap(given), steps=2), train(given, steps=2)


def apply_resets_layers(model: Deep) -> Any:
    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    return train(model, {3: lambda: model.apply(reset)})


@case
class ForwardCallsItself(Net):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return super().forward(x)
        return self(x * 0.5, depth - 1) + self.forward(x, depth - 1)


@case(lambda model: train(model, steps=8))
class InputsDecideWhichLayerIsUsed(Deep):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return self.last(self.middle[int(hidden.sum().item() * 7) % 3](hidden))


def module_is_called_with_what_batches_give(wrap: Wrap) -> Any:
    models = [wrap(seeded(Deep)) for _ in range(2)]
    for x, y in batches():
        loss = F.cross_entropy(models[0](x) + models[1](x.flip(0)), y)
        loss.backward()
    return loss.detach(), state(*models)
