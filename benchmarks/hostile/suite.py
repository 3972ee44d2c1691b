"""The registry of hostile training loops, and the small models and loops that they share.

A case is a public function of a file of `cases` that asks by their names for what it needs: `wrap`; `given`, a seeded model of the class
that it is annotated with; `model`, which is that model wrapped (and of the class that it is annotated with, where there is no `given`);
`seen`, an empty list. One that asks for `x`, and maybe for `y` and `step`, is a training step with a backward pass, called for six batches.
Or it is a class of models under `@case`, trained by `train` or by such a function in a line; its name is the class's in snake case.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Wrap = Callable[[nn.Module], nn.Module]
"""Return the module to train instead of the given one: the same, or what captures it."""
SUBJECTS = (
    "attributes", "containers", "functions", "surroundings", "hooks", "gradient_hooks", "generators", "exceptions", "inputs", "outputs",
    "gradients", "modes", "parameters", "structure", "layers", "control", "optimizers", "several", "threads",
)  # fmt: skip
"""Each is a file of `benchmarks/hostile/cases`."""
_LOOPS: dict[type[nn.Module], Callable[..., Any]] = {}


@dataclass(frozen=True)
class Case:
    """A function that trains a model and returns all that can be observed of it; `kind` is the model's class."""

    name: str
    subject: str
    function: Callable[..., Any]
    kind: Any = None

    def loop(self, wrap: Wrap) -> Any:
        """Call the function with what it asks for."""
        asked = inspect.signature(self.function).parameters
        values: dict[str, Any] = {"wrap": wrap, "seen": []}
        if self.kind is not None:
            values["given"] = seeded(self.kind)
        if "model" in asked:
            values["model"] = wrap(values["given"])
        if "x" not in asked:
            return self.function(**{name: value for name, value in values.items() if name in asked})
        found = []
        for step, (x, y) in enumerate(updates(values["model"])):
            now = {**values, "x": x, "y": y, "step": step}
            out = self.function(**{name: value for name, value in now.items() if name in asked})
            found.append(out.detach() if isinstance(out, Tensor) else out)
        return found, state(values["model"])


def case(loop: Any) -> Any:
    """Make a class of models a case; as `@case(loop)`, with a loop of its own."""

    def add(kind: type[nn.Module]) -> type[nn.Module]:
        _LOOPS[kind] = loop
        return kind

    if isinstance(loop, type):
        _LOOPS[loop] = lambda model: train(model)
        return loop
    return add


def all_cases() -> dict[str, Case]:
    """Every case by name, in the order of the subjects. Raises ValueError where two have one name."""
    listed = [one for subject in SUBJECTS for one in _cases(subject)]
    found = {one.name: one for one in listed}
    if len(found) < len(listed):
        raise ValueError(f"{len(listed)} cases have {len(found)} names: rename those that are there twice")
    return found


def _cases(subject: str) -> Iterator[Case]:
    module = import_module(f"benchmarks.hostile.cases.{subject}")
    for name, value in vars(module).items():
        if isinstance(value, type) and value in _LOOPS:
            yield Case(f"{subject}.{re.sub(r'(?<!^)(?=[A-Z])', '_', name).lower()}", subject, _LOOPS[value], value)
        elif inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            asked = inspect.signature(value).parameters
            if set(asked) & {"wrap", "given", "model"} and set(asked) <= {"wrap", "given", "model", "seen", "x", "y", "step"}:
                kinds = [asked[name].annotation for name in ("given", "model") if name in asked]
                yield Case(f"{subject}.{name}", subject, value, kinds[0] if kinds else None)


class Net(nn.Module):
    """Three layers with 1,732 parameters: 16 numbers in, 4 out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))


class Normed(Net):
    """The same with a batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)

    def hidden(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(super().hidden(x)))


def seeded(model: Callable[..., nn.Module] = Net, *args: Any) -> Any:
    """Make the model of a fixed seed, and seed what comes after."""
    torch.manual_seed(11)
    made = model(*args)
    torch.manual_seed(12)
    return made


def batches(steps: int = 6, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs [size, 16] and classes [size]; no global generator is used."""
    generator = torch.Generator().manual_seed(13)
    for _ in range(steps):
        yield torch.randn(size, 16, generator=generator), torch.randint(4, (size,), generator=generator)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.5)


def updates(*models: nn.Module, steps: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `batches`: gradients are cleared before each, and SGD's step is taken after it."""
    optimizer = sgd(*models)
    for batch in batches(steps):
        optimizer.zero_grad()
        yield batch
        optimizer.step()


def state(*models: nn.Module) -> list[Any]:
    """Return copies of parameters, buffers and gradients, by name."""
    found: list[Any] = []
    for model in models:
        tensors = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
        found.append({"tensors": tensors, "grads": grads})
    return found


Change = Callable[[int], Any] | Mapping[int, Callable[[], Any]]
"""Act before a step: a function of it, or functions for some steps."""


def train(model: nn.Module, change: Change | None = None, *, steps: int = 6,
          loss_of: Callable[[Any, Tensor], Tensor] = F.cross_entropy) -> dict[str, Any]:  # fmt: skip
    """Train on `batches`, with the change before each step."""
    optimizer = sgd(model)
    losses = []
    for step, (x, y) in enumerate(batches(steps)):
        if callable(change):
            change(step)
        elif change is not None and step in change:
            change[step]()
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": losses, "state": state(model)}


def raised(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """Return the type and the text of what a call raises; empty where it raises nothing."""
    try:
        function(*args)
    except Exception as e:  # noqa: BLE001 - any is what is observed
        return type(e).__name__, str(e)
    return "", ""
