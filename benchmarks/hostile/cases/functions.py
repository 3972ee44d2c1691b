"""Functions and methods replaced while training: globals, closures, defaults, patches, classes switched."""

import itertools
import types
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Wrap, case, seeded, train

SCALE = 1.0
CALLS = 0
LIBRARY = types.ModuleType("library_of_the_user")


def activate(x: Tensor) -> Tensor:
    return torch.relu(x)


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


class OfGlobals(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return activate(self.second(activate(self.first(x)))) * SCALE


def global_number(model: OfGlobals) -> Any:
    return train(model, lambda step: set_global("SCALE", 1.0 + step))


def global_function_is_replaced(model: OfGlobals) -> Any:
    return train(model, {3: lambda: set_global("activate", torch.tanh)})


@case(lambda model: (train(model), CALLS))
class GlobalIsCountedInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return super().forward(x) / CALLS


def attribute_of_another_module(wrap: Wrap) -> Any:
    LIBRARY.scale = 1.0

    class Importing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * LIBRARY.scale

    return train(wrap(seeded(Importing)), lambda step: setattr(LIBRARY, "scale", 1.0 + step))


def closure_is_rebound(wrap: Wrap) -> Any:
    scale, seen = 1.0, []

    class Closed(Net):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(scale)
            return super().forward(x) * scale

    def change(step: int) -> None:
        nonlocal scale
        scale = 1.0 + step

    return train(wrap(seeded(Closed)), change), seen


def closure_is_counted_in_forward(wrap: Wrap) -> Any:
    count = 0

    class Counting(Net):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return super().forward(x) * count

    return train(wrap(seeded(Counting))), count


@case
class DefaultArgumentIsMutable(Net):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - as some write it
        seen.append(len(seen))
        return super().forward(x) / len(seen)


def defaults_are_replaced(wrap: Wrap) -> Any:
    class Defaulted(Net):
        def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
            return super().forward(x) * scale + shift

    def change(step: int) -> None:
        Defaulted.forward.__defaults__ = (1.0 + step,)
        Defaulted.forward.__kwdefaults__["shift"] = 0.1 * step

    return train(wrap(seeded(Defaulted)), change)


def code_is_replaced(wrap: Wrap) -> Any:
    def slow(x: Tensor) -> Tensor:
        return torch.relu(x)

    def other(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    class Coded(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return slow(self.second(slow(self.first(x))))

    return train(wrap(seeded(Coded)), {3: lambda: setattr(slow, "__code__", other.__code__)})


def half(self: Net, x: Tensor) -> Tensor:
    return self.last(self.hidden(x)) * 0.5


def forward_is_patched_on_the_instance(given: Net, model: nn.Module) -> Any:
    patched = {2: lambda: setattr(given, "forward", types.MethodType(half, given)), 4: lambda: delattr(given, "forward")}
    return train(model, patched)


def forward_is_patched_on_the_class(wrap: Wrap) -> Any:
    class Patched(Net):
        pass

    return train(wrap(seeded(Patched)), {2: lambda: setattr(Patched, "forward", half), 4: lambda: delattr(Patched, "forward")})


def forward_of_a_layer_is_patched(given: Net, model: nn.Module) -> Any:
    ordinary = given.second.forward
    return train(model, {2: lambda: setattr(given.second, "forward", lambda x: ordinary(x).clamp(-1, 1))})


def call_of_the_class_is_patched(wrap: Wrap, seen: list) -> Any:
    class Called(Net):
        pass

    def call(self: Net, *args: Any) -> Any:
        seen.append(len(args))
        return nn.Module.__call__(self, *args) * 2

    return train(wrap(seeded(Called)), {3: lambda: setattr(Called, "__call__", call)}), seen


def helper_is_patched_on_the_instance(given: Net, model: nn.Module) -> Any:
    ordinary = given.hidden
    return train(model, {2: lambda: setattr(given, "hidden", lambda x: ordinary(x) * 0.5)})


def helper_is_patched_on_the_class_twice(wrap: Wrap) -> Any:
    class Helped(Net):
        def gain(self) -> float:
            return 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain()

    changes = {1: lambda: setattr(Helped, "gain", lambda self: 2.0), 4: lambda: setattr(Helped, "gain", lambda self: 0.5)}
    return train(wrap(seeded(Helped)), changes)


def static_and_class_methods_are_replaced(wrap: Wrap) -> Any:
    class Static(Net):
        @staticmethod
        def act(x: Tensor) -> Tensor:
            return x.relu()

        @classmethod
        def gain(cls) -> float:
            return 1.0

        def hidden(self, x: Tensor) -> Tensor:
            return self.act(self.second(self.act(self.first(x)))) * self.gain()

    gain = {2: lambda: setattr(Static, "act", staticmethod(torch.tanh)), 4: lambda: setattr(Static, "gain", classmethod(lambda cls: 3.0))}
    return train(wrap(seeded(Static)), gain)


@case(lambda given, model: train(model, {2: lambda: setattr(given, "act", F.gelu), 4: lambda: setattr(given, "act", nn.SiLU())}))
class ActivationAttributeIsSwapped(Net):
    act: Any = staticmethod(F.relu)

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))))


@case(lambda given, model: train(model, lambda step: setattr(given, "act", partial(F.leaky_relu, negative_slope=0.1 * step))))
class PartialIsReplaced(Net):
    act = partial(F.leaky_relu, negative_slope=0.1)

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))))


def callable_object_keeps_state(wrap: Wrap) -> Any:
    class Schedule:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.relu(x) / self.calls

    class Scheduled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.act = Schedule()

        def hidden(self, x: Tensor) -> Tensor:
            return self.act(self.second(self.act(self.first(x))))

    model = seeded(Scheduled)
    return train(wrap(model)), model.act.calls


def decorated_forward_counts(wrap: Wrap, seen: list) -> Any:
    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inner(self: Any, x: Tensor) -> Any:
            seen.append(tuple(x.shape))
            return function(self, x) * len(seen)

        return inner

    class Watched(Net):
        @watched
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return train(wrap(seeded(Watched))), seen


def class_of_the_object_is_switched(wrap: Wrap) -> Any:
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 3 - 1

    model = seeded()
    return train(wrap(model), {3: lambda: setattr(model, "__class__", Other)}), type(model).__name__


def class_of_a_layer_is_switched(wrap: Wrap) -> Any:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model = seeded()
    return train(wrap(model), {3: lambda: setattr(model.second, "__class__", Doubled)}), type(model.second).__name__


@case(lambda given, model: (train(model), next(given.numbers)))
class CounterOfItertoolsIsDrawnFrom(Net):
    numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / next(self.numbers)


@case(lambda given, model: (train(model), list(given.factors)))
class IteratorIsConsumedInForward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factors = iter([1.0, 0.5, 2.0, 0.25, 3.0, 1.5, 9.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.factors)


def generator_of_the_user_is_advanced(wrap: Wrap) -> Any:
    def factors() -> Any:
        factor = 1.0
        while True:
            sent = yield factor
            factor = factor * 0.8 if sent is None else sent

    class Advancing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.factors = factors()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(self.factors)

    model = seeded(Advancing)
    return train(wrap(model), {3: lambda: model.factors.send(5.0)}), next(model.factors)


@case
class CycleOfLayers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(32, 32)
        self.turn = itertools.cycle([self.second, self.third])

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(next(self.turn)(torch.relu(self.first(x))))


def descriptor_is_replaced(wrap: Wrap) -> Any:
    class Gain:
        def __init__(self, value: float) -> None:
            self.value = value

        def __get__(self, instance: Any, owner: Any = None) -> float:
            return self.value

    class Described(Net):
        gain: Any = Gain(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    changes = {2: lambda: setattr(vars(Described)["gain"], "value", 2.0), 4: lambda: setattr(Described, "gain", Gain(4.0))}
    return train(wrap(seeded(Described)), changes)
