"""The traffic of a process: collectives counted as they are started, in the bytes that a ring makes a process send for them."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from baechi_ext.capture.torch_private import collectives

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

    def to_json(self) -> dict[str, dict[str, float]]:
        """By kind of collective."""
        return {kind: {"messages": self.calls[kind], "bytes": size} for kind, size in self.sent.items()}


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count what is sent inside."""
    traffic = Traffic()
    with collectives(traffic.add):
        yield traffic
