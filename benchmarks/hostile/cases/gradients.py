"""Uses of gradients: twice, in parts, of inputs, of gradients, with recomputation, and functions of the user's own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.hostile.suite import Net, Normed, batches, case, raised, sgd, state, train


@case(lambda given, model: train(model, lambda step: setattr(given, "frozen", step % 3 == 1)))
class NoGradPartMoves(Net):
    frozen = False

    def hidden(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.frozen):
            x = torch.relu(self.first(x))
        return torch.relu(self.second(x))


@case
class CheckpointedWithoutReentry(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.hidden, x, use_reentrant=False))


@case
class CheckpointedWithReentry(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.hidden, x.requires_grad_(), use_reentrant=True))


@case(lambda given, model: train(model, {3: lambda: setattr(given, "saving", True)}))
class CheckpointingIsSwitchedOn(Normed):
    saving = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.hidden, x, use_reentrant=False) if self.saving else self.hidden(x))


def double_backward(model: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).tanh(), y)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = loss + 0.1 * sum(g.pow(2).sum() for g in grads)
    total.backward()
    return total


def gradient_penalty(model: Net, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = model(x).mean() + 10 * (grad.norm(dim=1) - 1).pow(2).mean()
    loss.backward()
    return loss


def gradient_penalty_comes_later(model: Net, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    if step >= 3:
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        loss = loss + grad.pow(2).sum()
    loss.backward()
    return loss


def inner_loop_of_maml(model: Net, x: Tensor, y: Tensor) -> Tensor:
    named = dict(model.named_parameters())
    loss = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(named.items(), grads, strict=True)}
    outer = F.cross_entropy(torch.func.functional_call(model, fast, (x.flip(0),)), y.flip(0))
    outer.backward()
    return outer


def gradient_of_the_input(model: Net, x: Tensor, y: Tensor, step: int) -> Any:
    x.requires_grad_(step % 2 == 1)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if x.grad is not None:
        F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y).backward()
    return loss.detach(), x.grad


def backward_twice_with_a_retained_graph(model: Net, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return loss


def backward_twice_without_one(model: Net, x: Tensor, y: Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach(), "second time" in raised(loss.backward)[1]


class Heads(Net):
    """Two outputs of a common trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(x)
        return self.last(hidden), self.other(hidden)


def outputs_are_used_by_turns(model: Heads, x: Tensor, y: Tensor, step: int) -> Tensor:
    first, second = model(x)
    loss = [F.cross_entropy(first, y), F.cross_entropy(second, y), F.cross_entropy(first + second, y)][step % 3]
    loss.backward()
    return loss


def outputs_go_backward_one_after_the_other(model: Heads, x: Tensor, y: Tensor) -> Tensor:
    first, second = model(x)
    F.cross_entropy(first, y).backward(retain_graph=True)
    loss = F.cross_entropy(second, y)
    loss.backward()
    return loss


@case
class SomeParametersGetNoGradient(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def gradients_are_accumulated(model: Normed) -> Any:
    optimizer = sgd(model)
    losses = []
    for step, (x, y) in enumerate(batches(8)):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        losses.append(loss.detach())
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step > 3)
    return losses, state(model)


def gradients_of_chosen_tensors(model: Net, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward(inputs=[model.last.weight, model.first.bias] if step % 2 else None)
    return loss


def backward_with_a_given_gradient(model: Net, x: Tensor, y: Tensor, step: int) -> Tensor:
    out = model(x)
    out.backward(torch.softmax(out.detach(), 1) - F.one_hot(y, 4), retain_graph=step % 2 == 0)
    return out


def per_sample_gradients(model: Net, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    losses = F.cross_entropy(out, y, reduction="none")
    for i in range(3):
        losses[i].backward(retain_graph=True)
    return losses


def hessian_vector_product(model: Net) -> Any:
    weights = list(model.parameters())
    found = []
    for x, y in batches(3):
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        found.append(torch.autograd.grad(sum((g * g.detach()).sum() for g in grads), weights))
    return found


class Scaling(torch.autograd.Function):
    calls: list[str] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        Scaling.calls.append(f"forward {scale}")
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        Scaling.calls.append(f"backward {ctx.scale}")
        return grad * ctx.scale * x.sign().abs(), None


@case(lambda given, model: (train(model, lambda step: setattr(given, "scale", 1.0 + step)), Scaling.calls))
class FunctionOfTheUserWithSideEffects(Net):
    scale = 1.0

    def hidden(self, x: Tensor) -> Tensor:
        return Scaling.apply(super().hidden(x), self.scale)


class Straight(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_non_differentiable()
        ctx.set_materialize_grads(False)
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad * Straight.factor


@case(lambda model: train(model, lambda step: setattr(Straight, "factor", 1.0 / (1 + step))))
class BackwardOfAFunctionReadsAClass(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return Straight.apply(super().hidden(x) * 3)


@case
class BackwardWithinForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            bias = torch.zeros(16, requires_grad=True)
            (grad,) = torch.autograd.grad(super().forward(x + bias).pow(2).sum(), bias)
        return super().forward(x - 0.1 * grad)


def gradient_clipping_inside_and_out(model: Net, x: Tensor, y: Tensor, step: int) -> Any:
    loss = F.cross_entropy(model(x) * 10, y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5 + step)
    nn.utils.clip_grad_value_(model.last.parameters(), 0.01)
    return loss.detach(), norm


def gradients_are_written_by_the_user(model: Net, x: Tensor, y: Tensor, step: int) -> Tensor:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01 * step)
    model.first.weight.grad = None
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    model.last.bias.grad.zero_()
    return loss
