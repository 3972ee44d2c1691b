"""Hooks of modules, added, replaced and removed while training."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks

from benchmarks.hostile.suite import Net, Normed, Wrap, batches, raised, seeded, sgd, state, train


def forward_hook_is_added_to_a_layer(given: Net, model: nn.Module, seen: list) -> Any:
    return train(model, {3: lambda: given.second.register_forward_hook(lambda m, a, out: seen.append(out.detach().mean()))}), seen


def forward_hook_changes_the_output_then_is_removed(wrap: Wrap) -> Any:
    model, handles = seeded(), []
    changes = {2: lambda: handles.append(model.second.register_forward_hook(lambda m, a, out: out * 0.5)), 4: lambda: handles[0].remove()}
    return train(wrap(model), changes)


def forward_hook_from_the_start_is_removed(wrap: Wrap, given: Net) -> Any:
    handle = given.second.register_forward_hook(lambda m, a, out: out * 0.5)
    return train(wrap(given), {3: handle.remove})


def forward_hook_is_replaced(wrap: Wrap) -> Any:
    model, handles = seeded(), []
    handles.append(model.second.register_forward_hook(lambda m, a, out: out * 0.5))

    def replace() -> None:
        handles.pop().remove()
        handles.append(model.second.register_forward_hook(lambda m, a, out: out.tanh()))

    return train(wrap(model), {3: replace})


def forward_hook_on_the_model(model: Net, seen: list) -> Any:
    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen.append((len(args), out.detach().sum()))
        return out * 2

    return train(model, {2: lambda: model.register_forward_hook(hook)}), seen


def forward_hook_reads_a_closure(wrap: Wrap) -> Any:
    model, factor = seeded(), [1.0]
    model.second.register_forward_hook(lambda m, a, out: out * factor[0])
    return train(wrap(model), lambda step: factor.__setitem__(0, 1.0 + step))


def forward_hook_counts_and_collects(wrap: Wrap) -> Any:
    model, seen = seeded(), {}

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.setdefault(type(module).__name__, []).append((len(seen), out.detach().clone()))

    for layer in (model.first, model.second, model.last):
        layer.register_forward_hook(hook)
    return train(wrap(model)), seen


def forward_hook_with_keyword_arguments(wrap: Wrap) -> Any:
    class Keyed(Net):
        def forward(self, x: Tensor, *, gain: float = 1.0) -> Tensor:
            return super().forward(x) * gain

    inner, seen = seeded(Keyed), []

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, gain=2.0)

    def hook(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        seen.append(sorted(kwargs.items()))
        return out / kwargs["gain"]

    return train(wrap(Outer()), {3: lambda: inner.register_forward_hook(hook, with_kwargs=True)}), seen


def pre_hook_is_added_to_a_layer(given: Net, model: nn.Module, seen: list) -> Any:
    def hook(module: nn.Module, args: Any) -> Any:
        seen.append(args[0].detach().mean())
        return (args[0] * 0.5,)

    return train(model, {3: lambda: given.second.register_forward_pre_hook(hook)}), seen


def pre_hook_on_the_model_with_keyword_arguments(wrap: Wrap) -> Any:
    class Keyed(Net):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            return super().forward(x) * gain

    model = wrap(seeded(Keyed))

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "gain": 3.0}

    return train(model, {2: lambda: model.register_forward_pre_hook(hook, with_kwargs=True)})


def pre_hook_normalizes_weights(wrap: Wrap, given: Net) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.div_(module.weight.norm(dim=1, keepdim=True))

    handle = given.second.register_forward_pre_hook(hook)
    return train(wrap(given), {4: handle.remove})


def hooks_run_in_a_new_order(wrap: Wrap, given: Net, seen: list) -> Any:
    given.second.register_forward_hook(lambda m, a, out: (seen.append("first"), out * 2)[1])
    add = given.second.register_forward_hook
    return train(wrap(given), {3: lambda: add(lambda m, a, out: (seen.append("before"), out + 1)[1], prepend=True)}), seen


def hook_that_is_always_called(wrap: Wrap) -> Any:
    class Failing(Net):
        fails = False

        def hidden(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("told to fail")
            return super().hidden(x)

    given, seen = seeded(Failing), []
    model = wrap(given)
    model.register_forward_hook(lambda m, a, out: seen.append(out is None), always_call=True)
    found = train(model)
    given.fails = True
    return found, raised(model, torch.ones(2, 16)), seen


def hook_raises_at_a_step(wrap: Wrap, given: Net) -> Any:
    calls = [0]

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise LookupError("of the user's hook")

    given.second.register_forward_hook(hook)
    model = wrap(given)
    text = raised(train, model)
    return text, calls, state(given), train(model, steps=2)


def hook_adds_itself_in_forward(wrap: Wrap, seen: list) -> Any:
    class Adding(Net):
        handle: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.handle is None:
                self.handle = self.second.register_forward_hook(lambda m, a, out: seen.append(out.detach().sum()))
            return super().forward(x)

    return train(wrap(seeded(Adding))), seen


def activations_of_a_hook_are_part_of_the_loss(wrap: Wrap) -> Any:
    model, kept = seeded(), {}
    model.second.register_forward_hook(lambda m, a, out: kept.__setitem__("second", out))
    return train(wrap(model), loss_of=lambda out, y: F.cross_entropy(out, y) + 0.1 * kept["second"].pow(2).mean())


def hook_retains_the_gradient_of_an_activation(wrap: Wrap) -> Any:
    given, kept, grads = seeded(), [], []

    def hook(module: nn.Module, args: Any, out: Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    given.second.register_forward_hook(hook)
    model = wrap(given)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        grads.append(kept[-1].grad)
    return grads, state(given)


def _with_global(add: Any, hook: Any, wrap: Wrap, model: nn.Module) -> Any:
    handles: list[Any] = []
    try:
        changes = {2: lambda: handles.append(add(hook)), 4: lambda: handles[0].remove()}
        return train(wrap(model), changes)
    finally:
        handles[0].remove()


def global_forward_hook(wrap: Wrap, seen: list) -> Any:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(module, nn.Linear):
            seen.append(out.detach().mean())
            return out * 0.9
        return None

    return _with_global(global_hooks.register_module_forward_hook, hook, wrap, seeded()), seen


def global_forward_pre_hook(wrap: Wrap, seen: list) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        seen.append(type(module).__name__)

    return _with_global(global_hooks.register_module_forward_pre_hook, hook, wrap, seeded()), seen


def global_backward_hook(wrap: Wrap, seen: list) -> Any:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        seen.append((type(module).__name__, grad_output[0].detach().clone()))

    return _with_global(global_hooks.register_module_full_backward_hook, hook, wrap, seeded()), seen


def global_hook_from_the_start_is_removed(wrap: Wrap) -> Any:
    handle = global_hooks.register_module_forward_hook(lambda m, a, out: out * 0.5 if isinstance(m, nn.Linear) else None)
    try:
        return train(wrap(seeded()), {3: handle.remove})
    finally:
        handle.remove()


def global_registration_hooks(wrap: Wrap, seen: list) -> Any:
    model = seeded()
    with_parameters = global_hooks.register_module_parameter_registration_hook(lambda m, name, p: seen.append(name))
    try:
        return train(wrap(model), {2: lambda: setattr(model, "extra", nn.Linear(4, 4))}), seen
    finally:
        with_parameters.remove()


def backward_hook_is_added_to_a_layer(given: Net, model: nn.Module, seen: list) -> Any:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append(grad_output[0].norm())
        return tuple(None if g is None else g * 0.5 for g in grad_input)

    return train(model, {2: lambda: given.second.register_full_backward_hook(hook)}), seen


def backward_hook_from_the_start_is_removed(wrap: Wrap, given: Net, seen: list) -> Any:
    handle = given.second.register_full_backward_hook(lambda m, i, o: seen.append((i[0].norm(), o[0].norm())))
    return train(wrap(given), {4: handle.remove}), seen


def backward_hook_on_the_model(model: Net, seen: list) -> Any:
    return train(model, {2: lambda: model.register_full_backward_hook(lambda m, i, o: seen.append((i[0] is None, o[0].norm())))}), seen


def backward_pre_hook_scales(given: Net, model: nn.Module, seen: list) -> Any:
    def hook(module: nn.Module, grad_output: Any) -> Any:
        seen.append(grad_output[0].norm())
        return (grad_output[0] * 2,)

    return train(model, {3: lambda: given.second.register_full_backward_pre_hook(hook)}), seen


def state_dict_hooks(given: Normed, model: nn.Module, seen: list) -> Any:
    found = train(model)
    given.register_state_dict_pre_hook(lambda m, prefix, keep: seen.append(prefix))
    given.register_state_dict_post_hook(lambda m, d, prefix, meta: d.update(added=torch.ones(1)))
    saved = model.state_dict()
    saved.pop("added")
    given.register_load_state_dict_pre_hook(lambda m, d, *args: seen.append(len(d)))
    given.register_load_state_dict_post_hook(lambda m, keys: seen.append(list(keys.missing_keys)))
    model.load_state_dict(saved)
    return found, list(saved), seen, train(model, steps=3)


def optimizer_hooks(model: Net, seen: list) -> Any:
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(o.param_groups[0]["params"][0].grad.norm()))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(o.param_groups[0]["params"][0].detach().norm()))
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return seen, state(model)
