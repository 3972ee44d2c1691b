"""Modes entered and left while training: autocast, inference, dispatch, saved tensors, transforms of functions, evaluation."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hostile.suite import Net, Normed, Wrap, batches, case, raised, seeded, state, train, updates
from benchmarks.hostile.torch_private import DispatchMode


def within(model: nn.Module, context_of: Any) -> Any:
    """Train with forward and loss in `context_of(step)`, and backward after it."""
    losses = []
    for step, (x, y) in enumerate(updates(model)):
        with context_of(step):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        losses.append(loss.detach())
    return losses, state(model)


def autocast_is_entered_later(wrap: Wrap) -> Any:
    kinds = [None, torch.bfloat16, torch.bfloat16, None, torch.float16, None]
    return within(wrap(seeded()), lambda step: nullcontext() if kinds[step] is None else torch.autocast("cpu", kinds[step]))


@case(lambda given, model: train(model, {2: lambda: setattr(given, "mixed", True), 4: lambda: setattr(given, "mixed", False)}))
class AutocastInForwardIsAnAttribute(Net):
    mixed = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            return super().forward(x).float()


@case(lambda model: within(model, lambda step: torch.autocast("cpu", torch.bfloat16, enabled=step > 2)))
class AutocastStateIsRead(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if torch.is_autocast_enabled("cpu") else 1.0)


def saved_tensors_hooks_come_later(wrap: Wrap, seen: list) -> Any:
    def pack(x: Tensor) -> Tensor:
        seen.append("pack")
        return x * 0.5 if x.is_floating_point() else x

    def unpack(x: Tensor) -> Tensor:
        seen.append("unpack")
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks
    return within(wrap(seeded()), lambda step: hooks(pack, unpack) if step > 2 else nullcontext()), len(seen)


def saved_tensors_are_counted_from_the_start(wrap: Wrap, seen: list) -> Any:
    def pack(x: Tensor) -> Tensor:
        seen.append(x.numel())
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks
    found = within(wrap(seeded()), lambda step: hooks(pack, lambda x: x) if step < 3 else nullcontext())
    return found, sum(seen)


def saved_on_the_cpu_later(model: Normed) -> Any:
    return within(model, lambda step: torch.autograd.graph.save_on_cpu() if step > 2 else nullcontext())


class Doubling(TorchFunctionMode):
    """Doubles what linear layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.seen.append("linear")
            return found * 2
        return found


def function_mode_is_entered_later(wrap: Wrap) -> Any:
    mode = Doubling()
    return within(wrap(seeded()), lambda step: mode if step in (2, 3) else nullcontext()), mode.seen


class Recording(DispatchMode):
    """Collects the names of ops, and negates every relu's result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name in ("aten.addmm", "aten.relu"):
            self.seen.append(name)
        found = func(*args, **(kwargs or {}))
        return -found if name == "aten.relu" else found


def dispatch_mode_is_entered_later(wrap: Wrap) -> Any:
    mode = Recording()
    return within(wrap(seeded()), lambda step: mode if step in (2, 3) else nullcontext()), mode.seen


def dispatch_mode_from_the_start(wrap: Wrap) -> Any:
    mode = Recording()
    return within(wrap(seeded()), lambda step: mode if step < 3 else nullcontext()), mode.seen


def flops_are_counted_later(wrap: Wrap) -> Any:
    counter = FlopCounterMode(display=False)
    return within(wrap(seeded()), lambda step: counter if step == 3 else nullcontext()), counter.get_total_flops()


def anomalies_are_looked_for_later(wrap: Wrap) -> Any:
    class Rooted(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.sqrt(x[:, :4] * 0 * self.last.bias.sum())

    model = wrap(seeded(Rooted))
    found = train(model, steps=2)
    with torch.autograd.set_detect_anomaly(True):
        kind, text = raised(train, model)
    return found["losses"], kind, "nan" in text


def profiler_is_on_for_a_step(wrap: Wrap) -> Any:
    profile = torch.profiler.profile
    return within(wrap(seeded()), lambda step: profile(activities=[torch.profiler.ProfilerActivity.CPU]) if step == 3 else nullcontext())


def inference_between_steps(model: Normed, seen: list) -> Any:
    def evaluate(step: int) -> None:
        model.eval()
        with torch.inference_mode():
            out = model(torch.full((3, 16), 0.1 * step))
        seen.append((out.is_inference(), out.clone()))
        model.train()

    return train(model, evaluate), [(flag, torch.Tensor(out.tolist())) for flag, out in seen]


def no_grad_between_steps(model: Normed, seen: list) -> Any:
    def evaluate(step: int) -> None:
        with torch.no_grad():
            out = model(torch.full((3, 16), 0.1 * step))
        seen.append((out.requires_grad, out))

    return train(model, evaluate), seen


def first_call_is_without_grad(model: Normed) -> Any:
    with torch.no_grad():
        first = model(torch.ones(8, 16))
    return first, train(model)


def grad_mode_decides(wrap: Wrap) -> Any:
    class Deciding(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if torch.is_grad_enabled() else 1.0)

    model, seen = wrap(seeded(Deciding)), []

    def evaluate(step: int) -> None:
        with torch.no_grad():
            seen.append(model(torch.ones(2, 16)))

    return train(model, evaluate), seen


def grad_mode_is_left_switched_off_by_forward(wrap: Wrap) -> Any:
    class Leaving(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            torch.set_grad_enabled(False)
            return out

    model = wrap(seeded(Leaving))
    found = []
    for x, y in batches():
        out = model(x)
        found.append((torch.is_grad_enabled(), out.requires_grad))
        torch.set_grad_enabled(True)
        F.cross_entropy(out, y).backward()
    return found, state(model)


def called_with_other_parameters(model: Net) -> Any:
    found = [train(model, steps=2)]
    for scale in (0.5, 2.0):
        scaled = {name: p * scale for name, p in model.named_parameters()}
        loss = functional_call(model, scaled, (torch.ones(4, 16),)).pow(2).sum()
        loss.backward()
        found.append((loss.detach(), state(model)))
    return found


def gradient_by_transformation(model: Net) -> Any:
    found = [train(model, steps=2)]
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(weights: Any, x: Tensor) -> Tensor:
        return functional_call(model, weights, (x,)).pow(2).mean()

    found.append(grad(loss_of)(weights, torch.ones(4, 16)))
    found.append(vmap(grad(loss_of), in_dims=(None, 0))(weights, torch.ones(3, 4, 16)))
    return found, train(model, steps=2)


def mapped_over_models(model: Net) -> Any:
    found = [train(model, steps=2)]
    stacked = {name: torch.stack([p.detach(), p.detach() * 2]) for name, p in model.named_parameters()}
    found.append(vmap(lambda weights, x: functional_call(model, weights, (x,)), in_dims=(0, None))(stacked, torch.ones(4, 16)))
    return found


def mapped_over_inputs(model: Net) -> Any:
    return train(model, steps=2), vmap(model)(torch.ones(3, 16)).detach(), train(model, steps=2)


def forward_derivative(model: Net) -> Any:
    found = train(model, steps=2)
    out, tangent = jvp(model, (torch.ones(4, 16),), (torch.full((4, 16), 0.5),))
    with forward_ad.dual_level():
        dual = model(forward_ad.make_dual(torch.ones(4, 16), torch.ones(4, 16)))
        other = forward_ad.unpack_dual(dual).tangent
    return found, out.detach(), tangent.detach(), None if other is None else other.detach()


@case
class TransformationInForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        slope = vmap(grad(lambda row: torch.tanh(row).pow(2).sum()))(x)
        return super().forward(x + slope)


def jacobian_of_the_model(model: Net) -> Any:
    found = train(model, steps=2)
    return found, torch.autograd.functional.jacobian(lambda x: model(x).sum(0), torch.ones(2, 16)), torch.func.jacrev(model)(torch.ones(16))


def evaluation_and_training_by_turns(model: Normed, seen: list) -> Any:
    def evaluate(step: int) -> None:
        model.eval()
        seen.append((model.training, model.norm.training, model(torch.full((2, 16), 0.1)).detach()))
        model.train()

    return train(model, evaluate), seen


def one_layer_is_put_into_evaluation(given: Normed, model: nn.Module) -> Any:
    return train(model, {2: given.norm.eval, 4: given.drop.eval, 5: given.train})


@case(lambda model: within(model, lambda step: torch.device("meta") if step == 3 else nullcontext()))
class DeviceContextIsEnteredLater(Net):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.ones(4)
        return super().forward(x) * (2.0 if made.device.type == "meta" else 1.0)
