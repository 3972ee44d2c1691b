"""The decision process, compiled: a batch of episodes on one graph, all at the same decision.

A move is simulated where it changes anything. What is observed for a device is as if the current decision's ops were there and all
else as it stands.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baechi_ext.simulate.arrays import Floats, Ints, Problem, Records, State
from baechi_ext.simulate.jit import kernel, part
from baechi_ext.simulate.simulate_kernel import run

SCALES = np.dtype([(name, "f8") for name in ("decision_us", "balanced_us", "mean_speed")], align=True)
SIGHT = np.dtype(
    [(name, "f8") for name in ("ready_us", "in_us", "out_us", "in_here", "out_here", "load_us", "visited_us", "parallel_us", "overlap_us")]
    + [("held_bytes", "f8"), ("readers", "i8")],
    align=True,
)
FEATURES = (
    "here", "speed", "run", "load", "visited_load", "parallel_load", "in_transfers", "out_transfers", "ready", "overlap", "finish",
    "inputs_here", "outputs_here", "memory_with", "peak", "slack", "visited", "devices",
)  # fmt: skip
"""The observations of a device for the current decision; the last three are the same for all devices."""


class World(NamedTuple):
    """The decisions of one graph; never written to."""

    unit: Ints
    """The decision of each op."""
    member_from: Ints
    """By decision, the first of its `members`."""
    members: Ints
    order: Ints
    """All ops in topological order."""
    work_us: Floats
    held_bytes: Floats
    pin: Ints
    """By decision, the device that it has to be on, or -1."""
    parallel: NDArray[np.bool_]
    """By two decisions: whether no path leads from one to the other."""
    scales: Records
    """One record: the mean time of a decision, the total over all speeds, the mean speed."""


class Episodes(NamedTuple):
    """A batch: arrays by episode first."""

    device: Ints
    """By decision."""
    visited: NDArray[np.bool_]
    """By decision, for all episodes alike."""
    start_us: Floats
    """By op, of the plan as it stands."""
    end_us: Floats
    makespan_us: Floats
    excess: Floats
    """The excess of the peaks over the devices' limits, in parts of each limit."""
    peak_bytes: Floats
    best: Ints
    """By decision, the best plan seen since the episode's beginning, and its worth."""
    best_makespan_us: Floats
    best_excess: Floats
    sight: Records
    """By device: scratch."""
    features: NDArray[np.float32]
    """By device and feature."""
    simulated: Ints
    """One number: how many plans have been simulated."""


@kernel
def begin(p: Problem, s: State, w: World, e: Episodes) -> None:
    """Simulates the plans in `device`, where episodes begin; what is pinned goes where it is pinned, and counts as visited."""
    for u in range(len(w.pin)):
        e.visited[u] = w.pin[u] >= 0
        if w.pin[u] >= 0:
            e.device[:, u] = w.pin[u]
    for b in range(len(e.device)):
        e.best_makespan_us[b] = e.best_excess[b] = np.inf
        _simulate(p, s, w, e, b)


@kernel
def act(p: Problem, s: State, w: World, e: Episodes, u: int, actions: NDArray[np.int64]) -> None:
    """Moves decision u, if it is not pinned, in each episode to the device of its action."""
    e.visited[u] = True
    for b in range(len(e.device)):
        if w.pin[u] < 0 and e.device[b, u] != actions[b]:
            e.device[b, u] = actions[b]
            _simulate(p, s, w, e, b)


@part
def _longest_paths_first(p: Problem, s: State, w: World) -> None:
    """The priorities of `trial.longest_placed_path_order`."""
    for i in range(len(w.order) - 1, -1, -1):
        v = w.order[i]
        here, after_us = s.placement[v], 0.0
        for j in range(p.ops[v].outputs_from, p.ops[v + 1].outputs_from):
            t = p.lists[j]
            for reading in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
                reader = p.lists[reading]
                path_us, there = -s.priority[reader], s.placement[reader]
                if there != here:
                    path_us += p.links[here, there].latency_us + p.tensors[t].bytes * p.links[here, there].us_per_byte
                after_us = max(after_us, path_us)
        s.priority[v] = -(p.ops[v].compute_us / p.devices[here].speed + after_us)


@part
def _simulate(p: Problem, s: State, w: World, e: Episodes, b: int) -> None:
    for v in range(len(w.unit)):
        s.placement[v] = e.device[b, w.unit[v]]
    if s.totals[0].has_priority:
        _longest_paths_first(p, s, w)
    e.makespan_us[b] = run(p, s)
    e.simulated[0] += 1
    for v in range(len(w.unit)):
        e.start_us[b, v], e.end_us[b, v] = s.ops[v].start_us, s.ops[v].end_us
    excess = 0.0
    for d in range(len(p.devices)):
        e.peak_bytes[b, d] = s.devices[d].peak_bytes
        if s.devices[d].peak_bytes > p.devices[d].memory_bytes:
            excess += (s.devices[d].peak_bytes - p.devices[d].memory_bytes) / max(1.0, p.devices[d].memory_bytes)
    e.excess[b] = excess
    better = e.makespan_us[b] < e.best_makespan_us[b] if excess == e.best_excess[b] else excess < e.best_excess[b]
    if better:
        e.best_makespan_us[b], e.best_excess[b] = e.makespan_us[b], excess
        for u in range(len(w.work_us)):
            e.best[b, u] = e.device[b, u]


@kernel
def observe(p: Problem, w: World, e: Episodes, u: int) -> None:
    """Writes the features of decision u in each episode."""
    for b in range(len(e.device)):
        for d in range(len(p.devices)):
            sight = e.sight[d]
            sight.ready_us = sight.in_us = sight.out_us = sight.in_here = sight.out_here = 0.0
            sight.load_us = sight.visited_us = sight.parallel_us = sight.overlap_us = sight.held_bytes = 0.0
            sight.readers = 0
        slack_us = e.makespan_us[b]
        for i in range(w.member_from[u], w.member_from[u + 1]):
            _see_inputs(p, w, e, b, w.members[i])
            slack_us = min(slack_us, _see_outputs(p, w, e, b, w.members[i]) - e.end_us[b, w.members[i]])
        _see_loads(p, w, e, b, u)
        _write(p, w, e, b, u, max(0.0, slack_us))


@part
def _see_inputs(p: Problem, w: World, e: Episodes, b: int, v: int) -> None:
    """Works out when the inputs of op v could be on each device, and what their transfers take that no other reader there needs."""
    u, k = w.unit[v], len(p.devices)
    for i in range(p.ops[v].inputs_from, p.ops[v + 1].inputs_from):
        t = p.lists[i]
        producer = p.tensors[t].producer
        if w.unit[producer] == u:
            continue
        home, size = e.device[b, w.unit[producer]], p.tensors[t].bytes
        e.sight[home].in_here += size
        _count_readers(p, w, e, b, t, u)
        for d in range(k):
            transfer_us = p.links[home, d].latency_us + size * p.links[home, d].us_per_byte if d != home else 0.0
            e.sight[d].ready_us = max(e.sight[d].ready_us, e.end_us[b, producer] + transfer_us)
            if e.sight[d].readers == 0:
                e.sight[d].in_us += transfer_us


@part
def _see_outputs(p: Problem, w: World, e: Episodes, b: int, v: int) -> float:
    """Adds what sending the outputs of op v takes from each device; returns when the first of their readers starts."""
    u, k, first_us = w.unit[v], len(p.devices), e.makespan_us[b]
    for i in range(p.ops[v].outputs_from, p.ops[v + 1].outputs_from):
        t = p.lists[i]
        size = p.tensors[t].bytes
        for j in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
            first_us = min(first_us, e.start_us[b, p.lists[j]])
        _count_readers(p, w, e, b, t, u)
        for target in range(k):
            if e.sight[target].readers > 0:
                e.sight[target].out_here += size
                for d in range(k):
                    if d != target:
                        e.sight[d].out_us += p.links[d, target].latency_us + size * p.links[d, target].us_per_byte
    return first_us


@part
def _count_readers(p: Problem, w: World, e: Episodes, b: int, t: int, u: int) -> None:
    """Counts the readers of tensor t on each device, those in decision u left out."""
    for d in range(len(p.devices)):
        e.sight[d].readers = 0
    for j in range(p.tensors[t].readers_from, p.tensors[t + 1].readers_from):
        reader = w.unit[p.lists[j]]
        if reader != u:
            e.sight[e.device[b, reader]].readers += 1


@part
def _see_loads(p: Problem, w: World, e: Episodes, b: int, u: int) -> None:
    """Adds up what the other decisions' ops take on each device: in all, and while decision u could run there."""
    for other in range(len(w.work_us)):
        if other != u:
            d = e.device[b, other]
            run_us = w.work_us[other] / p.devices[d].speed
            e.sight[d].load_us += run_us
            e.sight[d].held_bytes += w.held_bytes[other]
            if e.visited[other]:
                e.sight[d].visited_us += run_us
            if w.parallel[u, other]:
                e.sight[d].parallel_us += run_us
    for v in range(len(w.unit)):
        if w.unit[v] != u:
            d = e.device[b, w.unit[v]]
            since_us = e.sight[d].ready_us
            until_us = since_us + w.work_us[u] / p.devices[d].speed
            e.sight[d].overlap_us += max(0.0, min(until_us, e.end_us[b, v]) - max(since_us, e.start_us[b, v]))


@part
def _write(p: Problem, w: World, e: Episodes, b: int, u: int, slack_us: float) -> None:
    scale, k = w.scales[0], len(p.devices)
    first_us = least_us = np.inf
    inputs = outputs = 1e-9
    for d in range(k):
        sight = e.sight[d]
        first_us = min(first_us, sight.ready_us)
        least_us = min(least_us, sight.ready_us + sight.overlap_us + w.work_us[u] / p.devices[d].speed)
        inputs += sight.in_here
        outputs += sight.out_here
    for d in range(k):
        sight, x, device = e.sight[d], e.features[b, d], p.devices[d]
        run_us = w.work_us[u] / device.speed
        x[0] = e.device[b, u] == d
        x[1] = device.speed / scale.mean_speed - 1.0
        x[2] = np.log1p(run_us / scale.decision_us)
        x[3] = sight.load_us / scale.balanced_us
        x[4] = sight.visited_us / scale.balanced_us
        x[5] = sight.parallel_us / scale.balanced_us
        x[6] = np.log1p(sight.in_us / scale.decision_us)
        x[7] = np.log1p(sight.out_us / scale.decision_us)
        x[8] = np.log1p((sight.ready_us - first_us) / scale.decision_us)
        x[9] = np.log1p(sight.overlap_us / scale.decision_us)
        x[10] = np.log1p((sight.ready_us + sight.overlap_us + run_us - least_us) / scale.decision_us)
        x[11] = sight.in_here / inputs
        x[12] = sight.out_here / outputs
        x[13] = min(2.0, (sight.held_bytes + w.held_bytes[u]) / max(1.0, device.memory_bytes))
        x[14] = min(2.0, e.peak_bytes[b, d] / max(1.0, device.memory_bytes))
        x[15] = np.log1p(slack_us / scale.decision_us)
        x[16] = e.visited[u]
        x[17] = 1.0 / k
