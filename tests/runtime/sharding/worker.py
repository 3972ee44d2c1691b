"""A worker that runs steps split and whole, and writes down by how much they differ."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runtime.parity import compare
from runtime.processes.worker_group import WorkerGroup
from runtime.sharding.align import lay_out
from runtime.sharding.execute import ShardedStep
from runtime.sharding.forward import forward_graph
from runtime.sharding.layout import mesh_shape
from runtime.sharding.mesh import make_mesh
from tests.runtime.sharding.by_hand import captured_by_hand, strategy
from tests.runtime.sharding.steps import CASES, Case

TOLERANCE = 2e-5


def differences(case: Case, splits: Mapping[str, Mapping[str, int]], processes: int) -> str:
    """What differs most between a step run whole and split, two steps with an optimizer; nothing where nothing does."""
    torch.manual_seed(1)
    module, inputs = case.module(), case.inputs()
    forward = forward_graph(module, inputs)
    captured = captured_by_hand(forward, case.texts)
    split = {call: {letter: processes if parts < 0 else parts for letter, parts in s.items()} for call, s in splits.items()}
    shape = mesh_shape(processes)
    mesh = make_mesh("cpu", shape)
    step = ShardedStep(forward, module, lay_out(forward, captured, strategy(captured.graph, split), shape), mesh)
    sharded = torch.optim.AdamW(list(step.parameters.values()), 0.01)
    torch.manual_seed(2)
    losses = []
    for _ in range(2):
        losses.append(step.run(*inputs))
        sharded.step()
    actual = results(losses, {n: p.grad for n, p in step.parameters.items()}, step.parameters | step.buffers)
    whole = torch.optim.AdamW(module.parameters(), 0.01)
    torch.manual_seed(2)
    losses = []
    for _ in range(2):
        whole.zero_grad()
        loss = module(*inputs)
        loss.backward()
        whole.step()
        losses.append(loss.detach())
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    parity = compare(results(losses, {n: p.grad for n, p in module.named_parameters()}, state), actual, TOLERANCE)
    return "" if parity.passed else f"{parity.max_rel_diff:g} in {parity.worst}"


def results(losses: list[Tensor], gradients: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {f"loss {i}": loss for i, loss in enumerate(losses)}
    named |= {f"gradient of {n}": g for n, g in gradients.items()} | {f"new {n}": v for n, v in state.items()}
    return {n: v.full_tensor().detach() if isinstance(v, DTensor) else v.detach() for n, v in named.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with WorkerGroup.join(60.0, torch.device("cpu")) as group:
        found = {
            f"{name}, {title}": differences(case, splits, group.size)
            for name, case in CASES.items()
            for title, splits in case.strategies.items()
            if group.size == 4 or title != "mixed"
        }
        if group.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
