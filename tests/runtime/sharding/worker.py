"""A worker that runs steps split and whole, and writes down what differs."""

import copy
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from baechi_ext.shard.machine import Machine
from baechi_ext.shard.search import search
from baechi_runtime.measure.comparator import compare
from baechi_runtime.models.registry import ModelOptions
from baechi_runtime.models.training_step import TrainingStep, optimizer_spec
from baechi_runtime.sharding.binding import among_runnable, lay_out
from baechi_runtime.sharding.captured import ForwardGraph, captured_graph, forward_graph
from baechi_runtime.sharding.execute import ShardedStep, check_parity
from baechi_runtime.sharding.layout import Argument, Layout, make_mesh, mesh_shape
from baechi_runtime.sharding.moves import move, part_shape
from baechi_runtime.sharding.strategies import DATA_PARALLEL, NAMES, PASE, candidates
from baechi_runtime.sharding.tensor_parallel import parallelize_plan
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from tests.pairwise import pairwise
from tests.runtime.sharding.by_hand import captured_by_hand, strategy
from tests.runtime.sharding.layers import Layers, plan, words
from tests.runtime.sharding.small_models import CASES as SMALL
from tests.runtime.sharding.steps import CASES
from tests.torch_steps import narrow_step

TOLERANCE = 2e-5
CHANCE = "chance"
WAYS = 40
"""Ways to move a tensor that are tested, at most: a mesh of two dimensions has more."""


@dataclass(frozen=True)
class ByHand:
    """A small module's step, laid out as it is written down."""

    title: str
    module: nn.Module
    inputs: Sequence[Tensor]
    forward: ForwardGraph
    layout: Mapping[str, Layout]


def by_hand(processes: int) -> list[ByHand]:
    """Small modules whose calls' splits are written down."""
    shape, found = mesh_shape(processes), []
    for name, case in CASES.items():
        for title, splits in case.strategies.items():
            if processes == 4 or title != "mixed":
                torch.manual_seed(1)
                module, inputs = case.module(), case.inputs()
                forward = forward_graph(module, inputs)
                graph = captured_by_hand(forward, case.texts)
                split = {call: {letter: processes if parts < 0 else parts for letter, parts in s.items()} for call, s in splits.items()}
                layout = lay_out(graph, strategy(graph.graph, split), shape)
                found.append(ByHand(f"{name}, {title}", module, inputs, forward, layout))
    return found


def compared_by_hand(cases: Sequence[ByHand], processes: int) -> dict[str, str]:
    """The differences of those steps, by their titles."""
    mesh = make_mesh("cpu", mesh_shape(processes))
    return {case.title: difference(case, mesh) for case in cases}


def difference(case: ByHand, mesh: DeviceMesh) -> str:
    """The largest difference between a step run whole and split, two steps with an optimizer; empty where there is none."""
    module, inputs = case.module, case.inputs
    step = ShardedStep(case.forward, module, case.layout, mesh)
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


@dataclass(frozen=True)
class Split:
    """A step laid out by strategies of these names."""

    step: TrainingStep
    layouts: Mapping[str, Mapping[str, Layout]]


def split(step: TrainingStep, processes: int, names: Sequence[str]) -> Split:
    """The step by the strategies of these names; CHANCE is a random one."""
    shape = mesh_shape(processes)
    forward = forward_graph(step.module, step.inputs)
    graph = captured_graph(forward, batch_dim=step.batch_dim)
    machine = Machine(devices=processes, tera_flops=0.001, gigabytes_per_second=2.0)
    searched = among_runnable(search(graph.graph, machine), graph, shape)
    random = Random(processes)
    chance = searched.tables.strategy([random.randrange(size) for size in searched.tables.sizes])
    tables = searched.tables
    chosen = {name: min(candidates(searched, name), key=lambda c: tables.cost(tables.choice(c[0])))[0] for name in names if name != CHANCE}
    chosen |= {CHANCE: chance} if CHANCE in names else {}
    return Split(step, {name: lay_out(graph, strategy_, shape) for name, strategy_ in chosen.items()})


def compared(splits: Sequence[Split], processes: int) -> dict[str, str]:
    """The differences of steps split and whole, by step and strategy."""
    mesh = make_mesh("cpu", mesh_shape(processes))
    found = {}
    for split_ in splits:
        for name, layout in split_.layouts.items():
            parity = check_parity(split_.step, layout, mesh)
            found[f"{split_.step.name}, {name}"] = "" if parity.passed else f"{parity.max_rel_diff:g} in {parity.worst}"
    return found


def sampled(processes: int) -> list[tuple[str, str]]:
    """Captured modules and models, and strategies, that are tried on so many processes: each pair on 2 or on 4."""
    return [(step, name) for step, name, n in pairwise((*SMALL, *MODELS), (*NAMES, CHANCE), (2, 4)) if n == processes]


def captured(processes: int, *, rest: bool = False) -> list[Split]:
    """Those that are tried, by the strategies of people, the search, and chance; or else all the others."""
    tried = sampled(processes)
    named = [(step, [n for n in (*NAMES, CHANCE) if ((step.name, n) in tried) != rest]) for step in steps()]
    return [split(step, processes, names) for step, names in named if names]


def steps() -> Iterator[TrainingStep]:
    """Steps to be split."""
    optimizer = optimizer_spec("sgd", 0.1)
    for name, case in SMALL.items():
        torch.manual_seed(0)
        module, inputs = case()
        yield TrainingStep(name, module, inputs, optimizer)
    for name, options in MODELS.items():
        yield narrow_step(name, options, optimizer)


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


def inception(processes: int) -> list[Split]:
    """Inception, which takes long: on 4 processes by the search's strategy, on 2 by the others and larger images."""
    image_size, names = (75, (PASE,)) if processes == 4 else (107, (DATA_PARALLEL, CHANCE))
    options = ModelOptions(batch_size=4, image_size=image_size)
    return [split(narrow_step("inception_v3", options, optimizer_spec("sgd", 0.1)), processes, names)]


def exported(processes: int) -> dict[str, str]:
    """The differences where torch's own parallelize_module runs an exported strategy."""
    torch.manual_seed(1)
    module, inputs = Layers(), (words(),)
    found = plan(module, embedding_1={"vocabulary": processes}, linear={"units": processes}, linear_1={"in_units": processes})
    whole = copy.deepcopy(module)
    parallelize_module(module, make_mesh("cpu", (processes,)), parallelize_plan(found.styles))
    loss, expected = module(*inputs), whole(*inputs)
    loss.backward()
    expected.backward()
    actual = results([loss], {n: p.grad for n, p in module.named_parameters()}, {})
    parity = compare(results([expected], {n: p.grad for n, p in whole.named_parameters()}, {}), actual, TOLERANCE)
    sharded = [n for n, p in module.named_parameters() if isinstance(p, DTensor)]
    return {"styles": json.dumps(found.styles), "sharded": " ".join(sharded), "difference": "" if parity.passed else parity.worst}


MODELS = {
    "alexnet": ModelOptions(batch_size=4, image_size=63),
    "rnnlm": ModelOptions(batch_size=4, vocab_size=64, rnn_units=16, max_seq_length=8, rnn_chunk=4),
    "transformer": ModelOptions(batch_size=4, vocab_size=64, max_seq_length=8, num_layers=1, d_model=16, d_ff=32, num_heads=4),
}


def prepared(processes: int, task: str) -> Callable[[], None]:
    """The work of each worker; where steps are captured and searched, this is done already."""
    searched = {"captured": captured, "the rest": partial(captured, rest=True), "inception": inception}
    if task in searched:
        return partial(work, partial(compared, searched[task](processes)))
    if task == "by_hand":
        return partial(work, partial(compared_by_hand, by_hand(processes)))
    return partial(work, {"exported": exported, "moved": moved}[task])


def work(task: Callable[[int], dict[str, str]]) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    with WorkerGroup.join(120.0, torch.device("cpu")) as group:
        found = task(group.size)
    if group.rank == 0:
        sys.stdout.write(json.dumps(found))
