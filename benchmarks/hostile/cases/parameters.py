"""Parameters and buffers: tied, replaced, frozen, cast, reparametrized, saved and loaded while training."""

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.hostile.suite import Net, Normed, Wrap, batches, case, seeded, sgd, state, train, updates


class Tied(Net):
    """Its second layer has the first one's weight, transposed through a square one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(32, 32)
        self.third.weight = self.second.weight

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.third(super().hidden(x)))


def tied_weights(given: Tied, model: nn.Module) -> Any:
    return train(model), given.third.weight is given.second.weight


def tie_is_cut_and_made_again(given: Tied, model: nn.Module) -> Any:
    def cut() -> None:
        given.third.weight = nn.Parameter(given.second.weight.detach().clone())

    def tie() -> None:
        given.third.weight = given.second.weight

    return train(model, {2: cut, 4: tie})


def data_is_replaced(given: Net, model: nn.Module) -> Any:
    return train(model, lambda step: setattr(given.second.weight, "data", given.second.weight.data * 0.5 + 0.01 * step))


def weight_is_a_new_parameter(given: Net, model: nn.Module) -> Any:
    return train(model, {3: lambda: setattr(given.second, "weight", nn.Parameter(torch.eye(32)))})


def weights_are_written_in_place(given: Net, model: nn.Module) -> Any:
    def write(step: int) -> None:
        with torch.no_grad():
            given.second.weight[step].fill_(0.1)
            given.first.bias.copy_(torch.full((32,), 0.01 * step))

    return train(model, write)


def bias_becomes_none(given: Net, model: nn.Module) -> Any:
    changes = {2: lambda: setattr(given.second, "bias", None), 4: lambda: setattr(given.second, "bias", nn.Parameter(torch.ones(32)))}
    return train(model, changes)


def layers_are_frozen_and_thawed(given: Net, model: nn.Module) -> Any:
    changes = {1: lambda: given.first.requires_grad_(False), 3: lambda: given.second.requires_grad_(False), 5: given.requires_grad_}
    return train(model, changes)


def one_bias_is_trained_only(wrap: Wrap) -> Any:
    model = seeded().requires_grad_(False)
    model.last.bias.requires_grad_()
    return train(wrap(model), {3: lambda: model.first.bias.requires_grad_()})


def all_is_frozen_for_a_step(given: Normed, model: nn.Module) -> Any:
    found = [train(model, steps=2)]
    given.requires_grad_(False)
    out = model(torch.ones(4, 16))
    found.append((out.requires_grad, out))
    given.requires_grad_()
    return found, train(model, steps=2)


class Counted(Net):
    """Counts calls in a buffer, and compares it in the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(32), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        self.steps += 1
        hidden = super().hidden(x)
        if self.steps > 3:
            hidden = hidden * 0.5
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return hidden - self.average


def buffer_is_counted_and_compared(model: Counted) -> Any:
    return train(model)


@case
class BufferIsCountedByItem(Counted):
    def hidden(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return Net.hidden(self, x) / int(self.steps.item())


@case
class BufferIsReplacedInForward(Counted):
    def hidden(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        hidden = Net.hidden(self, x)
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return hidden - self.average / self.steps


def buffer_is_replaced_between_steps(given: Counted, model: nn.Module) -> Any:
    changes = {2: lambda: setattr(given, "average", torch.ones(32)), 4: lambda: given.register_buffer("steps", torch.tensor(-5))}
    return train(model, changes)


def buffer_is_returned_and_kept(wrap: Wrap) -> Any:
    class Returning(Counted):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.average

    given = seeded(Returning)
    model, kept = wrap(given), []
    for x, y in updates(model):
        out, average = model(x)
        kept.append((average is given.average, average.data_ptr() == given.average.data_ptr(), average.clone()))
        F.cross_entropy(out, y).backward()
    return kept, state(given)


def momentum_of_batch_norm_changes(given: Normed, model: nn.Module) -> Any:
    return train(model, lambda step: setattr(given.norm, "momentum", 0.1 * step if step != 4 else None))


def statistics_of_batch_norm_are_dropped(given: Normed, model: nn.Module) -> Any:
    def drop() -> None:
        given.norm.track_running_stats = False
        given.norm.running_mean = given.norm.running_var = None

    return train(model, {2: given.norm.reset_running_stats, 4: drop}), given(torch.ones(4, 16)).detach()


def eps_of_a_norm_changes(given: Normed, model: nn.Module) -> Any:
    return train(model, lambda step: setattr(given.norm, "eps", 10.0**-step))


def becomes_double(given: Normed, model: nn.Module) -> Any:
    found = [train(model, steps=3)]
    model.double()
    for x, y in updates(model, steps=3):
        F.cross_entropy(model(x.double()), y).backward()
    return found, state(given)


@case(lambda given, model: train(model, {2: lambda: given.second.bfloat16(), 4: lambda: given.second.double()}))
class APartBecomesHalf(Net):
    def hidden(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.to(self.first.weight.dtype)))
        return torch.relu(self.second(x.to(self.second.weight.dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x).float())


def weight_norm_is_added_and_removed(given: Net, model: nn.Module) -> Any:
    changes = {
        2: lambda: parametrizations.weight_norm(given.second),
        4: lambda: parametrize.remove_parametrizations(given.second, "weight"),
    }
    return train(model, changes)


def spectral_norm(wrap: Wrap, given: Net) -> Any:
    parametrizations.spectral_norm(given.second)
    return train(wrap(given), {4: lambda: parametrize.remove_parametrizations(given.second, "weight")})


def old_spectral_norm(wrap: Wrap, given: Net) -> Any:
    nn.utils.spectral_norm(given.second)
    return train(wrap(given), {4: lambda: nn.utils.remove_spectral_norm(given.second)})


def orthogonal_weights(wrap: Wrap, given: Net) -> Any:
    parametrizations.orthogonal(given.second)
    return train(wrap(given))


def parametrization_of_the_user_changes(wrap: Wrap) -> Any:
    class Scaled(nn.Module):
        scale = 1.0

        def forward(self, weight: Tensor) -> Tensor:
            return weight * self.scale

    model, scaled = seeded(), Scaled()
    parametrize.register_parametrization(model.second, "weight", scaled)
    return train(wrap(model), lambda step: setattr(scaled, "scale", 1.0 + 0.1 * step))


def pruned_twice_and_made_permanent(given: Net, model: nn.Module) -> Any:
    changes = {
        1: lambda: prune.l1_unstructured(given.second, "weight", amount=0.3),
        3: lambda: prune.random_unstructured(given.second, "weight", amount=0.3),
        5: lambda: prune.remove(given.second, "weight"),
    }
    return train(model, changes)


def average_of_weights_by_deepcopy(model: Normed) -> Any:
    average = copy.deepcopy(model)
    optimizer = sgd(model)
    found = []
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
            found.append(average.eval()(x))
    return found, state(model, average)


def averaged_model_and_swapped_weights(model: Normed) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)
    found = []

    def change(step: int) -> None:
        average.update_parameters(model)
        if step == 4:
            torch.optim.swa_utils.update_bn([x for x, _ in batches(3)], average)
            found.append(average(torch.ones(4, 16)).detach())

    return train(model, change), found, state(average)


def weights_are_saved_and_loaded(model: Normed) -> Any:
    kept: list[Any] = []
    changes = {1: lambda: kept.append(copy.deepcopy(model.state_dict())), 4: lambda: model.load_state_dict(kept[0])}
    return train(model, changes), list(kept[0])


def weights_are_loaded_by_assignment(model: Net) -> Any:
    kept: list[Any] = []
    changes = {1: lambda: kept.append(copy.deepcopy(model.state_dict())), 3: lambda: model.load_state_dict(kept[0], assign=True)}
    return train(model, changes, steps=4)["losses"], state(model), train(model, steps=2)


def weights_go_through_a_file(wrap: Wrap) -> Any:
    model, other = wrap(seeded(Normed)), seeded(Normed)
    found = train(model, steps=3)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    return found, state(other), train(wrap(other), steps=3), train(model, steps=3)


def module_goes_through_a_file(model: Normed) -> Any:
    found = train(model, steps=3)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    return found, type(other).__name__, train(other, steps=3), train(model, steps=3)


def lazy_layers(wrap: Wrap) -> Any:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.LazyLinear(64), nn.LazyLinear(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x)))

    model = wrap(seeded(Lazy))
    first = model(torch.ones(2, 16)).detach()
    return first, train(model)


@case(
    lambda given, model: train(
        model, {2: lambda: given.shifts.append(torch.ones(32)), 4: lambda: given.register_buffer("b", torch.ones(1))}
    )
)
class ParametersGrow(Net):
    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(32))])

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + sum(self.shifts)


def gradients_are_kept_and_compared(given: Net, model: nn.Module) -> Any:
    kept = []
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        kept.append((given.first.weight.grad, given.first.weight.grad.stride()))
    return [grad is kept[0][0] for grad, _ in kept], kept[-1], state(given)


def version_counters(given: Normed, model: nn.Module) -> Any:
    optimizer = sgd(model)
    versions = []
    for x, y in batches():
        before = [p._version for p in (given.first.weight, given.norm.num_batches_tracked)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        versions.append([p._version > was for p, was in zip((given.first.weight, given.norm.num_batches_tracked), before, strict=True)])
    return versions


@case
class BuffersAliasEachOther(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(32))
        self.register_buffer("part", self.whole[:8])

    def hidden(self, x: Tensor) -> Tensor:
        self.part.add_(1)
        self.whole.mul_(0.9)
        return super().hidden(x) + self.whole
