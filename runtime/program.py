"""Static device programs, cut from one simulated timeline: what each device runs, sends, receives and frees, in which order.

All programs follow one global order, the order of starts in the timeline, which is topological; so whatever a device waits for has
been started before by a device that does not wait for it, and no set of programs can block itself.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baechi_ext.capture.torch_joint import ORDER
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True)
class Run:
    op: int


@dataclass(frozen=True, slots=True)
class Send:
    tensor: int
    target: int


@dataclass(frozen=True, slots=True)
class Receive:
    tensor: int
    source: int


@dataclass(frozen=True, slots=True)
class Free:
    tensor: int


Instruction = Run | Send | Receive | Free
DeviceProgram = tuple[Instruction, ...]


def one_device_timeline(graph: OpGraph) -> Timeline:
    """The whole step on one device, in the captured order."""
    rank = [0] * len(graph)
    for position, v in enumerate(graph.order):
        rank[v] = position
    captured = list(range(len(graph)))
    in_file_order = all(graph.tensors[t].producer < v for v in captured for t in graph.inputs[v])
    return simulate(graph, Cluster.uniform(1), [0] * len(graph), captured if in_file_order else rank)


def cut(timeline: Timeline, started: Sequence[int] | None = None) -> tuple[DeviceProgram, ...]:
    """One program per device, in the timeline's order of starts or another topological one. A tensor is sent right after its op, most
    urgent reader first, received before its first reader there, and freed after its last use on each device."""
    graph, placement = timeline.graph, timeline.placement
    started = timeline.started if started is None else started
    rank = {v: i for i, v in enumerate(started)}
    programs: list[list[Instruction]] = [[] for _ in timeline.cluster.devices]
    held: list[set[int]] = [set() for _ in programs]
    uses = [_local_uses(timeline, device) for device in range(len(programs))]

    def use(tensor: int, device: int) -> None:
        uses[device][tensor] -= 1
        if uses[device][tensor] == 0:
            programs[device].append(Free(tensor))

    for v in started:
        device = placement[v]
        program = programs[device]
        for t in graph.inputs[v]:
            source = placement[graph.tensors[t].producer]
            if source != device and t not in held[device]:
                held[device].add(t)
                program.append(Receive(t, source))
        program.append(Run(v))
        for t in graph.inputs[v]:
            use(t, device)
        sends = []
        for t in graph.outputs[v]:
            first: dict[int, int] = {}
            for w in graph.tensors[t].readers:
                first[placement[w]] = min(rank[w], first.get(placement[w], rank[w]))
            sends += [(r, t, target) for target, r in first.items() if target != device]
        program.extend(Send(t, target) for _, t, target in sorted(sends))
        program.extend(Free(t) for t in graph.outputs[v] if t not in uses[device])
    return tuple(map(tuple, programs))


def in_two_phases(timeline: Timeline, forward: Collection[int]) -> list[tuple[DeviceProgram, DeviceProgram]]:
    """For each device its programs of the ops in `forward` and of all others, which are run later, on what the first left behind.

    No other op may come before one of `forward`. What the first phase computes is received in it, wherever it is read, so that nothing
    is on its way between the phases. An order that crosses devices is kept by the phases and moves nothing.
    """
    started = timeline.started
    parted = [v for v in started if v in forward] + [v for v in started if v not in forward]
    phases = []
    tensors = timeline.graph.tensors
    for program in cut(timeline, parted):
        first: list[Instruction] = []
        later: list[Instruction] = []
        current = first
        for instruction in program:
            if isinstance(instruction, Run):
                current = first if instruction.op in forward else later
            if isinstance(instruction, (Send, Receive)):
                tensor = tensors[instruction.tensor]
                if tensor.bytes == 0 and tensor.name == ORDER:
                    continue
                (first if tensor.producer in forward else later).append(instruction)
            else:
                current.append(instruction)
        phases.append((tuple(first), tuple(later)))
    return phases


def _local_uses(timeline: Timeline, device: int) -> dict[int, int]:
    """Tensor -> how many ops on `device` read it; tensors without a reader there are left out."""
    counts: dict[int, int] = {}
    for v, d in enumerate(timeline.placement):
        if d == device:
            for t in timeline.graph.inputs[v]:
                counts[t] = counts.get(t, 0) + 1
    return counts
