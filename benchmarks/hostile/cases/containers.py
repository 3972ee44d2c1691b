"""Lists, dictionaries, sets, arrays and queues that forward reads or fills."""

from collections import Counter, OrderedDict, defaultdict, deque
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.hostile.suite import Net, Wrap, case, seeded, train


class Summed(Net):
    """Multiplies its output by a sum over `weights`, whatever they are."""

    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.weights = weights

    def factor(self) -> Any:
        return sum(self.weights)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()


def long_list_one_entry_changes(wrap: Wrap) -> Any:
    model = seeded(Summed, [0.01] * 200)
    return train(wrap(model), lambda step: model.weights.__setitem__(131 + step, 0.5))


def long_list_grows(wrap: Wrap) -> Any:
    model = seeded(Summed, [0.01] * 100)
    return train(wrap(model), lambda step: model.weights.append(0.1 * step))


def list_is_replaced_by_an_equal_one_then_changed(wrap: Wrap) -> Any:
    model = seeded(Summed, [0.1] * 80)
    return train(wrap(model), {2: lambda: setattr(model, "weights", [0.1] * 80), 4: lambda: model.weights.__setitem__(79, 3.0)})


@case(lambda given, model: train(model, lambda step: given.chosen.reverse() if step % 2 else given.chosen.sort()))
class ListOfIntegersChoosesColumns(Net):
    chosen = list(range(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, self.chosen])


def nested_list_changes_deep_inside(wrap: Wrap) -> Any:
    class Nested(Summed):
        def factor(self) -> Any:
            return sum(sum(sum(c) for c in b) for b in self.weights)

    model = seeded(Nested, [[[0.01] * 5 for _ in range(5)] for _ in range(5)])
    return train(wrap(model), lambda step: model.weights[step % 5][3].__setitem__(4, 0.3 + step))


def dictionary_value_changes(wrap: Wrap) -> Any:
    class Keyed(Summed):
        def factor(self) -> Any:
            return self.weights["a"]["b"] + self.weights.get("c", 0.0)

    model = seeded(Keyed, {"a": {"b": 1.0}})
    return train(wrap(model), {1: lambda: model.weights["a"].update(b=2.0), 3: lambda: model.weights.update(c=3.0)})


@case(lambda given, model: train(model, lambda step: given.order.move_to_end(("tanh", "relu", "sigmoid")[step % 3])))
class DictionaryOrderChanges(Net):
    order = OrderedDict(tanh=1.0, relu=2.0, sigmoid=3.0)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x)))
        for name, factor in self.order.items():
            x = getattr(torch, name)(x * factor)
        return x


def mapping_behind_a_view_changes(wrap: Wrap) -> Any:
    behind = {"scale": 1.0}

    class Viewed(Summed):
        def factor(self) -> Any:
            return self.weights["scale"]

    return train(wrap(seeded(Viewed, MappingProxyType(behind))), lambda step: behind.update(scale=1.0 + step))


@case(lambda given, model: train(model, lambda step: given.active.symmetric_difference_update({"second"})))
class SetDecidesWhatIsActive(Net):
    active = {"first", "second"}

    def hidden(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return torch.relu(self.second(x)) if "second" in self.active else x


def numpy_array_changes_in_place(wrap: Wrap) -> Any:
    model = seeded(Summed, np.full(8, 0.1))
    return train(wrap(model), lambda step: model.weights.__setitem__(step, 1.0))


def numpy_scalar_changes(wrap: Wrap) -> Any:
    model = seeded(Summed, [np.float32(1.0)])
    return train(wrap(model), lambda step: model.weights.__setitem__(0, np.float32(1 + step)))


@case(lambda given, model: (train(model), given.seen))
class ListOfTensorsGrowsInForward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        self.seen.append(hidden.detach().mean())
        return hidden


@case(lambda given, model: (train(model), list(given.window)))
class DequeOfMeansIsReadAndFilled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.window: deque[Tensor] = deque(maxlen=3)

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        self.window.append(hidden.detach().mean(0))
        return hidden - 0.1 * sum(self.window)


def counters_of_calls(wrap: Wrap) -> Any:
    calls: Counter = Counter()
    sizes: defaultdict = defaultdict(list)

    class Counted(Net):
        def hidden(self, x: Tensor) -> Tensor:
            calls["hidden"] += 1
            sizes[tuple(x.shape)].append(calls["hidden"])
            return super().hidden(x) / calls["hidden"]

    return train(wrap(seeded(Counted))), dict(calls), dict(sizes)


@case(lambda given, model: train(model, {2: lambda: given.path.reverse(), 4: lambda: given.path.pop()}))
class ModulesInAPlainListChangePlaces(Net):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(32, 32)
        self.path = [self.second, self.third]

    def hidden(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for layer in self.path:
            x = torch.tanh(layer(x))
        return x


def functions_in_a_dictionary_change(wrap: Wrap) -> Any:
    table = {"act": torch.relu}

    class Tabled(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return table["act"](self.second(table["act"](self.first(x))))

    return train(wrap(seeded(Tabled)), {2: lambda: table.update(act=torch.tanh), 4: lambda: table.update(act=lambda x: x * 0.5)})


def tuple_of_tensors_is_replaced(wrap: Wrap) -> Any:
    model = seeded(Summed, (torch.tensor(0.5), torch.tensor(0.5)))
    return train(wrap(model), lambda step: setattr(model, "weights", (torch.tensor(0.5), torch.tensor(0.5 * step))))


def list_shared_by_two_layers(wrap: Wrap) -> Any:
    class Tail(nn.Module):
        def __init__(self, shared: list[float]) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: Tensor) -> Tensor:
            self.shared.append(len(self.shared))
            return x / len(self.shared)

    class Sharing(Net):
        def __init__(self) -> None:
            super().__init__()
            shared: list[float] = []
            self.tails = nn.ModuleList([Tail(shared), Tail(shared)])

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            for tail in self.tails:
                x = tail(x)
            return x

    model = seeded(Sharing)
    return train(wrap(model), {4: model.tails[0].shared.clear}), model.tails[1].shared


@case(lambda given, model: train(model, lambda step: setattr(given, "kept", slice(step, 2 * step, 1 + step % 2))))
class SliceBoundsChange(Net):
    kept = slice(0, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, self.kept] = 0
        return super().forward(x)


@case(lambda given, model: train(model, lambda step: setattr(given, "depth", step), steps=14))
class IntegerGrowsPastWhatIsCompiledAnew(Net):
    depth = 0

    def hidden(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(self.depth):
            x = torch.tanh(self.second(x))
        return x
