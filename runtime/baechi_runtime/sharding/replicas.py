"""The usual data parallelism, beside the split steps: DistributedDataParallel, and fully sharded (FSDP2)."""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from baechi_ext.capture.parts import Parts
from baechi_ext.capture.torch_parts import normalising
from baechi_ext.errors import ShardError
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.measure.rehearsal import Rehearsal
from baechi_runtime.measure.samples import LoadOfOthers
from baechi_runtime.models.training_step import EagerStep, TrainingStep
from baechi_runtime.report.report import FSDP2, REPLICAS, StepParts
from baechi_runtime.sharding.calibration import agreed, seconds_of
from baechi_runtime.sharding.forecast import Forecast
from baechi_runtime.torch.lowering.random_state import RandomState, as_it_was
from baechi_runtime.torch.parity import exact_kernels, is_mean_of_parts, named_results, parity_of_parts, unplaced_results


def replica_step(name: str, step: TrainingStep) -> EagerStep:
    """A step of which every process computes its part of the batch, by torch's own means. Dropout draws different numbers on each. Its
    `passes` also make the sums of gradients; losses are of this process's part. Raises ShardError where the batch can't be split."""
    inputs, module = own_part(step), copy.deepcopy(step.module)
    if name == FSDP2:
        for piece in (*_blocks(module), module):
            fully_shard(piece)
    else:
        module = DistributedDataParallel(module)
    return EagerStep(replace(step, module=module, inputs=inputs), torch.device("cpu"))  # which runs it where it is


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def mean_of_all(value: Tensor) -> Tensor:
    """The mean over all processes."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def replica_results(name: str, step: TrainingStep) -> dict[str, Tensor]:
    """The loss, gradients and new values of one step from the module's state, by the names that they have where steps are compared. Every
    process has to ask; gradients are whole, and the loss is the batch's."""
    replica = replica_step(name, step)
    loss, module = mean_of_all(replica.run()), replica.step.module
    module = module.module if isinstance(module, DistributedDataParallel) else module
    gradients = {n: _whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
    return named_results(loss, gradients, {n: _whole(v) for n, v in [*module.named_parameters(), *module.named_buffers()]})


def another_step(step: TrainingStep, nodes: Iterable[fx.Node], parts: Parts) -> str:
    """The reasons for which processes that each compute a part of the batch compute another step than the whole one, whose calls are
    `nodes`; empty where there is none."""
    with as_it_was(step):
        before = RandomState()
        is_mean = is_mean_of_parts(step, parts)
        draws = not before.is_now()
    reasons = {
        "each process draws random numbers of its own": draws,
        "BatchNorm normalises each process's part by itself": bool(normalising(nodes)),
        "the loss is no mean over parts that count alike": not draws and not is_mean,
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def replica_parity(name: str, step: TrainingStep, device: torch.device) -> Parity:
    """The parity of one step from the module's state with the one that is not split; see `parity_of_parts`. Every process has to ask."""
    with exact_kernels(device), as_it_was(step) as saved:
        actual = replica_results(name, step)
        expected = unplaced_results(step, device, None)
        step.restore(saved)
        return parity_of_parts(step, device, expected, actual)


def forecast(
    rehearsal: Rehearsal, replica: EagerStep, alone_seconds: float, device: torch.device, others: Callable[[], LoadOfOthers]
) -> Forecast:
    """The forecast of a step: how much of its sums of gradients goes on beside backward, and what they take from it where processes are
    cores, is in what its real steps take. The update, the passes without sums (`alone_seconds`), and the rest are told apart. Every
    process has to ask; each gets the same answer."""
    with torch.random.fork_rng(devices=()):
        rows, share = rehearsal.steps(partial(_timed, (replica.passes, replica.optimizer.step), device), others)
    step = rehearsal.typical(rows, agreed(share, device))
    updated = min(statistics.median(rows[:, 2]), step)
    calls = min(alone_seconds, step - updated)
    return Forecast(StepParts(calls_us=1e6 * calls, gradients_us=1e6 * (step - updated - calls), update_us=1e6 * updated))


def rehearsed_us(rehearsal: Rehearsal, run: Callable[[], object], device: torch.device, others: Callable[[], LoadOfOthers]) -> float:
    """Microseconds of a step that all processes run together, the same on each. Every process has to ask. Its values go on with it."""
    with torch.random.fork_rng(devices=()):
        rows, share = rehearsal.steps(partial(_timed, (run,), device), others)
    return 1e6 * rehearsal.typical(rows, agreed(share, device))


def _timed(actions: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of one step by the clock and of the processor, and of its last action, each the slowest process's. Where messages have cores
    of their own, a process takes longer than the clock."""
    busy: list[float] = []
    _, *seconds = seconds_of(device, lambda: busy.append(time.process_time()), *actions)
    found = torch.tensor([sum(seconds), time.process_time() - busy[0], seconds[-1]], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def largest_piece_bytes(module: nn.Module) -> int:
    """Bytes of the largest piece that FSDP2 gathers at once."""
    blocks = [sum(p.nbytes for p in block.parameters()) for block in _blocks(module)]
    return max([*blocks, sum(p.nbytes for p in module.parameters()) - sum(blocks)])


def own_part(step: TrainingStep) -> tuple[Tensor, ...]:
    """The inputs with this process's part of the batch. Raises what `equal_parts` does."""
    return tuple(equal_parts(step).inputs_of(step.inputs, dist.get_rank()))


def equal_parts(step: TrainingStep) -> Parts:
    """A part of the batch for each process. Raises ShardError where it can't be split into as many of one size."""
    size = dist.get_world_size()
    if step.batch is None or step.batch % size:
        names = " and ".join(REPLICAS)
        raise ShardError(f"{names} give each of {size} processes as much of a batch, and it has {step.batch} examples; give a multiple")
    return Parts.of(step.inputs, [step.batch // size] * size, step.batch_dim)


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
