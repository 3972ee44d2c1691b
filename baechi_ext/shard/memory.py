"""What a strategy holds on each device: parameters, their gradients and optimizer state, and activations kept for the backward pass."""

from collections.abc import Iterable
from math import prod

import numpy as np

from baechi_ext.shard.graph import Node, Tensor
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.space import Configurations
from baechi_ext.shard.tables import Tables

_VIEWS = ("unstack", "ravel", "unravel", "view")
"""What these write is what they read, seen otherwise."""


def node_bytes(node: Node, space: Configurations, machine: Machine) -> Costs:
    """Bytes that a node holds on a device, for each configuration. Devices that a configuration leaves over hold copies."""
    held = (2.0 + machine.optimizer_words) * _words(node.weights, space)
    if node.op not in _VIEWS:
        held = held + _words(node.outputs, space)
    return machine.word_bytes * held


def _words(tensors: Iterable[Tensor], space: Configurations) -> Costs:
    words = np.zeros(len(space))
    for tensor in tensors:
        axes = [a for dim in tensor.axes for a in dim]
        words += prod(tensor.shape) / space[:, axes].prod(axis=1)
    return words


def bytes_of(tables: Tables, choice: Iterable[int]) -> float:
    """What a strategy holds on each device in bytes; `choice[v]` is the index of node v's configuration."""
    triples = zip(tables.graph.nodes, tables.spaces, choice, strict=True)
    return sum(float(node_bytes(node, space[c : c + 1], tables.machine)[0]) for node, space, c in triples)
