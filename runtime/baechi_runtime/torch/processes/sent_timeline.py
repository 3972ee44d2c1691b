"""A timeline as rank 0 sends it to the ranks that have captured the same graph, and simulate it to the same order."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baechi_ext.errors import ExecutionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import Timeline, simulate


def timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    """The message: placement and order by the ops' numbers, and each op's microseconds and temporary bytes."""
    return {
        "fingerprint": timeline.graph.fingerprint,
        "cluster": timeline.cluster.to_json(),
        "placement": timeline.placement,
        "started": timeline.started,
        "costs": [[op.compute_us, op.temporary_bytes] for op in timeline.graph.ops],
    }


def timeline_from_json(graph: OpGraph, value: Mapping[str, Any]) -> Timeline:
    """The timeline of this rank's graph. Raises ExecutionError where the graph is another one, or is simulated to another order."""
    if value["fingerprint"] != graph.fingerprint:
        raise ExecutionError("this worker captured another graph than rank 0; start all workers with the same flags and versions")
    costs = zip(graph.ops, value["costs"], strict=True)
    graph = graph.replace_ops([replace(op, compute_us=us, temporary_bytes=t) for op, (us, t) in costs])
    rank_of = {v: i for i, v in enumerate(value["started"])}
    timeline = simulate(graph, Cluster.from_json(value["cluster"]), value["placement"], [rank_of[v] for v in range(len(graph))])
    if list(timeline.started) != list(value["started"]):
        raise ExecutionError("this worker simulates the plan in another order than rank 0; are all workers of one version?")
    return timeline
