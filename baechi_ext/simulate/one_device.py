"""The timeline of a step that is not split."""

from baechi_ext.ir.cluster import Cluster, Device
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.simulate.simulator import simulate
from baechi_ext.simulate.timeline import Timeline


def one_device_timeline(graph: OpGraph, speed: float = 1.0) -> Timeline:
    """The whole step on one device of this speed, in the captured order."""
    rank = [0] * len(graph)
    for position, v in enumerate(graph.order):
        rank[v] = position
    captured = list(range(len(graph)))
    in_file_order = all(graph.tensors[t].producer < v for v in captured for t in graph.inputs[v])
    return simulate(graph, Cluster((Device("device:0", speed=speed),)), [0] * len(graph), captured if in_file_order else rank)
