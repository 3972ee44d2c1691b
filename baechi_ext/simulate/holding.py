"""What a device has to hold at the least, whatever the plan: the memory side of proofs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baechi_ext.ir.op_graph import OpGraph

if TYPE_CHECKING:
    from baechi_ext.ir.columns import Floats

_INSTANT_US = 1e-3
"""Late in a long step a shorter op may start and end at the same floating-point time, and an instant's bytes are not charged."""


def minimal_bytes(graph: OpGraph, members: Sequence[int], live: Sequence[float]) -> float:
    """What a device holds at the least at one instant if it runs `members`, in bytes; `live` are the graph's `live_bytes`.

    Their persistent bytes, and while the neediest of them runs its inputs, outputs and temporaries.
    """
    return sum(graph.ops[v].persistent_bytes for v in members) + max(live[v] for v in members)


def live_bytes(graph: OpGraph) -> "Floats":
    """For each op v, bytes that its device holds while v runs, persistent ones left out; 0 for an op that takes no time."""
    live = graph.columns.live_bytes()
    live[graph.columns.compute_us < _INSTANT_US] = 0
    return live
