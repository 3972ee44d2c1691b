"""Support for running the released code of Baechi, whichever of the two it is."""

import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from baechi_ext.ir import Cluster, OpGraph

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
