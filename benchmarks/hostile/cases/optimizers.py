"""Optimizers that call the model more than once, change their parameters, or do their work elsewhere."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Normed, Wrap, batches, case, seeded, state


def with_closure(wrap: Wrap, make: Any, model: nn.Module) -> Any:
    model = wrap(model)
    optimizer = make(model.parameters())
    losses = []
    for x, y in batches(4):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.detach())
            return loss

        optimizer.step(closure)
    return losses, state(model)


def lbfgs(wrap: Wrap) -> Any:
    return with_closure(wrap, lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"), seeded())


def rprop(wrap: Wrap) -> Any:
    return with_closure(wrap, torch.optim.Rprop, seeded(Normed))


def averaged_gradient_descent(wrap: Wrap) -> Any:
    return with_closure(wrap, torch.optim.ASGD, seeded())


def sharpness_is_minimized(model: Normed) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = [0.05 * p.grad / norm for p in model.parameters()]
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.add_(by)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def group_is_added_and_rate_scheduled(model: Net) -> Any:
    optimizer = torch.optim.AdamW(model.last.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    rates = []
    for step, (x, y) in enumerate(batches(8)):
        if step == 3:
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.5, "initial_lr": 0.5, "max_lr": 0.5, "min_lr": 0.0,
                                       "max_momentum": 0.9, "base_momentum": 0.8})  # fmt: skip
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step < 3:
            schedule.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates, state(model)


def fused_and_foreach(wrap: Wrap) -> Any:
    found = []
    for options in ({"fused": True}, {"foreach": True}, {"amsgrad": True}):
        found.append(with_closure(wrap, lambda p, options=options: torch.optim.Adam(p, lr=0.01, **options), seeded(Normed)))
    return found


def state_is_saved_and_loaded(model: Net) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept: Any = None
    for step, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == 2:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 5:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
    return state(model), [s["exp_avg"] for s in optimizer.state.values()]


def gradients_are_scaled(model: Net) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y) * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, state(model)


def slow_weights_look_ahead(model: Net) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    slow = [p.detach().clone() for p in model.parameters()]
    for step, (x, y) in enumerate(batches(8)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 3 == 2:
            for p, kept in zip(model.parameters(), slow, strict=True):
                kept.add_(p.detach() - kept, alpha=0.5)
                p.data = kept.clone()
    return state(model)


def weights_are_perturbed_without_gradients(model: Net) -> Any:
    found = []
    for step, (x, y) in enumerate(batches()):
        losses = []
        for sign in (1, -2, 1):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, generator=generator), alpha=0.01 * sign)
                losses.append(F.cross_entropy(model(x), y))
        found.append(losses)
    return found, state(model)


@case(lambda model: ([model(x, y) for x, y in batches()], state(model)))
class WholeStepIsAFunctionOfTheUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()
