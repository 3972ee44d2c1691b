"""A worker that runs steps split and whole, and writes down what differs."""

import copy
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from baechi_ext.shard.machine import Machine
from runtime.models.registry import ModelOptions, make_step
from runtime.models.torch import alexnet
from runtime.parity import compare
from runtime.processes.worker_group import WorkerGroup
from runtime.sharding.align import lay_out
from runtime.sharding.captured import captured_graph
from runtime.sharding.execute import ShardedStep
from runtime.sharding.forward import forward_graph
from runtime.sharding.layout import Argument, mesh_shape
from runtime.sharding.mesh import make_mesh
from runtime.sharding.moves import move, part_shape
from runtime.sharding.parity import check_parity
from runtime.sharding.strategies import DATA_PARALLEL, NAMES, PASE, runnable, search_runnable
from runtime.sharding.tensor_parallel import parallelize_plan, tensor_parallel_plan
from runtime.step import TrainingStep, optimizer_spec
from tests.runtime.sharding.by_hand import captured_by_hand, strategy
from tests.runtime.sharding.small_models import BATCH
from tests.runtime.sharding.small_models import CASES as SMALL
from tests.runtime.sharding.steps import CASES, Case

TOLERANCE = 2e-5
CHANCE = "chance"
WAYS = 40
"""Of so many ways to move a tensor on a mesh of two dimensions it is tested."""


def differences(case: Case, splits: Mapping[str, Mapping[str, int]], processes: int) -> str:
    """What differs most between a step run whole and split, two steps with an optimizer; nothing where nothing does."""
    torch.manual_seed(1)
    module, inputs = case.module(), case.inputs()
    forward = forward_graph(module, inputs)
    graph = captured_by_hand(forward, case.texts)
    split = {call: {letter: processes if parts < 0 else parts for letter, parts in s.items()} for call, s in splits.items()}
    shape = mesh_shape(processes)
    mesh = make_mesh("cpu", shape)
    step = ShardedStep(forward, module, lay_out(forward, graph, strategy(graph.graph, split), shape), mesh)
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


def by_hand(processes: int) -> dict[str, str]:
    """What differs of small modules whose calls' splits are written down, by case."""
    return {
        f"{name}, {title}": differences(case, splits, processes)
        for name, case in CASES.items()
        for title, splits in case.strategies.items()
        if processes == 4 or title != "mixed"
    }


def captured(processes: int) -> dict[str, str]:
    """What differs of captured modules and models by the strategies of people, the search, and chance."""
    found = {}
    for step, batch in steps(processes):
        names = NAMES if step.name != "inception_v3" else (DATA_PARALLEL,)  # it takes long
        found |= _compared(step, batch, processes, (*names, CHANCE))
    return found


def _compared(step: TrainingStep, batch: int, processes: int, names: Sequence[str]) -> dict[str, str]:
    """What differs by the strategies of these names, and by that of chance where it is called so."""
    shape = mesh_shape(processes)
    mesh = make_mesh("cpu", shape)
    forward = forward_graph(step.module, step.inputs)
    graph = captured_graph(forward, batch=batch)
    machine = Machine(devices=processes, tera_flops=0.001, gigabytes_per_second=2.0)
    searched = search_runnable(forward, graph, machine, shape)
    random = Random(processes)
    chance = searched.tables.strategy([random.randrange(size) for size in searched.tables.sizes])
    chosen = {name: chance if name == CHANCE else runnable(searched, name).configurations for name in names}
    found = {}
    for name, strategy_ in chosen.items():
        parity = check_parity(step, lay_out(forward, graph, strategy_, shape), mesh)
        found[f"{step.name}, {name}"] = "" if parity.passed else f"{parity.max_rel_diff:g} in {parity.worst}"
    return found


def steps(processes: int) -> Iterator[tuple[TrainingStep, int]]:
    """Steps to be split, and their batches."""
    optimizer = optimizer_spec("sgd", 0.1)
    alexnet.UNITS = 64
    for name, case in SMALL.items():
        torch.manual_seed(0)
        module, inputs = case()
        yield TrainingStep(name, module, inputs, optimizer), BATCH
    for name, options in MODELS.items():
        if name == "inception_v3" and processes > 2:
            continue  # it takes long
        yield make_step(name, options, optimizer), options.batch_size


def moved(processes: int) -> dict[str, str]:
    """Where a planned move gives another part, or another gradient, than DTensor does, by placements."""
    mesh = make_mesh("cpu", mesh_shape(processes))
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]
    # A value is never wanted in partial sums, but its gradient may come so where all of it is read.
    wishes = [(w, g) for w in kinds[:3] for g in ((w, Partial()) if w.is_replicate() else (w,))]
    ways = list(product(product(kinds, repeat=mesh.ndim), product(wishes, repeat=mesh.ndim)))
    found = {}
    for written, wish in ways if len(ways) <= WAYS else Random(0).sample(ways, WAYS):
        wanted, gradient = (tuple(places) for places in zip(*wish, strict=True))
        torch.manual_seed(torch.distributed.get_rank())
        shape = (4 * processes, 2 * processes)
        one = torch.randn(part_shape(shape, written, mesh), requires_grad=True)
        other = one.detach().clone().requires_grad_()
        actual = move(mesh, shape, written, Argument(wanted, gradient))(one)
        value = DTensor.from_local(other, mesh, written, run_check=False)
        expected = value.redistribute(placements=wanted).to_local(grad_placements=gradient)
        grad = torch.randn(expected.shape)
        actual.backward(grad)
        expected.backward(grad)
        same = torch.equal(actual, expected) and torch.equal(one.grad, other.grad)
        found[f"{written} to {wanted}, gradient {gradient}"] = "" if same else "other numbers"
    return found


def inception(processes: int) -> dict[str, str]:
    """What differs of Inception by the search, by data parallelism and by chance."""
    options = ModelOptions(batch_size=4, image_size=75)
    return _compared(make_step("inception_v3", options, optimizer_spec("sgd", 0.1)), 4, processes, (PASE,))


def exported(processes: int) -> dict[str, str]:
    """What differs where torch's own parallelize_module runs an exported strategy."""
    case = CASES["perceptron"]
    torch.manual_seed(1)
    module, inputs = case.module().eval(), case.inputs()
    forward = forward_graph(module, inputs)
    graph = captured_by_hand(forward, case.texts)
    split = {name: {"n": -1} if name == "linear" else {"k": -1} for name in ("linear", "linear_1")}
    parts = {call: dict.fromkeys(s, processes) for call, s in split.items()}
    plan = tensor_parallel_plan(forward, graph, strategy(graph.graph, parts))
    whole = copy.deepcopy(module)
    parallelize_module(module, make_mesh("cpu", (processes,)), parallelize_plan(plan.styles))
    loss, expected = module(*inputs), whole(*inputs)
    loss.backward()
    expected.backward()
    actual = results([loss], {n: p.grad for n, p in module.named_parameters()}, {})
    parity = compare(results([expected], {n: p.grad for n, p in whole.named_parameters()}, {}), actual, TOLERANCE)
    sharded = [n for n, p in module.named_parameters() if isinstance(p, DTensor)]
    return {"styles": json.dumps(plan.styles), "sharded": " ".join(sharded), "difference": "" if parity.passed else parity.worst}


MODELS = {
    "alexnet": ModelOptions(batch_size=4, image_size=63),
    "rnnlm": ModelOptions(batch_size=4, vocab_size=64, rnn_units=16, max_seq_length=8, rnn_chunk=4),
    "transformer": ModelOptions(batch_size=4, vocab_size=64, max_seq_length=8, num_layers=1, d_model=16, d_ff=32, num_heads=4),
    "inception_v3": ModelOptions(batch_size=4, image_size=107),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    tasks = {task.__name__: task for task in (by_hand, captured, exported, moved, inception)}
    with WorkerGroup.join(120.0, torch.device("cpu")) as group:
        found = tasks[sys.argv[1]](group.size)
        if group.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(found))
