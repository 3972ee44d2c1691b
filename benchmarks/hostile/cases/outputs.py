"""Outputs of every kind: views and aliases of inputs, of each other and of parameters, containers, no tensors at all."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Wrap, batches, case, seeded, sgd, state, updates

Pair = namedtuple("Pair", "logits hidden")


def trained(model: Any, loss_of: Any, keep: Any = lambda x, out: None, steps: int = 6) -> Any:
    """Train with a loss of the output, whatever that is, and keep of each step what `keep` says."""
    losses, kept = [], []
    optimizer = sgd(model)
    for x, y in batches(steps):
        optimizer.zero_grad()
        out = model(x)
        loss = loss_of(out, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        kept.append(keep(x, out))
    return losses, kept, state(model)


@case(lambda model: trained(model, lambda out, y: F.cross_entropy(out["logits"], y), lambda x, out: (type(out).__name__, dict(out))))
class Dictionary(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return OrderedDict(logits=self.last(hidden), hidden=hidden, count=len(x), nothing=None, name="text")


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None
    parts: tuple[Any, ...] = ()


@case(lambda model: trained(model, lambda out, y: F.cross_entropy(out.logits, y) + out.parts[0][0], lambda x, out: out))
class DataclassAndNested(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return Output(self.last(hidden), None, ([hidden.mean()], {"a": (hidden.sum(), 3)}))


@case(lambda model: trained(model, lambda out, y: F.cross_entropy(out.logits, y), lambda x, out: (type(out).__name__, out)))
class NamedTuple(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return Pair(self.last(hidden), hidden)


class Bundle:
    """An object of the user's own that no tree knows."""

    def __init__(self, logits: Tensor, calls: int) -> None:
        self.logits, self.calls = logits, calls


@case(lambda model: trained(model, lambda out, y: F.cross_entropy(out.logits, y), lambda x, out: out.calls))
class ObjectOfTheUser(Net):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return Bundle(self.last(self.hidden(x)), self.calls)


def kind_changes(wrap: Wrap) -> Any:
    class Changing(Net):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            out = self.last(self.hidden(x))
            return [out, (out, out * 2), {"a": out}][self.calls % 3]

    def loss_of(out: Any, y: Tensor) -> Tensor:
        tensors = [out] if isinstance(out, Tensor) else list(out.values() if isinstance(out, dict) else out)
        return sum(F.cross_entropy(t, y) for t in tensors)

    return trained(wrap(seeded(Changing)), loss_of, lambda x, out: type(out).__name__)


def view_of_an_input(wrap: Wrap) -> Any:
    class Viewing(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x[:, :4], x

    def keep(x: Tensor, out: Any) -> Any:
        shares, same = out[1].data_ptr() == x.data_ptr(), out[2] is x
        out[1].zero_()
        return x, out[1]._is_view(), shares, same

    return trained(wrap(seeded(Viewing)), lambda out, y: F.cross_entropy(out[0], y), keep)


def views_of_each_other(wrap: Wrap) -> Any:
    class Viewing(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return out, out.view(-1), out.T, out

    def keep(x: Tensor, out: Any) -> Any:
        same = [out[0] is out[3], out[0].data_ptr() == out[1].data_ptr(), out[2].stride()]
        with torch.no_grad():
            out[0].add_(1)
        return same, out[1], out[2]

    return trained(wrap(seeded(Viewing)), lambda out, y: F.cross_entropy(out[0], y) + out[1].sum() * 0.1 + out[2].mean(), keep)


def parameter_itself(wrap: Wrap) -> Any:
    class Giving(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.second.weight, self.last.weight.T

    given = seeded(Giving)
    keep = lambda x, out: (out[1] is given.second.weight, out[2].shape, out[2].data_ptr() == given.last.weight.data_ptr())  # noqa: E731
    return trained(wrap(given), lambda out, y: F.cross_entropy(out[0], y) + 0.1 * out[1].pow(2).sum() + out[2].abs().sum() * 0.01, keep)


def changed_in_place_by_the_user(model: Net) -> Any:
    return trained(model, lambda out, y: F.cross_entropy(out.mul_(2).add_(0.1), y), lambda x, out: out)


@case(lambda model: trained(model, lambda out, y: F.cross_entropy(out[0], y), lambda x, out: out[1:]))
class IntegersAndFlags(Net):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, out.argmax(1), out > 0, (out > 0).any(), out.detach().half(), int(out.argmax())


def detached_parts(wrap: Wrap) -> Any:
    class Detaching(Net):
        def forward(self, x: Tensor) -> Any:
            hidden = self.hidden(x)
            with torch.no_grad():
                fixed = self.last(hidden)
            return self.last(hidden), hidden.detach(), fixed, x.mean()

    def keep(x: Tensor, out: Any) -> Any:
        return [(o.requires_grad, o.is_leaf, o.grad_fn is None) for o in out], out[1], out[2]

    return trained(wrap(seeded(Detaching)), lambda out, y: F.cross_entropy(out[0] + out[2], y), keep)


def nothing(wrap: Wrap) -> Any:
    class Silent(Net):
        loss: Any = None

        def forward(self, x: Tensor, y: Tensor) -> None:
            self.loss = F.cross_entropy(super().forward(x), y)

    given = seeded(Silent)
    model = wrap(given)
    for x, y in updates(model):
        model(x, y)
        given.loss.backward()
    return given.loss.detach(), state(model)


def early_return(wrap: Wrap) -> Any:
    class Early(Net):
        exit_at = 9

        def forward(self, x: Tensor) -> Any:
            for depth, layer in enumerate((self.first, self.second)):
                x = torch.relu(layer(x))
                if depth == self.exit_at:
                    return x[:, :4]
            return self.last(x)

    given = seeded(Early)
    model = wrap(given)
    found = []
    for step in range(6):
        if step in (2, 4):
            given.exit_at = step // 2 - 1
        found.append(trained(model, F.cross_entropy, steps=1))
    return found


@case(lambda given, model: trained(model, lambda outs, y: F.cross_entropy(outs[-1], y), lambda x, out: (len(out), out is given.outs)))
class ListKeptByTheModel(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.outs.append(super().forward(x))
        return self.outs


def saved_for_later_steps(model: Net) -> Any:
    kept: list[Tensor] = []
    optimizer = sgd(model)
    for x, y in batches():
        kept.append(model(x))
        if len(kept) == 3:
            optimizer.zero_grad()
            (F.cross_entropy(kept[0], y) + sum(out.pow(2).mean() for out in kept)).backward()
            optimizer.step()
            kept.clear()
    return state(model)


@case(lambda model: trained(model, lambda out, y: F.cross_entropy(out(2.0), y)))
class FunctionOfTheInputs(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return lambda scale: self.last(hidden) * scale


def strides_and_views_are_seen(wrap: Wrap) -> Any:
    class Strided(Net):
        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return out.T.contiguous().T, out[:, ::2], out.expand(3, *out.shape), out.unfold(0, 2, 1)

    keep = lambda x, out: [(list(o.stride()), o.storage_offset(), o.is_contiguous()) for o in out]  # noqa: E731
    return trained(wrap(seeded(Strided)), lambda out, y: sum(o.pow(2).mean() for o in out), keep)
