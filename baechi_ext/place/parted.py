"""Plans of steps over parts of a batch: each part on a device of its own, or each stage of the layers, for all parts.

The two ends of what a search moves between: data parallelism, and a pipeline (GPipe: Huang et al., NeurIPS 2019; in the order of
1F1B, Narayanan et al., SOSP 2019, where memory is short: the order that drains tensors first comes to it by itself).
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import best_split, chunks
from baechi_ext.place.common import Proposal, Task
from baechi_ext.place.trial import longest_path_order


def ends_of_parts(task: Task) -> dict[str, Proposal]:
    """Data parallelism and a pipeline as proposals for a graph over parts of a batch."""
    graph, speeds = task.graph, [d.speed for d in task.cluster.devices]
    orders = (None, longest_path_order(task.simulator))
    found = {"data parallel": _data_parallel(graph, speeds), "pipeline": _pipeline(graph, speeds)}
    return {name: Proposal(graph.pinned(placement), orders) for name, placement in found.items()}


def _data_parallel(graph: OpGraph, speeds: Sequence[float]) -> list[int]:
    """Each device computes its share of the parts, in proportion to its speed; parameters, with their updates, live on all devices alike.
    Sums of gradients are made where what they add is."""
    work = _work_of_parts(graph)
    shares = chunks([*work.values()], speeds, [0.0] * len(work), [math.inf] * len(speeds))
    device_of_part = dict(zip(work, shares, strict=True))
    placement = _as_units(graph, [None if op.part is None else device_of_part[op.part] for op in graph.ops])
    held = [0.0] * len(speeds)
    shared = [unit for unit in graph.units() if placement[unit[0]] is None and _persistent_bytes(graph, unit)]
    for unit in sorted(shared, key=lambda unit: -_persistent_bytes(graph, unit)):
        device = min(range(len(held)), key=lambda d: held[d] / speeds[d])
        held[device] += _persistent_bytes(graph, unit)
        for v in unit:
            placement[v] = device
    return _beside_inputs(graph, placement)


def _pipeline(graph: OpGraph, speeds: Sequence[float]) -> list[int]:
    """Stages of layers, one for each device, that take equal time: all parts of an op, its backward ops and its parameters together."""
    layer_of: list[str | None] = [op.name if op.part is not None and op.phase == "forward" else None for op in graph.ops]
    for v, op in enumerate(graph.ops):
        if op.phase == "backward" and op.forward_op in graph.index:
            layer_of[v] = layer_of[graph.index[op.forward_op]]
    work: dict[str, float] = {}
    for v in graph.order:
        if (layer := layer_of[v]) is not None:
            work[layer] = work.get(layer, 0.0) + graph.ops[v].compute_us
    stages = best_split([*work.values()], speeds, [0.0] * len(work), [math.inf] * len(speeds))
    stage_of = dict(zip(work, stages, strict=True))
    placement = _as_units(graph, [None if layer is None else stage_of[layer] for layer in layer_of])
    for unit in graph.units():
        readers = [d for v in unit for w in graph.successors[v] if (d := placement[w]) is not None]
        if placement[unit[0]] is None and readers and _persistent_bytes(graph, unit):
            for v in unit:
                placement[v] = readers[0]
    return _beside_inputs(graph, placement)


def _work_of_parts(graph: OpGraph) -> dict[int, float]:
    """Each part's microseconds, in the order of the parts."""
    work: dict[int, float] = defaultdict(float)
    for op in graph.ops:
        if op.part is not None:
            work[op.part] += op.compute_us
    return dict(sorted(work.items()))


def _as_units(graph: OpGraph, placement: Sequence[int | None]) -> list[int | None]:
    """Gives all that shares a device the first one that any of it has."""
    whole = list(placement)
    for unit in graph.units():
        device = next((d for v in unit if (d := placement[v]) is not None), None)
        for v in unit:
            whole[v] = device
    return whole


def _persistent_bytes(graph: OpGraph, unit: Sequence[int]) -> float:
    return sum(graph.ops[v].persistent_bytes for v in unit)


def _beside_inputs(graph: OpGraph, placement: list[int | None]) -> list[int]:
    """Fills in what has no device: in topological order each unit beside the largest tensor that it reads, else on the first reader's."""
    unit_of = {v: unit for unit in graph.units() for v in unit}
    for v in graph.order:
        if placement[v] is None:
            read = [graph.tensors[t] for t in graph.inputs[v]]
            placed = [(t.bytes, -i, d) for i, t in enumerate(read) if (d := placement[t.producer]) is not None]
            wanted = [d for t in graph.outputs[v] for w in graph.tensors[t].readers if (d := placement[w]) is not None]
            device = max(placed)[2] if placed else wanted[0] if wanted else 0
            for w in unit_of[v]:
                placement[w] = device
    return [d or 0 for d in placement]
