"""Programs of groups: nothing waits in a circle, what is given is taken, and the plan's order is kept."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from torch import fx

from baechi_ext.errors import PlanError
from runtime.hybrid.calls import CallPlan, PlannedCall
from runtime.hybrid.program import Piece, Programs
from runtime.hybrid.step import without_changes_in_place
from runtime.sharding.forward import ForwardGraph, forward_graph
from tests.runtime.hybrid.plans import by_chance, by_placer, step_of

GROUPS = {2: ((0, 1), (2, 3)), 3: ((0, 1), (2, 3), (4, 5))}


def graph_of(name: str) -> ForwardGraph:
    step = step_of(name)
    forward = forward_graph(step.module, step.inputs, name)
    without_changes_in_place(forward)
    return forward


def played(programs: Programs) -> None:
    """Every group runs its program until it waits: for what another has not given yet."""
    graph = programs.graph
    given: set[tuple[fx.Node, int, bool]] = set()
    known = [set(graph.program.graph.find_nodes(op="placeholder")) for _ in programs.forward]
    left = [[(p, False) for p in f] + [(p, True) for p in b] for f, b in zip(programs.forward, programs.backward, strict=True)]
    while any(left):
        before = sum(map(len, left))
        for group, program in enumerate(left):
            while program and _wanted(programs, *program[0]) <= given:
                piece, back = program.pop(0)
                if back:
                    given |= {(node, group, True) for node in piece.returns}
                    continue
                known[group] |= set(piece.takes)
                for call in piece.calls:
                    assert set(call.all_input_nodes) <= known[group], f"{call} is run before what it reads"
                    known[group].add(call)
                given |= {(node, target, False) for node, target in piece.gives}
        assert sum(map(len, left)) < before, "all wait"
    assert Counter((n, g) for n, g, back in given if not back) == Counter(programs.crossing)
    assert {(n, g) for n, g, back in given if back} == programs.returned


def _wanted(programs: Programs, piece: Piece, back: bool) -> set[tuple[fx.Node, int, bool]]:
    if back:
        return {(node, target, True) for node, target in piece.gives if (node, target) in programs.returned}
    return {(node, piece.group, False) for node in piece.takes}


@pytest.mark.parametrize("count", GROUPS)
@pytest.mark.parametrize("name", ["cnn", "attention", "recurrent", "mixed", "wide_towers", "transformer", "rnnlm", "alexnet"])
def test_nothing_waits_in_a_circle(name: str, count: int) -> None:
    forward = graph_of(name)
    for seed in range(8):
        programs = Programs(forward, by_chance(forward, GROUPS[count], Random(seed)))
        played(programs)
        run = {call for group in range(count) for call in programs.calls_of(group)}
        assert {call.name for call in forward.nodes if call.users} <= {call.name for call in run}


def test_the_plans_order_is_kept() -> None:
    step = step_of("transformer")
    plan = by_placer(step)
    forward = graph_of("transformer")
    programs = Programs(forward, plan)
    played(programs)
    for pieces in programs.forward:
        order = [plan.calls[call.name].forward for piece in pieces for call in piece.calls if call.name in plan.calls]
        begun = [at for at in order if at is not None]
        assert begun == sorted(begun)
    for pieces in programs.backward:
        begun = [min(found) for found in (_backward(plan, piece) for piece in pieces) if found]  # a sum has no op that runs backward
        assert begun == sorted(begun)


def _backward(plan: CallPlan, piece: Piece) -> list[int]:
    found = [plan.calls[call.name].backward for call in piece.calls if call.name in plan.calls]
    return [at for at in found if at is not None]


def test_one_group_has_one_piece() -> None:
    forward = graph_of("wide_towers")
    programs = Programs(forward, by_chance(forward, ((0, 1),), Random(0)))
    assert [len(pieces) for pieces in (*programs.forward, *programs.backward)] == [1, 1]
    assert programs.crossing == []


def test_what_can_not_be_run_is_refused() -> None:
    forward = graph_of("mlp")
    plan = by_chance(forward, GROUPS[2], Random(0))
    shared = {name: replace(call, group=0) for name, call in plan.calls.items()}
    last = next(call for call in reversed(forward.nodes) if call.name in shared)
    without = CallPlan(plan.groups, {name: call for name, call in shared.items() if name != last.name})
    assert Programs(forward, without).loss_group == 0  # next to what it reads
    with pytest.raises(PlanError, match="does not say where the loss"):
        Programs(forward, CallPlan(plan.groups, {}))
    forward = graph_of("attention")
    calls = {call.name: PlannedCall(0) for call in forward.nodes}
    last_reader = next(call for call in reversed(forward.nodes) if "embed" in str(call.all_input_nodes))
    with pytest.raises(PlanError, match=r"embed\.weight is read on groups \[0, 1\]"):
        Programs(forward, CallPlan(plan.groups, {**calls, last_reader.name: PlannedCall(1)}))
    forward = graph_of("alexnet")
    dropped = [call.name for call in forward.nodes if "dropout" in call.name]
    calls = {call.name: PlannedCall(int(call.name == dropped[-1])) for call in forward.nodes}
    with pytest.raises(PlanError, match="2 groups draw random numbers"):
        _ = Programs(forward, CallPlan(plan.groups, calls)).seeded_group
