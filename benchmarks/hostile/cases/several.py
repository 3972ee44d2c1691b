"""Several models in one loop: adversaries, teachers, twins, averages, models that share layers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Normed, Wrap, batches, seeded, sgd, state, train, updates


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(F.leaky_relu(self.first(x), 0.2))


def generator_and_judge(wrap: Wrap) -> Any:
    maker, judge = wrap(seeded(Normed)), wrap(seeded(Judge))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (maker, judge)]
    losses = []
    for x, _ in batches():
        real, fake = x[:, :4], maker(torch.randn(8, 16))
        optimizers[1].zero_grad()
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = F.softplus(-judge(fake)).mean()
        other.backward()
        optimizers[0].step()
        losses += [loss.detach(), other.detach()]
    return losses, state(maker, judge), judge.calls


def judge_is_frozen_by_turns(wrap: Wrap) -> Any:
    maker, judge = wrap(seeded()), wrap(seeded(Judge))
    optimizers = [sgd(maker), sgd(judge)]
    for step, (x, _) in enumerate(batches()):
        judge.requires_grad_(step % 2 == 0)
        maker.requires_grad_(step % 2 == 1)
        loss = judge(maker(x)).pow(2).mean() - judge(x[:, :4]).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        optimizers[(step + 1) % 2].step()
    return loss.detach(), state(maker, judge)


def teacher_and_pupil(wrap: Wrap) -> Any:
    teacher, pupil = wrap(seeded(Normed)), wrap(seeded())
    teacher.eval()

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(torch.linspace(-1, 1, 128).view(8, 16))
        return F.kl_div(F.log_softmax(out, 1), F.softmax(target, 1), reduction="batchmean")

    return train(pupil, loss_of=loss_of), state(teacher)


def twins_of_one_model(model: Normed, x: Tensor) -> Tensor:
    one, two = model(x), model(x + 0.1)
    loss = (one - two).pow(2).mean() + F.triplet_margin_loss(one, two, model(x.flip(0)))
    loss.backward()
    return loss


def follower_by_momentum(wrap: Wrap, model: Normed) -> Any:
    follower = wrap(seeded(Normed))
    follower.load_state_dict(copy.deepcopy(model.state_dict()))
    follower.requires_grad_(False)
    queue = torch.zeros(24, 4)

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        nonlocal queue
        with torch.no_grad():
            for p, q in zip(follower.parameters(), model.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
            keys = follower(torch.ones(8, 16))
        queue = torch.cat([queue[8:], keys])
        return F.cross_entropy(out @ queue.T, y)

    return train(model, loss_of=loss_of), queue, state(follower)


def models_share_a_trunk(wrap: Wrap) -> Any:
    trunk = seeded()
    heads = [nn.Sequential(trunk, nn.Linear(4, 4)) for _ in range(2)]
    models = [wrap(head) for head in heads]
    losses = []
    for step, (x, y) in enumerate(updates(models[0], *[head[1] for head in heads[1:]])):
        loss = F.cross_entropy(models[step % 2](x), y)
        loss.backward()
        losses.append(loss.detach())
    return losses, state(*models)


def output_of_one_goes_into_the_other(wrap: Wrap) -> Any:
    first, second = wrap(seeded()), wrap(seeded(Judge))
    for x, _ in updates(first, second):
        middle = first(x)
        middle.retain_grad()
        loss = second(middle).pow(2).mean()
        loss.backward()
    return loss.detach(), middle.grad, state(first, second)


def many_models_of_one_class(wrap: Wrap) -> Any:
    class Scaled(Net):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    models = []
    for i in range(10):
        model = seeded(Scaled)
        model.scale = 0.3 + 0.1 * i
        models.append(wrap(model))
    for x, y in batches(3):
        loss = sum(F.cross_entropy(model(x), y) for model in models)
        loss.backward()
    return loss.detach(), state(*models)


def reward_and_baseline(wrap: Wrap) -> Any:
    actor, critic = wrap(seeded()), wrap(seeded(Judge))
    rewards = []
    for x, _ in updates(actor, critic):
        logits = actor(x)
        chosen = torch.distributions.Categorical(logits=logits)
        action = chosen.sample()
        reward = (action == x.argmax(1) % 4).float()
        value = critic(x[:, :4]).squeeze(1)
        loss = -(chosen.log_prob(action) * (reward - value.detach())).mean() + F.mse_loss(value, reward) - 0.01 * chosen.entropy().mean()
        loss.backward()
        rewards.append(reward)
    return rewards, state(actor, critic)


def model_is_replaced_by_its_copy(wrap: Wrap) -> Any:
    model = wrap(seeded(Normed))
    found = []
    for _ in range(3):
        found.append(train(model, steps=2))
        model = copy.deepcopy(model)
    return found


def weights_pass_to_another_model(wrap: Wrap) -> Any:
    first, second = seeded(), seeded()
    second.second.weight = first.second.weight
    models = [wrap(first), wrap(second)]
    return [train(model, steps=3) for model in (*models, *models)], state(*models)


def replicas_split_the_batch(wrap: Wrap) -> Any:
    class Parallel(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.module(part) for part in x.chunk(2)])

    inner = wrap(seeded(Normed))
    outer = Parallel(inner)
    return train(outer), list(outer.state_dict())
