"""The usual data parallelism, beside the split steps: DistributedDataParallel, and fully sharded (FSDP2)."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from baechi_ext.errors import ShardError
from baechi_runtime.models.training_step import OptimizerSpec, TrainingStep
from baechi_runtime.sharding.calibration import agreed, median_seconds, step_seconds
from baechi_runtime.sharding.forecast import Forecast, Forecaster
from baechi_runtime.sharding.gradients import buckets
from baechi_runtime.sharding.links import Links

DDP, FSDP2 = "ddp", "fsdp2"
REPLICAS = (DDP, FSDP2)
_STEPS, _PIECES, _WIDTH = 3, 4, 16


class ReplicaStep:
    """A step of which every process computes its part of the batch, by torch's own means. Dropout draws different numbers on each."""

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
            fully_shard(module)
            self.module: nn.Module = module
        else:
            self.module = DistributedDataParallel(module)
        self.optimizer = step.optimizer.make([p for p in self.module.parameters() if p.requires_grad])

    def run(self) -> Tensor:
        """Run one step, the optimizer's included; returns the loss of this process's part."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.module(*self.inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def replica_forecast(name: str, step: TrainingStep, batch: int, forecaster: Forecaster, device: torch.device) -> Forecast:
    """Forecast such a step: the module on this process's part of the batch, measured without `name`; what that adds to a tiny net, for each
    piece; messages and copies of gradients and weights by their sizes; and the update. Every process has to ask."""
    processes, pieces = dist.get_world_size(), _piece_bytes(name, step.module)
    inputs = tuple(_part(value, batch, dist.get_rank(), processes) for value in step.inputs)
    saved = step.snapshot()
    calls = min(step_seconds(step.module, inputs, device) for _ in range(_STEPS))
    step.restore(saved)
    executor = _added(name, step.optimizer, device) * (len(pieces) if name == FSDP2 else 1)
    gradients = sum((_sum_seconds if name == DDP else _sharded_seconds)(forecaster.links, size, processes) for size in pieces)
    update = forecaster.update_seconds / (processes if name == FSDP2 else 1)
    return Forecast(1e6 * agreed(calls, device), 0.0, 1e6 * gradients, 1e6 * update, 1e6 * executor)


def _sum_seconds(links: Links, size: int, processes: int) -> float:
    """Seconds of a bucket: gradients are copied into it, added up, and copied out of it."""
    return links.seconds("all_reduce", size, processes) + 2 * size * links.copy_seconds


def _sharded_seconds(links: Links, size: int, processes: int) -> float:
    """Seconds of a piece: gathered forward and backward, gradients added up and scattered; beyond the messages of a tiny one."""
    kinds = "all_gather", "reduce_scatter"
    gather, scatter = (links.seconds(kind, size, processes) - links.seconds(kind, 0, processes) for kind in kinds)
    return 2 * gather + scatter + 3 * size * links.copy_seconds


def _added(name: str, optimizer: OptimizerSpec, device: torch.device) -> float:
    """Seconds that a step of a tiny net takes longer with `name` than without; for `fsdp2`, per piece."""
    processes = dist.get_world_size()
    tiny = TrainingStep("tiny", _Tiny(), (torch.rand(processes, _WIDTH, device=device),), optimizer)
    tiny.module.to(device)
    replica = ReplicaStep(name, tiny, processes)
    made = optimizer.make(list(tiny.module.parameters()))

    def bare() -> None:
        made.zero_grad(set_to_none=True)
        tiny.module(*replica.inputs).backward()
        made.step()

    seconds = median_seconds(replica.run, device) - median_seconds(bare, device)
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
    """The modules that are sharded, and gathered, piece by piece: the members of the outermost lists of modules. All else is one more
    piece, since its weights may be read elsewhere, too."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            found += [member for member in child if next(member.parameters(), None) is not None]
        else:
            found += _blocks(child)
    return found
