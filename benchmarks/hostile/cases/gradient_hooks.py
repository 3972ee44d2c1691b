"""Hooks of tensors, parameters and nodes of autograd's graph."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Wrap, batches, case, raised, seeded, state, train


def hook_on_an_activation_in_forward(wrap: Wrap, seen: list) -> Any:
    class Hooked(Net):
        def hidden(self, x: Tensor) -> Tensor:
            hidden = super().hidden(x)
            hidden.register_hook(lambda grad: seen.append(grad.norm()))
            return hidden

    return train(wrap(seeded(Hooked))), seen


@case(lambda given, model: train(model, lambda step: setattr(given, "strength", 0.1 * step)))
class HookOnAnActivationScalesByAnAttribute(Net):
    strength = 1.0

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        hidden.register_hook(lambda grad: grad * -self.strength)
        return hidden


def hook_on_the_output(model: Net, x: Tensor, y: Tensor, step: int) -> Any:
    out, seen = model(x), []
    if step > 2:
        out.register_hook(lambda grad: (seen.append(grad.norm()), grad * 2)[1])
    F.cross_entropy(out, y).backward()
    return seen


def hook_on_a_parameter_is_added_and_removed(wrap: Wrap) -> Any:
    model, seen, handles = seeded(), [], []

    def hook(grad: Tensor) -> Tensor:
        seen.append(grad.norm())
        return grad * 0.5

    changes = {2: lambda: handles.append(model.second.weight.register_hook(hook)), 4: lambda: handles[0].remove()}
    return train(wrap(model), changes), seen


def hook_on_a_parameter_reads_the_others(wrap: Wrap, given: Net, seen: list) -> Any:
    given.first.weight.register_hook(lambda grad: seen.append([p.grad is None for p in given.parameters()]))
    return train(wrap(given)), len(seen)


def hook_after_accumulation_steps_the_optimizer(model: Net) -> Any:
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.detach())
    return losses, state(model)


def hook_after_accumulation_comes_later(wrap: Wrap, given: Net, seen: list) -> Any:
    hook = given.last.bias.register_post_accumulate_grad_hook
    return train(wrap(given), {3: lambda: hook(lambda p: seen.append(p.grad.clone()))}), seen


def hook_on_a_node_of_the_graph(model: Net, seen: list) -> Any:
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.grad_fn.register_hook(lambda grads_in, grads_out: seen.append(grads_out[0].clone()))
        loss.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
        loss.backward()
    return seen, state(model)


def hook_on_several_gradients(given: Net, model: nn.Module, seen: list) -> Any:
    handle = torch.autograd.graph.register_multi_grad_hook(
        (given.first.weight, given.last.weight), lambda grads: seen.append([g.norm() for g in grads])
    )
    return train(model, {4: handle.remove}), seen


def hook_raises_in_backward(wrap: Wrap) -> Any:
    given, calls = seeded(), [0]

    def hook(grad: Tensor) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise ArithmeticError("of the user's gradient hook")

    given.second.weight.register_hook(hook)
    model = wrap(given)
    text = raised(train, model)
    return text, calls, train(model, steps=2)


def hook_on_an_input_that_requires_grad(model: Net, seen: list) -> Any:
    for x, y in batches():
        x.requires_grad_().register_hook(lambda grad: seen.append(grad.clone()))
        F.cross_entropy(model(x), y).backward()
        seen.append(x.grad)
    return seen, state(model)
