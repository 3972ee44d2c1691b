"""Counts of a process's step: the bytes that it sends, by collective, as a ring makes it send them, and the memory that it holds."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from baechi_ext.capture.torch_private import collectives
from baechi_runtime.report.report import Held, Sent

_ROUNDS = {"all_reduce": 2, "allreduce": 2, "allreduce_coalesced": 2}
"""A ring goes round twice for a sum that everybody gets, once for anything else."""


@dataclass
class Traffic:
    """Bytes that this process sent, and messages, by kind of collective."""

    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def sent_bytes(self) -> float:
        return sum(self.sent.values())

    def add(self, kind: str, size: int, processes: int) -> None:
        """Count a collective; `size` are the bytes that one process puts in or gets out, the larger of both."""
        if processes > 1:
            self.sent[kind] += _ROUNDS.get(kind, 1) * size * (processes - 1) / processes
            self.calls[kind] += 1

    def __iadd__(self, other: "Traffic") -> "Traffic":
        for kind, size in other.sent.items():
            self.sent[kind] += size
        self.calls.update(other.calls)
        return self

    def by_kind(self) -> dict[str, Sent]:
        """Messages and bytes by kind of collective."""
        return {kind: Sent(messages=self.calls[kind], bytes=size) for kind, size in self.sent.items()}


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count what is sent inside."""
    traffic = Traffic()
    with collectives(traffic.add):
        yield traffic


def counted_bytes(run: Callable[[], object], weights: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> Held:
    """Count the bytes of one step, which this runs: `run` leaves the gradients on the parameters among the `weights`."""
    own = [local(w) for w in weights]
    held = {_memory(w): w.untyped_storage().nbytes() for w in own}
    kept: dict[int, torch.UntypedStorage] = {}
    """Held until the end, so that none takes another's place; what FSDP gathers it has given back by then."""

    def keep(value: Tensor) -> Tensor:
        kept[_memory(local(value))] = local(value).untyped_storage()
        return value.detach()  # what an op keeps of its own result would hold itself

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        run()
    states = [local(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return Held(
        weights=sum(held.values()),
        gradients=sum(local(p.grad).nbytes for group in optimizer.param_groups for p in group["params"] if p.grad is not None),
        optimizer=sum(s.nbytes for s in states),
        kept=sum(storage.nbytes() for memory, storage in kept.items() if memory not in held),
    )


def local(value: Tensor) -> Tensor:
    """This process's part of a distributed tensor; of any other, itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
