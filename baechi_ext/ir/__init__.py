"""The values that stages hand over, each also a JSON file: OpGraph, Cluster, Plan."""

from baechi_ext.ir.cluster import Cluster, Device, Link
from baechi_ext.ir.op_graph import Op, OpGraph, Tensor
from baechi_ext.ir.plan import Plan

__all__ = ["Cluster", "Device", "Link", "Op", "OpGraph", "Plan", "Tensor"]
