"""The placers of github.com/beomyeol/baechi (SoCC 2020, for TensorFlow 1.12), called as its train.py calls them.

`get_placer` and `run_placement_algorithm` of placer/placer_lib.py run with

- what they need of TensorFlow, which are flags with their defaults, and a graph that names ops, tensors and colocation groups. The
  modules tensorflow, future and matplotlib are stand-ins; no placer computes with them;
- cvxopt with MOSEK replaced in the one call it is used for, the favourite-child LP: HiGHS solves the same program. Where that has
  several optima, another solver may name other favourite children;
- fused: the flags of its README, --placer_type=fusion --grouper=coplace; else the defaults, --placer_type=default --grouper=tf.

Costs are whole numbers there, at least 1. The unit is the mean op's time over UNITS: rounding changes no cost of a twentieth of the
mean or more by over 0.1%. Memory as it is defined there: persistent bytes are part of an op's outputs (here one more, that nobody
reads), outputs are freed after their last reader; what output_bytes exceeds the tensors by is temporary. The release drops ops
without edges; they go to their group's device, or to the one with the least work.
"""

import inspect
import types
from typing import Any

from baechi_ext.ir import Cluster, OpGraph
from benchmarks.release_support import completed, cvxopt, limits, priorities, put_modules, recorded, unit_us

REPOSITORY = "github.com/beomyeol/baechi"
MODULE = "placer.placer_lib"
PATHS = (".",)
"""Folders of a checkout that its imports begin at."""


class Flags:
    """tf.app.flags: every flag has its default."""

    def __init__(self) -> None:
        self.FLAGS = types.SimpleNamespace()

    def define(self, name: str, default: Any, *_: Any) -> None:
        setattr(self.FLAGS, name, default)

    DEFINE_enum = DEFINE_boolean = DEFINE_bool = DEFINE_float = DEFINE_integer = DEFINE_string = define


def stand_ins() -> None:
    """Makes what the release imports, and is not here, importable."""
    names = ("core", "core.framework", "core.framework.attr_value_pb2", "python", "python.grappler")
    empty = (*(f"tensorflow.{name}" for name in (*names, "python.grappler.cluster", "python.grappler.item")), "future", "matplotlib")
    put_modules({name: {} for name in (*empty, "matplotlib.pyplot")} | cvxopt())
    put_modules({"tensorflow": {"app": types.SimpleNamespace(flags=Flags())}, "future.utils": {"bytes_to_native_str": bytes.decode}})


class Record(types.SimpleNamespace):
    """The parts of a tf.Graph, tf.Operation, tf.Tensor, or of a profile of the release, that the placers ask for."""

    __hash__ = object.__hash__


def converted(graph: OpGraph) -> tuple[Record, dict[str, Record]]:
    """The graph, op v under the name "v", and its costs as the release takes them: units and bytes."""
    port = {t: i for outputs in graph.outputs for i, t in enumerate(outputs)}
    unit = unit_us(graph)
    operations, costs = [], {}
    for v, op in enumerate(graph.ops):
        sizes = [round(graph.tensors[t].bytes) for t in graph.outputs[v]]
        temporary = round(op.temporary_bytes + max(0, op.output_bytes - sum(sizes)))
        kept = [round(op.persistent_bytes)] if op.persistent_bytes else []
        groups = [f"loc:@{v}" if op.colocation is None else f"loc:@group {op.colocation}"]
        operation = Record(name=str(v), type="", control_inputs=(), colocation_groups=lambda groups=groups: [g.encode() for g in groups])
        operation.inputs = [Record(name=f"{graph.tensors[t].producer}:{port[t]}") for t in graph.inputs[v]]
        operation.outputs = [Record(name=f"{v}:{i}") for i in range(len(sizes) + len(kept))]
        operations.append(operation)
        cost = Record(compute_cost=round(op.compute_us / unit), temporary_memory=temporary, persistent_memory=sum(kept))
        cost.output_memory = (*sizes, *kept)
        costs[str(v)] = cost
    return Record(get_operations=lambda: operations), costs


def place(graph: OpGraph, cluster: Cluster, method: str, fused: bool) -> tuple[list[int], list[int]]:
    """Placement, and priorities in the order in which the release commits ops; fused ops one after another in topological order."""
    from placer import m_etf, placer_lib  # the checkout's

    operations, costs = converted(graph)
    link = cluster.link(0, len(cluster) - 1)
    committed = recorded(m_etf.ETFDevice)
    exact = {"cost_factor": 1.0} if "cost_factor" in inspect.signature(placer_lib.get_placer).parameters else {}
    placer = placer_lib.get_placer(
        operations,
        [{"name": f"/device:GPU:{i}", "memory_size": limit, "type": "GPU"} for i, limit in enumerate(limits(cluster))],
        (link.us_per_byte / unit_us(graph), link.latency_us / unit_us(graph)),
        placement_method=method,
        placer_type="fusion" if fused else "default",
        cost_dict=costs,
        grouper="coplace" if fused else "tf",
        **exact,  # its branch "perturbation" changes costs by lot otherwise
    )
    placer.run_placement_algorithm()
    found = {int(name): placer.op_graph.nodes[op_id]["p"] for name, op_id in placer.op_index.items()}
    return completed(graph, len(cluster), found), priorities(graph, committed)
