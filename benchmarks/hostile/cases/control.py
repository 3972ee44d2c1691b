"""Branches and loops that depend on values, and values that leave the graph for Python."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.hostile.suite import Net, Normed, Wrap, case, seeded, train


@case(lambda model: train(model, steps=10))
class BranchOnASum(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if x.sum() > 0 else out.tanh()


@case(lambda given, model: (train(model), given.seen))
class ItemScales(Net):
    seen: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        scale = out.abs().max().item()
        self.seen = (*self.seen, scale)
        return out / scale


@case(lambda given, model: (train(model), given.rounds))
class LoopUntilItConverges(Net):
    rounds: Any = ()

    def hidden(self, x: Tensor) -> Tensor:
        x, count = torch.tanh(self.first(x)), 0
        while count < 8:
            after = torch.tanh(self.second(x))
            count += 1
            if (after - x).abs().max() < 0.6:
                break
            x = after
        self.rounds = (*self.rounds, count)
        return x


@case
class ValuesBecomeAList(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        order = sorted(range(len(x)), key=[row.item() for row in out[:, 0]].__getitem__)
        return out[order] * len(set(out.argmax(1).tolist()))


@case
class NumpyInTheMiddle(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        scale = hidden.detach().numpy().std(axis=0).argmax()
        return self.last(hidden) * float(scale + 1)


@case(lambda given, model: (train(model, {3: lambda: given.last.bias.data.fill_(float("inf"))}), given.skipped))
class SkippedWhereNotFinite(Net):
    skipped = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not torch.isfinite(out).all():
            self.skipped += 1
            return out.nan_to_num(0.0, 0.0, 0.0)
        return out


@case(lambda given, model: (train(model, steps=8), given.best, given.worse))
class BestLossIsRemembered(Net):
    best = float("inf")
    worse = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        norm = float(out.detach().norm())
        if norm < self.best:
            self.best = norm
        else:
            self.worse += 1
        return out / (1 + self.worse)


def shape_decides(wrap: Wrap) -> Any:
    class Shaped(Normed):
        def forward(self, x: Tensor) -> Tensor:
            if x.size(0) % 2:
                x = torch.cat([x, x[:1]])
            return super().forward(x)[: x.shape[0]]

    model = wrap(seeded(Shaped))
    found = []
    for size in (8, 3, 5, 8, 1, 2):
        out = model(torch.linspace(-1, 1, size * 16).view(size, 16))
        out.sum().backward()
        found.append(out.detach())
    return found


@case(lambda given, model: (train(model, steps=8), given.exits))
class EarlyExitByConfidence(Net):
    exits: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        early = torch.relu(self.first(x))
        if torch.softmax(self.last(early), 1).max() > 0.4:
            self.exits = (*self.exits, 1)
            return self.last(early)
        self.exits = (*self.exits, 2)
        return self.last(torch.relu(self.second(early)))


@case
class ConditionalOp(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.sum() > 0, super().forward(x), super().forward(-x))


@case
class ScheduleByATensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return super().forward(x) * torch.clamp(self.step / 4, max=1.0) ** (2 if self.step.item() < 3 else 1)


@case(lambda given, model: (train(model), given.said))
class TextOfATensor(Net):
    said: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.said = (*self.said, f"{out.mean():.3f} {len(out)} {out.dtype} {tuple(out.shape)}")
        return out
