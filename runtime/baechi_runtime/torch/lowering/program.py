"""Static device programs, cut from one simulated timeline: what each device runs, sends, receives and frees, in which order.

All programs follow one global order, the order of starts in the timeline, which is topological; so whatever a device waits for has
been started before by a device that does not wait for it, and no set of programs can block itself.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baechi_ext.capture.torch_joint import ORDER
from baechi_ext.ir.op_graph import Tensor
from baechi_ext.simulate import Timeline


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


def moves_nothing(tensor: Tensor) -> bool:
    """True for a tensor whose readers only wait."""
    return tensor.bytes == 0 and tensor.name == ORDER


def cut(timeline: Timeline, started: Sequence[int] | None = None) -> tuple[DeviceProgram, ...]:
    """One program per device, in the timeline's order of starts or another topological one. A tensor is sent right after its op, most
    urgent reader first, received before its first reader there, and freed after its last use on each device."""
    graph, placement = timeline.graph, timeline.placement
    started = timeline.started if started is None else started
    rank = {v: i for i, v in enumerate(started)}
    programs: list[list[Instruction]] = [[] for _ in timeline.cluster.devices]
    held: list[set[int]] = [set() for _ in programs]
    uses = Counter((t, placement[v]) for v, read in enumerate(graph.inputs) for t in read)

    def use(tensor: int, device: int) -> None:
        uses[tensor, device] -= 1
        if uses[tensor, device] == 0:
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
        program.extend(Free(t) for t in graph.outputs[v] if (t, device) not in uses)
    return tuple(map(tuple, programs))


def in_phases(timeline: Timeline, phases: Sequence[Collection[int]]) -> list[tuple[DeviceProgram, ...]]:
    """For each phase its program on every device. The phases 2 k and 2 k + 1 are a fragment's two passes, and are run in the order of the
    timeline, each on what the fragment's first one left behind.

    What a phase computes is received in it, wherever in its fragment it is read, so that nothing is on its way between phases. What goes
    from one fragment to another one is handed over by the caller, and an order that crosses devices is kept by the phases: for neither
    anything is sent.
    """
    phase_of = {v: p for p, ops in enumerate(phases) for v in ops}
    graph, placement = timeline.graph, timeline.placement
    begun = sorted(range(len(phases)), key=lambda p: min((timeline.rank[v] for v in phases[p]), default=-1))
    parted = [v for p in begun for v in timeline.started if phase_of[v] == p]
    cut_up: list[list[list[Instruction]]] = [[[] for _ in timeline.cluster.devices] for _ in phases]

    def stays_within(tensor: int, target: int) -> bool:
        fragment = phase_of[graph.tensors[tensor].producer] // 2
        return any(placement[r] == target and phase_of[r] // 2 == fragment for r in graph.tensors[tensor].readers)

    for device, program in enumerate(cut(timeline, parted)):
        current = 0
        for instruction in program:
            if isinstance(instruction, Run):
                current = phase_of[instruction.op]
            if isinstance(instruction, (Send, Receive)):
                tensor = graph.tensors[instruction.tensor]
                target = instruction.target if isinstance(instruction, Send) else device
                if moves_nothing(tensor) or not stays_within(instruction.tensor, target):
                    continue
                cut_up[phase_of[tensor.producer]][device].append(instruction)
            else:
                cut_up[current][device].append(instruction)
    return [tuple(map(tuple, programs)) for programs in cut_up]
