"""The stages for a module in blocks: choose them, profile one call, make its graph, place it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_modules import Blocks, find_blocks
from baechi_ext.capture.torch_private import parts_of
from baechi_ext.cost import scale_links
from baechi_ext.errors import CaptureError
from baechi_ext.ir import Op, OpGraph
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from runtime import pipeline
from runtime.calls.blocks.backward import BlockBackward
from runtime.calls.blocks.tape import Block, BlockCall, Slot, Tape, leaves_of
from runtime.calls.blocks.threads import BlockThreads
from runtime.program import one_device_timeline
from runtime.progress import progress
from runtime.tables import search_news
from runtime.thread_executor import ThreadExecutor
from runtime.train_request import TrainRequest
from runtime.training import find_cluster

_RUNS = 3
Call = tuple[Callable[..., Any], tuple, dict[str, Any]]
"""A module's forward, and its arguments."""
Run = tuple[Tape, list[Tensor]]
"""A pass, and its outputs that have gradients."""
OUTPUTS = "outputs"
"""The op at which the forward pass ends."""


@dataclass(frozen=True)
class BlockPlan:
    """Where the blocks go, and what that is predicted to take."""

    blocks: tuple[Block, ...]
    found: Blocks
    result: PlanResult
    single: Timeline


def plan_blocks(module: nn.Module, call: Call, request: TrainRequest, executor: ThreadExecutor, threads: BlockThreads) -> BlockPlan:
    """The plan of a module's blocks, the best one so far where its search was interrupted. The call, a training call, is run a few times,
    and what that changes is the caller's to put back.

    Raises CaptureError where the module has no blocks, and what placing raises.
    """
    function, args, kwargs = call
    name = type(module).__name__
    with progress(f"looking for blocks of {name}"):
        found = find_blocks(module, lambda: function(*args, **kwargs), len(threads.devices))
    if len(found.watched) < 2:
        why = "; ".join(found.left_out) or "its forward calls no submodules"
        raise CaptureError(f"{name} has no two submodules that can run on their own ({why})")
    blocks = [Block(w.name, w.module, 0, w.draws) for w in found.watched]
    with progress(f"profiling {len(blocks)} blocks of {name}"):
        runs = [_profiled(threads, blocks, call) for _ in range(_RUNS)]
    graph = block_graph(runs, name)
    graph = replace(graph, modules=tuple(part for part, _ in module.named_modules() if part))
    cluster, _ = find_cluster(request, executor)
    cluster = scale_links(cluster, request.comm_cost_factor)
    with progress(pipeline.announcement(graph, cluster, request.plan)) as show:
        result = pipeline.plan(graph, cluster, request.plan.watched(lambda search: show(search_news(search))))
    device_of = {op.module: d for op, d in zip(graph.ops, result.plan.placement, strict=True)}
    placed = tuple(replace(block, device=device_of.get(block.name, 0)) for block in blocks)
    return BlockPlan(placed, found, result, one_device_timeline(graph))


def _profiled(threads: BlockThreads, blocks: Sequence[Block], call: Call) -> Run:
    """One call and its backward pass, block after block on device 0; and the outputs that have gradients."""
    function, args, kwargs = call
    tape = Tape(threads, blocks, lazy=False)
    tape.profiles = True
    with torch.enable_grad():
        leaves, _ = parts_of(tape.run(function, args, kwargs))
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not roots:
        raise CaptureError("the call returns no tensor with a gradient")
    BlockBackward(tape, roots, [torch.ones_like(root) for root in roots], keep=False).run()
    return tape, roots


def block_graph(runs: Sequence[Run], name: str) -> OpGraph:
    """The graph of the last run, with the least times of all: an op for each call of a block, forward and backward, those of a block in
    one colocation group; and an op without costs where the forward pass ends."""
    tape, roots = runs[-1]
    ids = _ids(tape.calls)
    forward_us, backward_us = (_least(runs, cost) for cost in ("forward_us", "backward_us"))
    trained = [any(slot.differentiable for slot in call.slots) for call in tape.calls]
    ops, edges, seen = [], [], set()
    for i, (call, id_) in enumerate(zip(tape.calls, ids, strict=True)):
        persistent = 0 if call.block.name in seen else _held_bytes(call.block.module)
        seen.add(call.block.name)
        size = sum(map(_bytes, {id(s): s for s in call.slots}.values()))
        common = {"colocation": call.block.name, "module": call.block.name, "op": type(call.block.module).__name__}
        ops.append(Op(id_, compute_us=forward_us[i], persistent_bytes=persistent, output_bytes=size, **common))
        for source in dict.fromkeys(_read_by(tape, call)):
            edges.append((ids[source.call.order], id_, _bytes(source), _name(source)))
    ops.append(Op(OUTPUTS))
    ends = [tape.slots[id(leaf)] for leaf in leaves_of(roots) if id(leaf) in tape.slots]
    edges += [(ids[slot.call.order], OUTPUTS, _bytes(slot), _name(slot)) for slot in ends]
    for i, call in reversed(list(enumerate(tape.calls))):
        if not trained[i]:
            continue
        back = f"{ids[i]}.backward"
        common = {"colocation": call.block.name, "module": call.block.name, "op": f"{type(call.block.module).__name__}.backward"}
        ops.append(Op(back, phase="backward", compute_us=backward_us[i], forward_op=ids[i], **common))
        edges.append((ids[i], back, call.profile.saved_bytes, "saved"))
        edges += [(OUTPUTS, back, _bytes(slot), f"gradient of {ids[i]}:{_name(slot)}") for slot in ends if slot.call is call]
        for slot in dict.fromkeys(_read_by(tape, call)):
            if slot.differentiable:
                edges.append((back, f"{ids[slot.call.order]}.backward", _bytes(slot), f"gradient of {ids[slot.call.order]}:{_name(slot)}"))
    return OpGraph.from_edges(ops, edges, name=name, framework="torch")


def _ids(calls: Sequence[BlockCall]) -> list[str]:
    count: Counter[str] = Counter()
    ids = []
    for call in calls:
        again = count[call.block.name]
        ids.append(f"{call.block.name}#{again}" if again else call.block.name)
        count[call.block.name] += 1
    return ids


def _least(runs: Sequence[Run], cost: str) -> list[float]:
    """For each call of the last run, the least time of all runs that made the same calls."""
    last = [call.block.name for call in runs[-1][0].calls]
    alike = [tape for tape, _ in runs if [call.block.name for call in tape.calls] == last]
    return [min(getattr(tape.calls[i].profile, cost) for tape in alike) for i in range(len(last))]


def _read_by(tape: Tape, call: BlockCall) -> list[Slot]:
    """What a call takes of other blocks, directly or by the caller's code."""
    return [*call.reads, *(tape.slots[id(leaf)] for leaf in leaves_of(call.roots) if id(leaf) in tape.slots)]


def _name(slot: Slot) -> str:
    return str(slot.call.slots.index(slot))


def _bytes(slot: Slot) -> int:
    return slot.value.numel() * slot.value.element_size()


def _held_bytes(module: nn.Module) -> int:
    """Parameters, their gradients, and buffers."""
    size = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in module.parameters())
    return size + sum(b.numel() * b.element_size() for b in module.buffers())
