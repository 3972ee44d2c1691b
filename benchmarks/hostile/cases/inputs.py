"""Inputs of every kind: shapes that change, views, overlaps, other dtypes, containers, and what forward does to them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Normed, Wrap, batches, case, seeded, sgd, state, updates


def fed(model: nn.Module, feeds: Iterable[tuple[Any, ...]], named: Any = None, *, keep_inputs: bool = False) -> Any:
    """Train on these arguments, by position and maybe by name; the loss is of whatever tensors come out."""
    optimizer = sgd(model)
    feeds, losses = list(feeds), []
    for args, keywords in zip(feeds, named or [{}] * len(feeds), strict=True):
        optimizer.zero_grad()
        loss = model(*args, **keywords).float().pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, state(model), [[a for a in args if isinstance(a, Tensor)] for args in feeds] if keep_inputs else None


def xs(steps: int = 6, size: int = 8) -> list[Tensor]:
    return [x for x, _ in batches(steps, size)]


def batch_size_changes_each_call(model: Normed) -> Any:
    return fed(model, [(xs(1, size)[0],) for size in (8, 3, 9, 2, 31, 8, 3)])


def last_batch_is_smaller(model: Normed) -> Any:
    return fed(model, [(xs(1, size)[0],) for size in (8, 8, 8, 5, 8, 8, 8, 5)])


def empty_batch(model: Net) -> Any:
    return fed(model, [(xs(1, size)[0],) for size in (8, 0, 8, 1, 0)])


def images_of_changing_sizes(wrap: Wrap) -> Any:
    class Convolving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_avg_pool2d(self.second(torch.relu(self.first(x))), 1).flatten(1)

    generator = torch.Generator().manual_seed(2)
    sizes = [(2, 3, 8, 8), (2, 3, 9, 7), (1, 3, 12, 8), (3, 3, 8, 8), (2, 3, 16, 16)]
    return fed(wrap(seeded(Convolving)), [(torch.randn(*size, generator=generator),) for size in sizes])


def channels_last_and_not(wrap: Wrap) -> Any:
    class Convolving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 32, 3)
            self.formats: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            self.formats.append(x.is_contiguous(memory_format=torch.channels_last))
            return self.conv(x).mean((2, 3))

    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    model = seeded(Convolving)
    feeds = [(x.contiguous(memory_format=f),) for f in (torch.channels_last, torch.contiguous_format) * 3]
    return fed(wrap(model), feeds), model.formats


def not_contiguous(wrap: Wrap) -> Any:
    x = xs(1, 32)[0]
    views = [x[:16].T[:16], x[::2], x[::4, :], x.flip(0), x[:, torch.arange(15, -1, -1)], x[8:16]]
    return fed(wrap(seeded()), [(view,) for view in views])


def expanded(wrap: Wrap) -> Any:
    row = xs(1, 1)[0]
    return fed(wrap(seeded()), [(row.expand(size, 16),) for size in (8, 8, 4, 8)])


@case(lambda model: fed(model, [(x if step % 2 else x.T,) for step, x in enumerate(xs(1, 16) * 6)]))
class StridesDecide(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.is_contiguous() else 1.0) * x.stride(0)


@case(lambda model: fed(model, [(x, torch.tensor(0.1 * step)) for step, x in enumerate(xs())]))
class ZeroDimensional(Net):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x + shift)


@case(lambda model: fed(model, [(x, 0.1 * step, step) for step, x in enumerate(xs(12))]))
class PythonNumbers(Net):
    def forward(self, x: Tensor, shift: float, times: int) -> Tensor:
        return super().forward(x + shift) * times


@case(lambda model: fed(model, [(x.numpy(),) for x in xs()]))
class NumpyArrays(Net):
    def forward(self, x: np.ndarray) -> Tensor:
        return super().forward(torch.from_numpy(x) * float(x.max()))


def keywords_in_any_order(wrap: Wrap) -> Any:
    class Keyed(Net):
        def forward(self, x: Tensor, *more: Tensor, gain: Any = None, **others: Any) -> Tensor:
            x = super().forward(x)
            for other in more:
                x = x + other.mean()
            return x * (1.0 if gain is None else gain) + sum(len(name) for name in others)

    x, other = xs(2)
    feeds, named = [(x,), (x, other), (x,), (x, other, other), ()], [{}, {}, {"gain": 2.0}, {"b": 1, "gain": other.mean()}, {"x": x}]
    return fed(wrap(seeded(Keyed)), feeds + feeds[::-1], named + named[::-1])


@dataclass
class Batch:
    x: Tensor
    weight: float
    names: list[str]


@case(lambda model: fed(model, [(Batch(x, 1.0 + i, ["a"] * i), {"shift": (x.mean(), None)}) for i, x in enumerate(xs(5))]))
class ContainersOfTheUser(Net):
    def forward(self, batch: Batch, extra: dict[str, Any]) -> Tensor:
        return super().forward(batch.x * batch.weight + extra["shift"][0]) * len(batch.names)


@case(lambda model: fed(model, [((row for row in x.split(2)),) for x in xs()]))
class GeneratorAsArgument(Net):
    def forward(self, parts: Iterator[Tensor]) -> Tensor:
        return super().forward(torch.cat(list(parts)))


@case(lambda model: fed(model, [(x, None if step % 2 else (x > 0).float()) for step, x in enumerate(xs())]))
class NoneAndTensorByTurns(Net):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask)


@case(lambda model: fed(model, zip(xs(), ("tanh", "relu", "exp", "tanh", "sigmoid", "abs"), strict=True)))
class TextAsArgument(Net):
    def forward(self, x: Tensor, how: str) -> Tensor:
        return getattr(super().forward(x), how)()


@case(lambda model: fed(model, [(x,) for x in xs()], keep_inputs=True))
class ChangedInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).clamp_(-1, 1)
        return super().forward(x)


def a_view_is_changed_in_place(wrap: Wrap) -> Any:
    class Writing(Net):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] = 1.0
            x.view(-1)[3] = 7.0
            return super().forward(x)

    base = xs(1, 32)[0]
    return fed(wrap(seeded(Writing)), [(base[i : i + 8],) for i in range(0, 12, 2)], keep_inputs=True), base


@case(lambda model: fed(model, [(x, x if step % 2 else x.clone()) for step, x in enumerate(xs())], keep_inputs=True))
class SameTensorTwice(Net):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1.0)
        return super().forward(a * b)


@case(lambda model: fed(model, [(x, x) if step % 2 else (x, x * 0.5) for step, x in enumerate(xs())]))
class IdentityOfInputsDecides(Net):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a) if a is b else super().forward(a - b)


def overlapping_memory(wrap: Wrap) -> Any:
    class Two(Net):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a.mul_(0.5)
            return super().forward(a + b)

    base = xs(1, 64)[0]
    return fed(wrap(seeded(Two)), [(base[i : i + 8], base[i + k : i + k + 8]) for i, k in ((0, 8), (0, 4), (8, 2), (32, 20))]), base


def requires_grad(wrap: Wrap) -> Any:
    feeds = [(x.requires_grad_(step % 2 == 0),) for step, x in enumerate(xs())]
    return fed(wrap(seeded()), feeds), [x.grad for (x,) in feeds]


def on_other_dtypes(wrap: Wrap) -> Any:
    class Casting(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()) * (2.0 if x.dtype == torch.float64 else 1.0)

    kinds = (torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.float32)
    return fed(wrap(seeded(Casting)), [(x.to(kind),) for x, kind in zip(xs(), kinds, strict=True)])


def list_is_filled_by_forward(wrap: Wrap, seen: list) -> Any:
    class Filling(Net):
        def forward(self, x: Tensor, seen: list[Tensor], table: dict[str, Tensor]) -> Tensor:
            hidden = self.hidden(x)
            seen.append(hidden)
            table[f"hidden{len(seen)}"] = hidden.detach()
            return self.last(hidden) + sum(h.mean() for h in seen[-1:])

    model, table = wrap(seeded(Filling)), {}
    found = fed(model, [(x, seen, table) for x in xs()])
    return found, seen, table


def output_of_one_call_into_the_next(wrap: Wrap) -> Any:
    class Stateful(Net):
        def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = self.hidden(x)
            if before is not None:
                hidden = hidden + 0.5 * before
            return self.last(hidden), hidden

    model = wrap(seeded(Stateful))
    before, losses = None, []
    for step, (x, y) in enumerate(updates(model)):
        out, before = model(x, before)
        loss = F.cross_entropy(out, y)
        loss.backward(retain_graph=False)
        before = before.detach() if step % 3 else None
        losses.append(loss.detach())
    return losses, state(model)


def sparse_adjacency(wrap: Wrap) -> Any:
    class Graph(Net):
        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return self.last(torch.sparse.mm(adjacency, self.hidden(torch.sparse.mm(adjacency, x))))

    feeds = []
    for step, x in enumerate(xs()):
        dense = (torch.arange(64).reshape(8, 8) % (step + 2) == 0).float()
        feeds.append((x, dense.to_sparse() if step % 3 else dense.to_sparse().coalesce()))
    return fed(wrap(seeded(Graph)), feeds)


@case(lambda model: fed(model, [(torch.fft.rfft(x) if step % 2 else x,) for step, x in enumerate(xs())]))
class ComplexNumbers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = x if x.is_complex() else torch.fft.rfft(x)
        return super().forward(torch.fft.irfft(spectrum * self.filter, n=16))


class Marked(torch.Tensor):
    """A subclass that adds nothing but its type."""


def subclass_of_tensor(wrap: Wrap) -> Any:
    class Typed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if isinstance(x, Marked) else 1.0)

    model = wrap(seeded(Typed))
    feeds = [(x.as_subclass(Marked) if step % 2 else x,) for step, x in enumerate(xs())]
    kinds = [type(model(*args)).__name__ for args in feeds]
    losses, after, _ = fed(model, feeds)
    return [torch.Tensor(loss) for loss in losses], after, kinds


def nested_lists_of_tensors(wrap: Wrap) -> Any:
    class Summing(Net):
        def forward(self, tree: Any) -> Tensor:
            if isinstance(tree, Tensor):
                return super().forward(tree)
            return sum(self.forward(branch) for branch in tree) / len(tree)

    a, b, c = xs(3)
    return fed(wrap(seeded(Summing)), [(tree,) for tree in ([a, b], [[a], [b, c]], a, [[[c]]], [a, b])])


def data_is_exchanged_under_the_same_object(wrap: Wrap) -> Any:
    model, x = wrap(seeded()), torch.zeros(8, 16)
    feeds = []
    for fresh in xs():
        x.data = fresh
        feeds.append(fed(model, [(x,)]))
    x.resize_(4, 16)
    return feeds, fed(model, [(x,)])
