"""Stands in for wandb: what is logged goes into the file wandb.log, numbers in full."""

from types import SimpleNamespace
from typing import Any


class Config(dict):
    """Takes values and attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Run(SimpleNamespace):
    """One run."""

    def log(self, values: dict[str, Any], **_: Any) -> None:
        """Appends the numbers among `values`."""
        found = {name: float(v) for name, v in values.items() if isinstance(v, int | float) or getattr(v, "numel", lambda: 0)() == 1}
        with open("wandb.log", "a", encoding="ascii") as file:
            file.write(" ".join(f"{name} {value!r}" for name, value in found.items()) + "\n")

    def finish(self) -> None:
        """Nothing."""


class Image:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing is kept."""


class Histogram(Image):
    """Nothing is kept."""


run = Run(config=Config(), name="")
config = run.config


def init(*_: Any, **__: Any) -> Run:
    """The only run."""
    return run


def log(values: dict[str, Any], **_: Any) -> None:
    """As the run's."""
    run.log(values)
