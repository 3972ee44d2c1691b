"""Exceptions of the user's own, raised at some step, caught or not; what they leave behind."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hostile.suite import Net, Normed, Wrap, batches, case, raised, seeded, sgd, state, train


class OfTheUser(Exception):
    """With a text and a number of its own."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(f"{text} at {step}")
        self.step = step


class Failing(Normed):
    """Raises what `error` makes, at the call `fails_at`."""

    fails_at = 4
    calls = 0

    def error(self) -> BaseException:
        return OfTheUser("told to fail", self.calls)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.hidden(x)
        if self.calls == self.fails_at:
            raise self.error()
        return self.last(hidden)


def _caught(given: Failing, model: nn.Module) -> Any:
    """Train until it fails, and go on."""
    optimizer = sgd(model)
    found = []
    for x, y in batches():
        try:
            loss = F.cross_entropy(model(x), y)
        except BaseException as e:  # noqa: BLE001 - any is what is observed
            found.append((type(e).__name__, str(e), getattr(e, "step", None), repr(e.__cause__), repr(e.args)))
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found, given.calls, state(given)


def own_exception_passes_through(model: Failing) -> Any:
    return train(model)


def own_exception_is_caught_and_training_goes_on(given: Failing, model: nn.Module) -> Any:
    return _caught(given, model)


@case(_caught)
class ExceptionWithACause(Failing):
    def error(self) -> BaseException:
        found = RuntimeError("the second one")
        found.__cause__ = ValueError("the first one")
        return found


@case(_caught)
class Interrupt(Failing):
    def error(self) -> BaseException:
        return KeyboardInterrupt()


@case
class StopIteration(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factors = iter([1.0, 2.0, 3.0])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.factors)


@case(lambda model: train(model, {3: MissingKey.table.clear}))
class MissingKey(Net):
    table = {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table["scale"]


@case(lambda given, model: train(model, {3: lambda: setattr(given, "limit", 0.01)}))
class AssertionOnAValue(Net):
    limit = 100.0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not bool((out.abs() < self.limit).all()):
            raise AssertionError(f"more than {self.limit}")
        return out


def shapes_do_not_match(model: Net) -> Any:
    found = train(model, steps=3)
    return found, raised(model, torch.ones(3, 15)), train(model, steps=3)


def argument_is_missing(model: Net) -> Any:
    found = train(model, steps=3)
    return found, raised(model)[0], raised(model, torch.ones(3, 16), 1)[0], raised(model, "text")[0], train(model, steps=3)


@case(lambda given, model: (train(model), given.calls, given.caught))
class CaughtWithinForward(Net):
    calls = 0
    caught = 0

    def checked(self) -> float:
        self.calls += 1
        if self.calls % 2:
            raise OfTheUser("odd", self.calls)
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        try:
            factor = self.checked()
        except OfTheUser as e:
            factor = 1.0 / e.step
            self.caught += 1
        finally:
            self.calls += 0
        return super().forward(x) * factor


@case(_caught)
class RaisedAfterABufferWasChanged(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def hidden(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().hidden(x)


@case(lambda given, model: (_caught(given, model), given.seen))
class RaisedAfterAListWasFilled(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def hidden(self, x: Tensor) -> Tensor:
        hidden = super().hidden(x)
        self.seen.append(hidden.detach().sum())
        return hidden


@case(lambda given, model: (_caught(given, model), given.depth, given.deepest))
class FinallyPutsAnAttributeBack(Failing):
    depth = 0
    deepest = 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        try:
            self.deepest = max(self.deepest, self.depth)
            return super().forward(x)
        finally:
            self.depth -= 1


class Fragile(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Fragile.calls += 1
        if Fragile.calls == 3:
            raise OfTheUser("in backward", Fragile.calls)
        return grad * 2


@case(lambda model: (raised(train, model), Fragile.calls, train(model, steps=2)))
class RaisedInTheBackwardOfAFunction(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return Fragile.apply(super().hidden(x))


def error_of_torch_in_the_middle(wrap: Wrap) -> Any:
    class Solving(Net):
        def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
            return super().forward(x @ torch.linalg.cholesky(matrix))

    model = wrap(seeded(Solving))
    found = []
    for step, (x, _) in enumerate(batches()):
        matrix = torch.eye(16) * (-1.0 if step == 3 else 1.0 + step)
        try:
            found.append(model(x, matrix).detach())
        except torch.linalg.LinAlgError as e:
            found.append(str(e))
    return found


@case(_caught)
class FirstCallFails(Failing):
    fails_at = 1


@case(_caught)
class GroupOfExceptions(Failing):
    def error(self) -> BaseException:
        return ExceptionGroup("two at once", [ValueError("one"), OfTheUser("two", self.calls)])


def index_out_of_range_in_an_embedding(wrap: Wrap) -> Any:
    class Looking(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(10, 16)

        def forward(self, index: Tensor) -> Tensor:
            return super().forward(self.table(index))

    model = wrap(seeded(Looking))
    found = [raised(model, torch.tensor([1, 2, k])) for k in (3, 9, 10, 4)]
    return found, model(torch.tensor([5])).detach()
