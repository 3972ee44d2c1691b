"""A worker that runs steps on two groups of two processes, and whole, and writes down what differs."""

import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from baechi_ext.capture.torch_joint import INPUT
from runtime.hybrid.calls import CallPlan
from runtime.hybrid.recording import GroupRecording, MemberNotes
from runtime.hybrid.share import GroupShare, in_double
from runtime.processes.local_share import GRADIENT
from runtime.processes.worker_group import WorkerGroup
from runtime.sharding.forward import forward_graph
from runtime.sharding.parity import compare_exact
from runtime.step import EagerStep, TrainingStep
from runtime.torch_devices import cpu_workers
from tests.runtime.hybrid.plans import by_chance, by_placer, placed, step_of

GROUPS = ((0, 1), (2, 3))
BY_CHANCE = ("cnn", "attention", "recurrent", "alexnet")
BY_PLACER = ("wide_towers", "transformer")
TOLERANCE, SMALLEST = 1e-9, 1e-3
"""Largest difference of a new weight, over the largest number in it or SMALLEST."""
STEPS = 3
RECORDED = "recorded"


def differences(step: TrainingStep, plan: CallPlan, group: WorkerGroup) -> str:
    """What differs most: of one step's gradients and buffers, or of losses and weights after some steps; nothing where nothing does."""
    device = cpu_workers(group.size)[group.rank]
    share = GroupShare(group, device, plan, in_double(step), exact=False)
    torch.manual_seed(step.seed)
    losses = [share.run(None)["loss"]]
    found = share.gather()
    losses += [share.run(None)["loss"] for _ in range(STEPS - 1)]
    weights = share.gather()
    if group.rank:
        return ""
    whole = in_double(step)
    torch.manual_seed(step.seed)
    whole.module(*whole.inputs).backward()
    expected = {n: b for n, b in whole.module.named_buffers() if n in found}
    expected |= {GRADIENT + n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in whole.module.named_parameters()}
    parity = compare_exact(expected, {n: found[n] for n in expected})
    if not parity.passed:
        return f"{parity.max_rel_diff:g} in {parity.worst}"
    eager = EagerStep(in_double(step), torch.device("cpu"))
    torch.manual_seed(step.seed)
    wanted = [eager.run().item() for _ in range(STEPS)]
    if losses[0] is not None and not all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(losses, wanted, strict=True)):
        return f"losses {losses} instead of {wanted}"
    return _differing(eager.step.state(), weights)


def _differing(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> str:
    for name, value in expected.items():
        if name in actual:
            off = (value - actual[name]).abs().max().item() if value.numel() else 0.0
            if not off <= TOLERANCE * max(value.abs().max().item(), SMALLEST):
                return f"{off:g} in the new {name}"
    return ""


def recorded(step: TrainingStep, group: WorkerGroup) -> dict[str, object]:
    """What a recorded step says, a step before it and one behind."""
    result = placed(step)
    plan, timeline = result.plan, result.timeline
    share = GroupShare(group, cpu_workers(group.size)[group.rank], CallPlan.of(plan, timeline), in_double(step), exact=False)
    torch.manual_seed(step.seed)
    losses = [share.run(None)["loss"]]
    share.recording("begin", None)
    begin_ns = time.monotonic_ns()
    answer = share.recording("run", None)
    wall_us = (time.monotonic_ns() - begin_ns) / 1000
    share.recording("end", None)
    nodes_left = sum(issubclass(type(found), Node) for found in gc.get_objects())
    losses += [answer["loss"], share.run(None)["loss"]]
    answers: list[Any] = [None] * group.size
    torch.distributed.all_gather_object(answers, (json.loads(json.dumps(answer)), begin_ns, losses, nodes_left))
    if group.rank:
        return {}
    eager = EagerStep(in_double(step), torch.device("cpu"))
    torch.manual_seed(step.seed)
    wanted = [eager.run().item() for _ in losses]
    found = next(losses for _, _, losses, _ in answers if losses[0] is not None)
    members = [MemberNotes.of(answer, 0) for answer, *_ in answers]
    measured = GroupRecording(min(b for _, b, *_ in answers), wall_us, members, plan, timeline).measured(plan.graph, "process")
    tensors = [(plan.graph.ops[t.producer], t.name) for t in plan.graph.tensors]
    predicted = {(tensors[t.tensor][0].id, tensors[t.tensor][1], t.source, t.target) for t in timeline.transfers}
    return {
        "measured": measured.to_json(),
        "graph": plan.graph.to_json(),
        "inputs": [op.id for op in plan.graph.ops if op.op == INPUT],
        "groups": {op.id: g for op, g in zip(plan.graph.ops, plan.on_groups, strict=True)},
        "predicted": sorted(t for t in predicted if plan.graph.ops[plan.graph.index[t[0]]].op != INPUT),
        "losses": [found, wanted],
        "nodes_left": [left for *_, left in answers],
    }


def facts(plan: CallPlan) -> dict[str, object]:
    calls = plan.calls.values()
    return {"groups": sorted({call.group for call in calls}), "split": sum(bool(call.splits) for call in calls), "calls": len(calls)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[2:]
    found: dict[str, object] = {}
    with WorkerGroup.join(120.0, torch.device("cpu")) as group:
        for name in BY_CHANCE:
            if not chosen or name in chosen:
                step = step_of(name)
                plan = by_chance(forward_graph(step.module, step.inputs, name), GROUPS, Random(1))
                found[f"{name} by chance"] = {"difference": differences(step, plan, group), **facts(plan)}
        for name in BY_PLACER:
            if not chosen or name in chosen:
                step = step_of(name)
                plan = by_placer(step)
                found[f"{name} by the placer"] = {"difference": differences(step, plan, group), **facts(plan)}
        if not chosen or RECORDED in chosen:
            found[RECORDED] = recorded(step_of("wide_towers"), group)
        if group.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
