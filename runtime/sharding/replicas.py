"""What people use for data parallelism, beside the split steps: DistributedDataParallel, and fully sharded (FSDP2)."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from baechi_ext.errors import ShardError
from runtime.sharding.calibration import agreed, median_seconds, step_seconds
from runtime.sharding.forecast import Forecast, Forecaster
from runtime.sharding.gradients import buckets
from runtime.step import TrainingStep

DDP, FSDP2 = "ddp", "fsdp2"
REPLICAS = (DDP, FSDP2)
_STEPS, _PIECES, _WIDTH = 3, 4, 16


class ReplicaStep:
    """A step of which every process computes its part of the batch, by torch's own means. Dropout draws other numbers on each."""

    def __init__(self, name: str, step: TrainingStep, batch: int) -> None:
        """`batch`: the length of the inputs' dimension that is split. Raises ShardError where that can't be."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if batch % size:
            raise ShardError(f"{name} gives each of {size} processes as much of a batch, and it has {batch} examples; give a multiple")
        self.inputs = tuple(_part(value, batch, rank, size) for value in step.inputs)
        module = copy.deepcopy(step.module)
        if name == FSDP2:
            for child in _blocks(module):
                fully_shard(child)
            self.module: nn.Module = fully_shard(module)
        else:
            self.module = DistributedDataParallel(module)
        self.optimizer = step.optimizer.make([p for p in self.module.parameters() if p.requires_grad])

    def run(self) -> Tensor:
        """One step, the optimizer's included; the loss of this process's part."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.module(*self.inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class ReplicaForecaster:
    """Forecasts of such steps: the module on this process's part of the batch, measured without them; what they add to a tiny net, for
    each piece; messages and copies of gradients and weights by their sizes; and the update."""

    def __init__(self, step: TrainingStep, batch: int, forecaster: Forecaster, device: torch.device) -> None:
        self._step, self._links, self._update, self._device = step, forecaster.links, forecaster.update_seconds, device
        self._size = dist.get_world_size()
        self._batch = batch

    def forecast(self, name: str) -> Forecast:
        """Of `ddp` or `fsdp2`. Every process has to ask."""
        inputs = tuple(_part(value, self._batch, dist.get_rank(), self._size) for value in self._step.inputs)
        saved = self._step.snapshot()
        calls = min(step_seconds(self._step.module, inputs, self._device) for _ in range(_STEPS))
        self._step.restore(saved)
        pieces = _piece_bytes(name, self._step.module)
        executor = self._added(name) * (len(pieces) if name == FSDP2 else 1)
        gradients = sum(self._sum_seconds(size) if name == DDP else self._sharded_seconds(size) for size in pieces)
        update = self._update / (self._size if name == FSDP2 else 1)
        return Forecast(*(1e6 * s for s in (agreed(calls, self._device), 0.0, gradients, update, executor)))

    def _sum_seconds(self, size: int) -> float:
        """Of a bucket, into which gradients are copied, and out of it."""
        return self._links.seconds("all_reduce", size, self._size) + 2 * size * self._links.copy_seconds

    def _sharded_seconds(self, size: int) -> float:
        """Of a piece: gathered forward and backward, gradients added up and scattered; beyond the messages of a tiny one."""
        link = partial(self._links.seconds, processes=self._size)
        gathers = 2 * (link("all_gather", size) - link("all_gather", 0))
        return gathers + link("reduce_scatter_tensor", size) - link("reduce_scatter_tensor", 0) + 3 * size * self._links.copy_seconds

    def _added(self, name: str) -> float:
        """What a piece of a tiny net takes longer than without."""
        tiny = TrainingStep("tiny", _Tiny(), (torch.rand(self._size, _WIDTH, device=self._device),), self._step.optimizer)
        tiny.module.to(self._device)
        replica = ReplicaStep(name, tiny, self._size)
        optimizer = tiny.optimizer.make(list(tiny.module.parameters()))

        def bare() -> None:
            optimizer.zero_grad(set_to_none=True)
            tiny.module(*replica.inputs).backward()
            optimizer.step()

        seconds = median_seconds(replica.run, self._device) - median_seconds(bare, self._device)
        return max(seconds, 0.0) / (_PIECES if name == FSDP2 else 1)


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_PIECES)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


def _piece_bytes(name: str, module: nn.Module) -> list[int]:
    """Bytes of what goes in a message: buckets of gradients, or pieces of the module."""
    own = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if name == DDP:
        sizes = {n: (p.nbytes, p.dtype) for n, p in reversed(own.items())}
        return [sum(sizes[n][0] for n in names) for names, _ in buckets(sizes, dict.fromkeys(sizes, (0,)))]
    blocks = [sum(p.nbytes for p in block.parameters()) for block in _blocks(module)]
    rest = sum(p.nbytes for p in own.values()) - sum(blocks)
    return [*blocks, rest] if rest > 0 else blocks


def _part(value: Tensor, batch: int, rank: int, size: int) -> Tensor:
    dim = next((d for d, length in enumerate(value.shape) if length == batch), None)
    return value if dim is None else value.chunk(size, dim)[rank].contiguous()


def _blocks(module: nn.Module) -> list[nn.Module]:
    """What is sharded, and gathered, piece by piece: the members of the outermost lists of modules. All else is one more piece, since its
    weights may be read elsewhere, too."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            found += [member for member in child if next(member.parameters(), None) is not None]
        else:
            found += _blocks(child)
    return found
