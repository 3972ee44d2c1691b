"""What people use for data parallelism, beside the split steps: DistributedDataParallel, and fully sharded (FSDP2)."""

import copy

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from baechi_ext.errors import ShardError
from baechi_ext.shard.machine import Machine
from runtime.step import TrainingStep

DDP, FSDP2 = "ddp", "fsdp2"
REPLICAS = (DDP, FSDP2)


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


def predicted_cost(name: str, machine: Machine, flop: float, words: float) -> float:
    """Operations of a device for a step by data parallelism: its part of the arithmetic, and the gradients of so many `words` of weights
    added up. Fully sharded weights go round three times instead of two: gathered forward and backward, gradients added up to their parts.
    """
    share = (machine.devices - 1) / machine.devices
    rounds = 3 if name == FSDP2 else 2
    return flop / machine.devices + rounds * share * words * machine.flop_per_word


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
