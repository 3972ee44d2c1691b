"""Places one graph with the released code of Baechi, in a process of its own.

    python -m benchmarks.release {baechi,baechi_torch} CHECKOUT GRAPH.json --cluster=CLUSTER.json --method=m_etf [--fused]

Prints {"placement": ..., "priority": ..., "seconds": ...}, in the graph's order. Where an assertion of the release fails, which is
how it ends where memory runs out, it prints {"status": "unknown", "error": ...}, with exit code 1. Nothing of the release is copied
here. cvxopt with MOSEK is replaced in the one call it is used for, the favourite-child LP: HiGHS solves the same program. Where that
has several optima, another solver may name other favourite children.

baechi: the placers of github.com/beomyeol/baechi (SoCC 2020, for TensorFlow 1.12), called as its train.py calls them. `get_placer` and
`run_placement_algorithm` of placer/placer_lib.py run with

- what they need of TensorFlow, which are flags with their defaults, and a graph that names ops, tensors and colocation groups. The
  modules tensorflow, future and matplotlib are stand-ins; no placer computes with them;
- fused: the flags of its README, --placer_type=fusion --grouper=coplace; else the defaults, --placer_type=default --grouper=tf.

Costs are whole numbers there, at least 1. The unit is the mean op's time over UNITS: rounding changes no cost of a twentieth of the
mean or more by over 0.1%. Memory as it is defined there: persistent bytes are part of an op's outputs (here one more, that nobody
reads), outputs are freed after their last reader; what output_bytes exceeds the tensors by is temporary. The release drops ops
without edges; they go to their group's device, or to the one with the least work.

baechi_torch: the placers of github.com/chiragcshetty/BaechiPyTorch, called as its main_baechi.py calls them: m_etf and m_sct of
baechi_core/placer run on the graph that baechi_graph.py would make. That graph has an op a module, one tensor an edge, received once by
each reader, and transfers that never wait for each other. It has no colocation groups and no fusion. An op keeps its parameters and its
outputs to the end (`permanent_mem`), since a backward pass will need them: on a graph that has the backward ops itself this asks for
more than the step needs.
"""

import importlib
import inspect
import json
import logging
import resource
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from baechi_ext.ir import Cluster, OpGraph
from benchmarks.runner import parsed

CPU_SECONDS = 120
"""Until SIGXCPU."""
UNITS = 10_000
"""Units in the mean op's time."""
UNLIMITED = 2**62
"""Bytes of a device without a limit."""


def unit_us(graph: OpGraph) -> float:
    return graph.total_compute_us() / len(graph) / UNITS or 1.0


def limits(cluster: Cluster) -> list[int]:
    """Bytes that each device holds."""
    return [UNLIMITED if d.memory_bytes is None else int(d.memory_bytes) for d in cluster.devices]


def put_modules(contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes modules of these names and attributes importable."""
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


def cvxopt() -> dict[str, Mapping[str, Any]]:
    """The one call of cvxopt that the placers make, for `put_modules`."""
    solvers = types.SimpleNamespace(lp=solve_lp)
    return {"cvxopt": {"matrix": list, "spmatrix": lambda *parts: parts, "solvers": solvers}}


def solve_lp(objective: Sequence[float], left: Sequence[Sequence[float]], right: Sequence[float], solver: str) -> dict[str, list[float]]:
    """cvxopt.solvers.lp: the least objective * x with left * x <= right, where `left` is given as values, rows and columns."""
    import highspy

    values, rows, columns = (np.asarray(part) for part in left)
    by_row = np.argsort(rows, kind="stable")
    count, free = len(objective), np.full(len(objective), highspy.kHighsInf)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.addVars(count, -free, free)
    highs.changeColsCost(count, np.arange(count, dtype=np.int32), np.asarray(objective, float))
    bounds = np.full(len(right), -highspy.kHighsInf), np.asarray(right, float)
    starts = np.searchsorted(rows[by_row], np.arange(len(right))).astype(np.int32)
    highs.addRows(len(right), *bounds, len(values), starts, columns[by_row].astype(np.int32), values[by_row].astype(float))
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS instead of {solver}: {highs.modelStatusToString(highs.getModelStatus())}")
    return {"x": list(highs.getSolution().col_value)}


def recorded(device: Any) -> list[tuple[str, ...]]:
    """The names of the ops that each later `run_op` of the placer's devices runs; several where they are fused."""
    committed: list[tuple[str, ...]] = []
    run_op = device.run_op

    def run_and_record(self: Any, op_id: int) -> None:
        data = self._op_graph.nodes[op_id]
        committed.append((data["name"], *(fused["name"] for fused in data.get("fused_ops", ()))))
        run_op(self, op_id)

    device.run_op = run_and_record
    return committed


def priorities(graph: OpGraph, committed: Sequence[Sequence[str]]) -> list[int]:
    """Each op's place in the order of commits; ops committed together in topological order, ops that were not last. Op v's name is "v"."""
    rank = {int(name): i for i, names in enumerate(committed) for name in names}
    priority = [0] * len(graph)
    for i, v in enumerate(sorted(graph.order, key=lambda v: rank.get(v, len(graph)))):
        priority[v] = i
    return priority


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


# Baechi for TensorFlow


class Flags:
    """tf.app.flags: every flag has its default."""

    def __init__(self) -> None:
        self.FLAGS = types.SimpleNamespace()

    def define(self, name: str, default: Any, *_: Any) -> None:
        setattr(self.FLAGS, name, default)

    DEFINE_enum = DEFINE_boolean = DEFINE_bool = DEFINE_float = DEFINE_integer = DEFINE_string = define


def tensorflow() -> dict[str, Mapping[str, Any]]:
    """The modules that the placers import, for `put_modules`."""
    names = ("core", "core.framework", "core.framework.attr_value_pb2", "python", "python.grappler")
    empty = (*(f"tensorflow.{name}" for name in (*names, "python.grappler.cluster", "python.grappler.item")), "future", "matplotlib")
    used = {"tensorflow": {"app": types.SimpleNamespace(flags=Flags())}, "future.utils": {"bytes_to_native_str": bytes.decode}}
    return {name: {} for name in (*empty, "matplotlib.pyplot")} | used


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


def place_by_baechi(graph: OpGraph, cluster: Cluster, method: str, fused: bool) -> tuple[list[int], list[int]]:
    """Placement, and priorities in the order in which the release commits ops; fused ops one after another in topological order."""
    from placer import m_etf, placer_lib  # type: ignore[import-not-found]  # the checkout's

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


# BaechiPyTorch


def place_by_baechi_torch(graph: OpGraph, cluster: Cluster, method: str, fused: bool) -> tuple[list[int], list[int]]:
    """Placement, and priorities in the order in which the release commits ops. Raises ValueError on what it cannot express."""
    from placer import m_etf, m_sct  # the checkout's

    if fused or graph.groups:
        raise ValueError("BaechiPyTorch has neither colocation groups nor fusion")
    committed = recorded(m_etf.ETFDevice)
    placed = {"m_etf": m_etf.m_etf, "m_sct": m_sct.m_sct}[method](module_graph(graph, cluster), device_graph(cluster))
    return completed(graph, len(cluster), dict(placed.nodes(data="p"))), priorities(graph, committed)


def module_graph(graph: OpGraph, cluster: Cluster) -> nx.DiGraph:
    """The graph as baechi_graph.build_graph makes it; times in microseconds, at least one unit: an op of no time would block it."""
    link = cluster.link(0, len(cluster) - 1)
    found = nx.DiGraph()
    for v, op in enumerate(graph.ops):
        outputs = sum(graph.tensors[t].bytes for t in graph.outputs[v])
        permanent = op.persistent_bytes + outputs
        temporary = op.temporary_bytes + max(0, op.output_bytes - outputs)
        memory = {"permanent_mem": permanent, "temporary_mem": temporary, "peak_mem": permanent + temporary, "output_mem": outputs}
        times = {"weight": max(op.compute_us, unit_us(graph)), "topo_order": None}
        found.add_node(v, id=v, name=str(v), parameter_mem=op.persistent_bytes, **memory, **times)
    sizes: dict[tuple[int, int], list[float]] = {}
    for tensor in graph.tensors:
        for reader in tensor.readers:
            sizes.setdefault((tensor.producer, reader), []).append(tensor.bytes)
    for i, ((u, v), parts) in enumerate(sizes.items()):
        transfer_us = sum(map(link.transfer_us, parts))
        found.add_edge(u, v, id=i, weight=transfer_us, tensor={"name": str(i), "transfer_time": transfer_us, "bytes": sum(parts)})
    return found


def device_graph(cluster: Cluster) -> nx.Graph:
    """The devices as baechi_graph.create_device_graph makes them."""
    found = nx.complete_graph(len(cluster))
    for i, limit in enumerate(limits(cluster)):
        found.nodes[i].update(id=i, name=cluster.devices[i].name, used_mem=0, peak_mem=0, memory_limit=limit)
    return found


@dataclass(frozen=True)
class Release:
    """A release: where its placers are, and how they are called."""

    repository: str
    module: str
    paths: tuple[str, ...]
    """Folders of a checkout that its imports begin at."""
    stand_ins: Callable[[], Mapping[str, Mapping[str, Any]]]
    """Stand-ins for what it imports, and is not here."""
    place: Callable[[OpGraph, Cluster, str, bool], tuple[list[int], list[int]]]


RELEASES = {
    "baechi": Release("github.com/beomyeol/baechi", "placer.placer_lib", (".",), lambda: tensorflow() | cvxopt(), place_by_baechi),
    "baechi_torch": Release("github.com/chiragcshetty/BaechiPyTorch", "placer.m_sct", (".", "baechi_core"), cvxopt, place_by_baechi_torch),
}


def require_checkout(name: str, folder: Path) -> None:
    """Raises SystemExit where the placers are not there."""
    release = RELEASES[name]
    file = Path(release.paths[-1], *release.module.split(".")).with_suffix(".py")
    if not (folder / file).is_file():
        raise SystemExit(f"error: {folder} has no {file}; give --{name} the folder of a checkout of {release.repository}")


FLAGS = {
    "release": {"choices": tuple(RELEASES)},
    "checkout": {"type": Path},
    "graph": {"type": Path},
    "--cluster": {"type": Path, "required": True},
    "--method": {"choices": ("m_etf", "m_sct"), "required": True},
    "--fused": {"action": "store_true"},
}


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(__doc__, FLAGS, argv)
    require_checkout(args.release, args.checkout)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    graph, cluster = OpGraph.load(args.graph), Cluster.load(args.cluster)
    release = RELEASES[args.release]
    put_modules(release.stand_ins())
    sys.path[:0] = [str(args.checkout / path) for path in release.paths]
    logging.disable()
    importlib.import_module(release.module)
    begin = time.perf_counter()
    try:
        placement, priority = release.place(graph, cluster, args.method, args.fused)
    except AssertionError as e:
        print(json.dumps({"status": "unknown", "error": f"an assertion of the release failed: {e}"}))
        sys.exit(1)
    print(json.dumps({"placement": placement, "priority": priority, "seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
