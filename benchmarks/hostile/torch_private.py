"""The parts of torch that are not public and that hostile loops need: TorchDynamo's backends and counters, and dispatch modes."""

from collections import Counter
from typing import Any

import torch._dynamo
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

DispatchMode = TorchDispatchMode
torch._dynamo.list_backends()  # which the first look for one would import, in each process that is forked from this one


def dynamo_backend(name: str) -> Any:
    """Return the backend of this name, a function of a graph and its inputs."""
    return torch._dynamo.lookup_backend(name)


def graph_breaks() -> Counter:
    """Return how often graphs of this process were broken, by reason."""
    return counters["graph_break"]
