"""Gradients of weights that come in partial sums, added up while backward goes on, many in a message, as DistributedDataParallel does.

Messages are started in one order, that of the program, whichever gradient is ready first: every process starts the same ones after one
another, and none waits for a message that another process has not come to.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from baechi_runtime.sharding.layout import groups

FIRST_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Gradients are added up in pieces of about this size; in a smaller one first, so that it is under way early."""


class GradientSums:
    """The sums over processes of the gradients of some weights. `over`: by name, the mesh dimensions to add up over; names in the order in
    which their gradients come. After `finish` the weights have their gradients, in memory that the next step uses again."""

    def __init__(self, weights: Mapping[str, Tensor], over: Mapping[str, tuple[int, ...]], mesh: DeviceMesh) -> None:
        self._buckets: list[_Bucket] = []
        self._started = 0
        for names, dims in buckets({name: (weights[name].nbytes, weights[name].dtype) for name in over}, over):
            bucket = _Bucket([weights[name] for name in names], groups(mesh, dims))
            self._buckets.append(bucket)
            for place, weight in enumerate(bucket.weights):
                # Through the tensor's hooks the collector of garbage sees no cycle.
                weight.register_post_accumulate_grad_hook(partial(_came, ref(self), len(self._buckets) - 1, place))

    def take(self, number: int, place: int) -> None:
        """Takes the gradient of a weight, by its place in a bucket; starts the messages that are complete."""
        self._buckets[number].take(place)
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._start()

    def _start(self) -> None:
        self._buckets[self._started].start()
        self._started += 1

    def finish(self) -> None:
        """Waits for all sums; those of weights that got no gradient in this step are of zeros."""
        while self._started < len(self._buckets):
            self._start()
        for bucket in self._buckets:
            bucket.finish()
        self._started = 0


def _came(sums: "ref[GradientSums]", number: int, place: int, _: Tensor) -> None:
    alive = sums()
    if alive is not None:
        alive.take(number, place)


class _Bucket:
    """Gradients that go in one message."""

    def __init__(self, weights: Sequence[Tensor], groups_: Sequence[dist.ProcessGroup]) -> None:
        self.weights, self.groups = list(weights), list(groups_)
        self.missing = set(range(len(self.weights)))
        first = self.weights[0]
        alone = len(self.weights) == 1  # and needs no copy
        self._flat = None if alone else torch.zeros(sum(w.numel() for w in weights), dtype=first.dtype, device=first.device)
        pieces = [] if self._flat is None else self._flat.split([w.numel() for w in weights])
        self._views = [piece.view(w.shape) for piece, w in zip(pieces, self.weights, strict=False)]
        self._work: dist.Work | None = None

    def take(self, place: int) -> None:
        weight = self.weights[place]
        if self._views:
            self._views[place].copy_(weight.grad)
            weight.grad = self._views[place]
        elif weight.grad is not None and not weight.grad.is_contiguous():
            weight.grad = weight.grad.contiguous()
        self.missing.discard(place)

    def start(self) -> None:
        for place in self.missing:
            if self._views:
                self._views[place].zero_()
        self._sum = self._flat if self._flat is not None else self.weights[0].grad
        if self._sum is None:
            self._sum = torch.zeros_like(self.weights[0])
        self._work = dist.all_reduce(self._sum, group=self.groups[0], async_op=True)

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
        for group in self.groups[1:]:
            dist.all_reduce(self._sum, group=group)
        self._work = self._sum = None
        self.missing = set(range(len(self.weights)))


def buckets(
    weights: Mapping[str, tuple[int, torch.dtype]], over: Mapping[str, tuple[int, ...]]
) -> list[tuple[list[str], tuple[int, ...]]]:
    """Names of weights whose gradients go together, and the mesh dimensions that these go over, in the order in which they are complete.
    `weights`: their bytes, and the numbers' type."""
    found: list[tuple[list[str], tuple[int, ...]]] = []
    waiting: dict[tuple[tuple[int, ...], torch.dtype], tuple[list[str], int]] = {}
    for name, dims in over.items():
        size, kind = weights[name]
        names, before = waiting.pop((dims, kind), ([], 0))
        names.append(name)
        if before + size >= (BUCKET_BYTES if found else FIRST_BYTES):
            found.append((names, dims))
        else:
            waiting[dims, kind] = names, before + size
    return found + [(names, dims) for (dims, _), (names, _) in waiting.items()]
