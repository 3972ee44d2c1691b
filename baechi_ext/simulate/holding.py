"""What a device has to hold at the least, whatever the plan: the memory side of proofs."""

from collections.abc import Sequence

from baechi_ext.ir.op_graph import OpGraph

_INSTANT_US = 1e-3
"""Late in a long step a shorter op may start and end at the same floating-point time, and an instant's bytes are not charged."""


def minimal_bytes(graph: OpGraph, members: Sequence[int]) -> float:
    """What a device holds at the least at one instant if it runs `members`, in bytes.

    Their persistent bytes, and while the neediest of them runs its inputs, outputs and temporaries.
    """
    return sum(graph.ops[v].persistent_bytes for v in members) + max(live_bytes(graph, v) for v in members)


def live_bytes(graph: OpGraph, v: int) -> float:
    """Bytes that the device of op v holds while v runs, persistent ones left out; 0 for an op that takes no time."""
    op = graph.ops[v]
    if op.compute_us < _INSTANT_US:
        return 0
    outputs = sum(graph.tensors[t].bytes for t in graph.outputs[v])
    inputs = sum(graph.tensors[t].bytes for t in graph.inputs[v])
    return inputs + max(outputs, op.output_bytes) + op.temporary_bytes
