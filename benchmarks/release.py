"""Places one graph with the released code of Baechi (SoCC 2020, github.com/beomyeol/baechi), in a process of its own.

    python -m benchmarks.release CHECKOUT GRAPH.json --cluster=CLUSTER.json --method=m_etf [--fused]

Prints {"placement": ..., "priority": ..., "seconds": ...}, in the graph's order, or {"status": "unknown", "error": ...} and exit code 1
where an assertion of the release fails, which is how it ends where memory runs out. Nothing of it is copied here: `get_placer` and
`run_placement_algorithm` of placer/placer_lib.py are called as its train.py calls them, with

- what its placers need of TensorFlow 1.12, which are flags with their defaults, and a graph that names ops, tensors and colocation
  groups. tensorflow, future and matplotlib are stand-ins here; no placer computes with them;
- cvxopt with MOSEK replaced in the one call it is used for, the favourite-child LP: HiGHS solves the same program. Where it has
  several optima, the other solver may name other favourite children;
- `--fused` for the flags of its README, --placer_type=fusion --grouper=coplace; else the defaults, --placer_type=default --grouper=tf.

Costs are whole numbers there, at least 1. The unit is the mean op's time over UNITS: rounding changes no cost of a twentieth of the
mean or more by over 0.1%. Memory as it is defined there: persistent bytes are part of an op's outputs (here one more, that nobody
reads), outputs are freed after their last reader; what output_bytes exceeds the tensors by is temporary. The release drops ops
without edges; they go to their group's device, or to the one with the least work.
"""

import argparse
import importlib
import json
import resource
import sys
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baechi_ext.ir import Cluster, OpGraph

LIBRARY = "placer/placer_lib.py"
UNITS = 10_000
UNLIMITED = 2**62
"""Bytes of a device without a limit."""


class Flags:
    """tf.app.flags: every flag has its default."""

    def __init__(self) -> None:
        self.FLAGS = types.SimpleNamespace()

    def define(self, name: str, default: Any, *_: Any) -> None:
        setattr(self.FLAGS, name, default)

    DEFINE_enum = DEFINE_boolean = DEFINE_bool = DEFINE_float = DEFINE_integer = DEFINE_string = define


def solve_lp(objective: Sequence[float], left: Sequence[Sequence[float]], right: Sequence[float], solver: str) -> dict[str, list[float]]:
    """cvxopt.solvers.lp: the least objective * x with left * x <= right, where `left` is given as values, rows and columns."""
    import highspy

    values, rows, columns = (np.asarray(part) for part in left)
    by_column = np.argsort(columns, kind="stable")
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(objective), len(right)
    model.col_cost_ = np.asarray(objective, float)
    model.col_lower_, model.col_upper_ = np.full(len(objective), -np.inf), np.full(len(objective), np.inf)
    model.row_lower_, model.row_upper_ = np.full(len(right), -np.inf), np.asarray(right, float)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.searchsorted(columns[by_column], np.arange(len(objective) + 1)).astype(np.int32)
    model.a_matrix_.index_ = rows[by_column].astype(np.int32)
    model.a_matrix_.value_ = values[by_column].astype(float)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(model)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS instead of {solver}: {highs.modelStatusToString(highs.getModelStatus())}")
    return {"x": list(highs.getSolution().col_value)}


def stand_ins() -> None:
    """Puts what the release imports, and is not here, into sys.modules."""
    contents: dict[str, dict[str, Any]] = {
        "tensorflow": {"app": types.SimpleNamespace(flags=Flags())},
        "tensorflow.core": {},
        "tensorflow.core.framework": {},
        "tensorflow.core.framework.attr_value_pb2": {},
        "tensorflow.python": {},
        "tensorflow.python.grappler": {},
        "tensorflow.python.grappler.cluster": {},
        "tensorflow.python.grappler.item": {},
        "future": {},
        "future.utils": {"bytes_to_native_str": bytes.decode},
        "matplotlib": {},
        "matplotlib.pyplot": {},
        "cvxopt": {"matrix": list, "spmatrix": lambda *parts: parts, "solvers": types.SimpleNamespace(lp=solve_lp)},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


@dataclass(frozen=True)
class Named:
    """A tensor: "producer:port"."""

    name: str


@dataclass(frozen=True)
class Operation:
    """What the placers ask of a tf.Operation."""

    name: str
    inputs: tuple[Named, ...]
    outputs: tuple[Named, ...]
    group: str
    type: str = ""
    control_inputs: tuple[Named, ...] = ()

    def colocation_groups(self) -> list[bytes]:
        return [f"loc:@{self.group}".encode()]


@dataclass(frozen=True)
class Cost:
    """What its profiler finds out about an op: units and bytes."""

    compute_cost: int
    output_memory: tuple[int, ...]
    temporary_memory: int
    persistent_memory: int


@dataclass(frozen=True)
class Operations:
    """A tf.Graph, op v of the graph under the name "v"."""

    operations: tuple[Operation, ...]

    def get_operations(self) -> tuple[Operation, ...]:
        return self.operations


def converted(graph: OpGraph, unit_us: float) -> tuple[Operations, dict[str, Cost]]:
    """The graph and its costs as the release takes them."""
    port = {t: i for outputs in graph.outputs for i, t in enumerate(outputs)}
    operations, costs = [], {}
    for v, op in enumerate(graph.ops):
        sizes = [round(graph.tensors[t].bytes) for t in graph.outputs[v]]
        temporary = round(op.temporary_bytes + max(0, op.output_bytes - sum(sizes)))
        kept = [round(op.persistent_bytes)] if op.persistent_bytes else []
        operations.append(
            Operation(
                name=str(v),
                inputs=tuple(Named(f"{graph.tensors[t].producer}:{port[t]}") for t in graph.inputs[v]),
                outputs=tuple(Named(f"{v}:{i}") for i in range(len(sizes) + len(kept))),
                group=str(v) if op.colocation is None else f"group {op.colocation}",
            )
        )
        costs[str(v)] = Cost(round(op.compute_us / unit_us), (*sizes, *kept), temporary, sum(kept))
    return Operations(tuple(operations)), costs


def recorded(device: type) -> list[tuple[str, ...]]:
    """The names of the ops that each later `run_op` of the placer's devices runs; several where they are fused."""
    committed: list[tuple[str, ...]] = []
    run_op = device.run_op

    def run_and_record(self: Any, op_id: int) -> None:
        data = self._op_graph.nodes[op_id]
        committed.append((data["name"], *(fused["name"] for fused in data.get("fused_ops", ()))))
        run_op(self, op_id)

    device.run_op = run_and_record
    return committed


def place(graph: OpGraph, cluster: Cluster, method: str, fused: bool) -> tuple[list[int], list[int]]:
    """Placement, and priorities in the order in which the release commits ops; fused ops one after another in topological order."""
    from placer import m_etf, placer_lib  # of the checkout

    unit_us = graph.total_compute_us() / len(graph) / UNITS or 1.0
    operations, costs = converted(graph, unit_us)
    link = cluster.link(0, min(1, len(cluster) - 1))
    limits = [UNLIMITED if d.memory_bytes is None else int(d.memory_bytes) for d in cluster.devices]
    committed = recorded(m_etf.ETFDevice)
    placer = placer_lib.get_placer(
        operations,
        [{"name": f"/device:GPU:{i}", "memory_size": limit, "type": "GPU"} for i, limit in enumerate(limits)],
        (link.us_per_byte / unit_us, link.latency_us / unit_us),
        placement_method=method,
        placer_type="fusion" if fused else "default",
        cost_dict=costs,
        grouper="coplace" if fused else "tf",
        cost_factor=1.0,
    )
    placer.run_placement_algorithm()
    found = {int(name): placer.op_graph.nodes[op_id]["p"] for name, op_id in placer.op_index.items()}
    rank = {int(name): i for i, names in enumerate(committed) for name in names}
    priority = [0] * len(graph)
    for i, v in enumerate(sorted(graph.order, key=lambda v: rank.get(v, len(graph)))):
        priority[v] = i
    return completed(graph, len(cluster), found), priority


def completed(graph: OpGraph, num_devices: int, found: dict[int, int]) -> list[int]:
    """A device for every op: where `found` has none, its group's, else the one with the least work so far."""
    load_us = [0.0] * num_devices
    devices = {}
    for v, device in found.items():
        load_us[device] += graph.ops[v].compute_us
        devices[graph.ops[v].colocation] = device
    placement = []
    for v, op in enumerate(graph.ops):
        device = found.get(v)
        if device is None:
            least = min(range(num_devices), key=load_us.__getitem__)
            device = least if op.colocation is None else devices.setdefault(op.colocation, least)
            load_us[device] += op.compute_us
        placement.append(device)
    return placement


def require_checkout(folder: Path) -> None:
    """Raises SystemExit where the placers are not there."""
    if not (folder / LIBRARY).is_file():
        raise SystemExit(f"error: {folder} has no {LIBRARY}; name the folder of a checkout of github.com/beomyeol/baechi")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--cluster", type=Path, required=True)
    parser.add_argument("--method", choices=("m_etf", "m_sct"), required=True)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--cpu_limit", type=int, default=120, help="CPU seconds until SIGXCPU (default %(default)s)")
    args = parser.parse_args(argv)
    require_checkout(args.checkout)
    resource.setrlimit(resource.RLIMIT_CPU, (args.cpu_limit, args.cpu_limit + 1))
    graph, cluster = OpGraph.load(args.graph), Cluster.load(args.cluster)
    stand_ins()
    sys.path.insert(0, str(args.checkout))
    importlib.import_module("placer.placer_lib")
    begin = time.perf_counter()
    try:
        placement, priority = place(graph, cluster, args.method, args.fused)
    except AssertionError as e:
        print(json.dumps({"status": "unknown", "error": f"an assertion of the release failed: {e}"}))
        sys.exit(1)
    print(json.dumps({"placement": placement, "priority": priority, "seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
