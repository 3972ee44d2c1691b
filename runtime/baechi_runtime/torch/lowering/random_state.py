"""The states of generators of random numbers: as text, for JSON, and put back after a step that is not to be seen."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from baechi_ext.errors import CheckpointError


@dataclass
class RandomState:
    """All generators of torch's own that a forward pass may draw from."""

    torch_cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    torch_cuda: list[torch.Tensor] = field(default_factory=lambda: torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])

    def restore(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)

    def is_now(self) -> bool:
        now = RandomState()
        return torch.equal(self.torch_cpu, now.torch_cpu) and all(map(torch.equal, self.torch_cuda, now.torch_cuda))


@contextmanager
def as_it_was(step: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Puts the state of a step, a TrainingStep or a CallStep, and torch's generators back; gives what the step's state was."""
    saved: dict[str, torch.Tensor] = step.snapshot()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        try:
            yield saved
        finally:
            step.restore(saved)


def state_of(device: torch.device) -> torch.Tensor:
    """The state of torch's generator of random numbers for a device, as bytes on the host."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_state(device: torch.device, state: torch.Tensor) -> None:
    """Takes the device's generator there."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def drawing_from(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Within, the device's generator draws from that state on; afterwards it is as it was."""
    before = state_of(device)
    set_state(device, state)
    try:
        yield
    finally:
        set_state(device, before)


def state_as_text(device: torch.device) -> str:
    return base64.b64encode(bytes(state_of(device).tolist())).decode("ascii")


def take_up_state(device: torch.device, text: str) -> None:
    """Takes the device's generator to a state in text. Raises CheckpointError where it is none of such a generator's."""
    try:
        set_state(device, torch.tensor(list(base64.b64decode(text, validate=True)), dtype=torch.uint8))
    except (ValueError, RuntimeError) as e:
        raise CheckpointError(f"a random state is damaged: {e}; remove this checkpoint to go on from the one before it") from e
