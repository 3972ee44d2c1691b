"""Random numbers: generators of the user's own, the global ones, dropout, and states set back."""

import random
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Normed, Wrap, case, seeded, sgd, state, train


class Noisy(Net):
    """Adds what `noise` draws."""

    def __init__(self) -> None:
        super().__init__()
        self.own_torch = torch.Generator().manual_seed(5)
        self.own_random = random.Random(6)
        self.own_numpy = np.random.default_rng(7)
        self.old_numpy = np.random.RandomState(8)

    def noise(self, x: Tensor) -> Any:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.noise(x))

    def states(self) -> Any:
        return (
            self.own_torch.get_state(),
            *map(digest, (self.own_random.getstate(), self.own_numpy.bit_generator.state, self.old_numpy.get_state())),
        )


def digest(state_of_one: Any) -> str:
    return sha256(repr(state_of_one).encode()).hexdigest()


def _drawn(given: Noisy, model: nn.Module, change: Any = None) -> Any:
    return train(model, change), given.states()


@case(_drawn)
class OwnTorchGenerator(Noisy):
    def noise(self, x: Tensor) -> Any:
        return torch.randn(x.shape, generator=self.own_torch) * 0.1


@case(_drawn)
class OwnTorchGeneratorInPlace(Noisy):
    def noise(self, x: Tensor) -> Any:
        return torch.empty_like(x).bernoulli_(0.5, generator=self.own_torch)


@case(lambda given, model: _drawn(given, model, {3: lambda: setattr(given, "own_torch", torch.Generator().manual_seed(77))}))
class OwnTorchGeneratorIsReplaced(Noisy):
    def noise(self, x: Tensor) -> Any:
        return torch.rand(x.shape, generator=self.own_torch)


@case(_drawn)
class OwnRandom(Noisy):
    def noise(self, x: Tensor) -> Any:
        return self.own_random.random()


@case(_drawn)
class OwnRandomOfSeveralKinds(Noisy):
    def noise(self, x: Tensor) -> Any:
        return self.own_random.gauss(0, 1) + self.own_random.randint(0, 3) + self.own_random.uniform(0, 1)


@case(_drawn)
class OwnRandomChoosesAndShuffles(Noisy):
    def noise(self, x: Tensor) -> Any:
        order = list(range(16))
        self.own_random.shuffle(order)
        return x[:, order] * self.own_random.choice([0.1, 0.2, 0.3])


OUTER = random.Random(9)


@case(lambda given, model: (_drawn(given, model), digest(OUTER.getstate())))
class RandomOfTheUsersFile(Noisy):
    def noise(self, x: Tensor) -> Any:
        return OUTER.random()


def random_of_a_subclass(wrap: Wrap) -> Any:
    class Counted(random.Random):
        drawn = 0

        def random(self) -> float:
            self.drawn += 1
            return super().random()

    counted = Counted(3)

    class Drawing(Noisy):
        def noise(self, x: Tensor) -> Any:
            return counted.random()

    given = seeded(Drawing)
    return _drawn(given, wrap(given)), counted.drawn, digest(counted.getstate())


@case(_drawn)
class OwnNumpyGenerator(Noisy):
    def noise(self, x: Tensor) -> Any:
        return torch.from_numpy(self.own_numpy.standard_normal(x.shape).astype(np.float32)) * 0.1


@case(_drawn)
class OldNumpyGenerator(Noisy):
    def noise(self, x: Tensor) -> Any:
        return float(self.old_numpy.rand()) if self.old_numpy.randint(2) else 0.5


@case(lambda given, model: _drawn(given, model, {3: lambda: random.seed(4)}))
class GlobalRandom(Noisy):
    def noise(self, x: Tensor) -> Any:
        return random.random() + random.randint(0, 2) + random.uniform(0, 1)


@case(lambda model: train(model, steps=10))
class GlobalRandomSkipsLayers(Net):
    def hidden(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return torch.relu(self.second(x)) if random.random() < 0.5 else x


@case(lambda given, model: _drawn(given, model, {3: lambda: np.random.seed(4)}))
class GlobalNumpy(Noisy):
    def noise(self, x: Tensor) -> Any:
        return float(np.random.rand()) + float(np.random.normal())


@case(lambda given, model: _drawn(given, model, {3: lambda: torch.manual_seed(4)}))
class GlobalTorch(Noisy):
    def noise(self, x: Tensor) -> Any:
        return torch.rand_like(x) + torch.randn(16) + torch.randint(3, (8, 1)) + torch.randperm(16) * 0.1


def dropout(model: Normed) -> Any:
    return train(model)


def dropout_rate_changes(given: Normed, model: nn.Module) -> Any:
    return train(model, lambda step: setattr(given.drop, "p", 0.1 * step))


@case
class DropoutOfSeveralKinds(Net):
    def hidden(self, x: Tensor) -> Tensor:
        x = F.alpha_dropout(F.rrelu(self.first(x), training=True), 0.2, training=True)
        x = F.feature_alpha_dropout(self.second(x), 0.1, training=True)
        return F.dropout1d(x[None], 0.2)[0] * F.gumbel_softmax(x, tau=1.0)


@case
class SeedIsSetInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super().forward(x + torch.randn_like(x))


@case
class StatesAreForkedInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn_like(x)
        return super().forward(x + noise + torch.rand_like(x))


def state_is_set_back_between_steps(wrap: Wrap) -> Any:
    kept: list[Tensor] = []
    changes = {1: lambda: kept.append(torch.get_rng_state()), 4: lambda: torch.set_rng_state(kept[0])}
    return train(wrap(seeded(Normed)), changes)


def same_noise_in_two_calls(model: Normed, x: Tensor, y: Tensor) -> Tensor:
    before = torch.get_rng_state()
    first = model(x)
    torch.set_rng_state(before)
    loss = F.cross_entropy(first, y) + (first - model(x)).pow(2).sum()
    loss.backward()
    return loss


@case
class InitializationInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        projection = torch.empty(16, 16)
        nn.init.orthogonal_(projection)
        nn.init.uniform_(projection[0])
        return super().forward(x @ projection)


@case
class Distributions(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        normal = torch.distributions.Normal(out, 0.1 + out.exp().clamp(max=2))
        chosen = torch.distributions.Categorical(logits=out).sample()
        return normal.rsample() + chosen[:, None]


def workers_of_a_loader_draw(wrap: Wrap) -> Any:
    class Items(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> Any:
            return torch.full((16,), 0.1 * i) + torch.randn(16), i % 4

    model = wrap(seeded(Normed))
    optimizer = sgd(model)
    losses = []
    for x, y in torch.utils.data.DataLoader(Items(), batch_size=7, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, state(model)
