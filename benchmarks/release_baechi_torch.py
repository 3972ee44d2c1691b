"""The placers of github.com/chiragcshetty/BaechiPyTorch, called as its main_baechi.py calls them.

m_etf and m_sct of baechi_core/placer run on the graph that baechi_graph.py would make; MOSEK is replaced as for the TensorFlow
release. That graph has an op a module, one tensor an edge, received once by each reader, and transfers that never wait for each
other. It has no colocation groups and no fusion. An op keeps its parameters and its outputs to the end (`permanent_mem`), since a
backward pass will need them: on a graph that has the backward ops itself this asks for more than the step needs.
"""

import networkx as nx

from baechi_ext.ir import Cluster, OpGraph
from benchmarks.release_support import completed, cvxopt, limits, priorities, put_modules, recorded, unit_us

REPOSITORY = "github.com/chiragcshetty/BaechiPyTorch"
MODULE = "placer.m_sct"
PATHS = (".", "baechi_core")
"""Folders of a checkout that its imports begin at."""


def stand_ins() -> None:
    """Makes what the release imports, and is not here, importable."""
    put_modules(cvxopt())


def place(graph: OpGraph, cluster: Cluster, method: str, fused: bool) -> tuple[list[int], list[int]]:
    """Placement, and priorities in the order in which the release commits ops. Raises ValueError on what it cannot express."""
    from placer import m_etf, m_sct  # the checkout's

    if fused or graph.groups:
        raise ValueError("BaechiPyTorch has neither colocation groups nor fusion")
    committed = recorded(m_etf.ETFDevice)
    placed = {"m_etf": m_etf.m_etf, "m_sct": m_sct.m_sct}[method](converted(graph, cluster), devices(cluster))
    return completed(graph, len(cluster), dict(placed.nodes(data="p"))), priorities(graph, committed)


def converted(graph: OpGraph, cluster: Cluster) -> nx.DiGraph:
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


def devices(cluster: Cluster) -> nx.Graph:
    """The devices as baechi_graph.create_device_graph makes them."""
    found = nx.complete_graph(len(cluster))
    for i, limit in enumerate(limits(cluster)):
        found.nodes[i].update(id=i, name=cluster.devices[i].name, used_mem=0, peak_mem=0, memory_limit=limit)
    return found
