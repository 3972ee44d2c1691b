"""Blocks of ops that a search moves as one: what must share a device, and clusters of what had better.

Clusters are found level by level: each unit or cluster joins the neighbour to which most transfer time binds it, lighter ones
preferred (heavy-edge matching: Karypis and Kumar, SIAM J. Scientific Computing 20, 1998), until few are left.
"""

from collections import defaultdict
from collections.abc import Sequence

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import OpGraph

Block = tuple[int, ...]
_FEWEST_PER_DEVICE = 4
_LEAST_SHRINKING = 0.9
_MOST_READERS = 50  # a tensor with more readers binds nobody in particular


def block_levels(graph: OpGraph, cluster: Cluster) -> list[list[Block]]:
    """Blocks of op positions, the units first, then, of a graph over parts of a batch, all parts of a unit, and all of a part; then coarser
    and coarser clusters of units. Each level holds every op once."""
    units, *clusters = cluster_levels(graph, cluster)
    return [units, *(_part_levels(graph) if graph.is_parted and len(cluster) > 1 else ()), *clusters]


def cluster_levels(graph: OpGraph, cluster: Cluster) -> list[list[Block]]:
    """The units, then coarser and coarser clusters of them. Each level holds every op once."""
    blocks = graph.units()
    levels = [blocks]
    if len(cluster) == 1:
        return levels
    weights = [sum(graph.ops[v].compute_us for v in block) for block in blocks]
    bonds = _bonds(graph, cluster, blocks)
    heaviest_us = sum(weights) / (2 * len(cluster))
    while len(blocks) > _FEWEST_PER_DEVICE * len(cluster):
        parent = _matching(bonds, weights, heaviest_us)
        count = max(parent) + 1
        if count > _LEAST_SHRINKING * len(blocks):
            break
        blocks = _merged(blocks, parent, count)
        merged = [0.0] * count
        for i, weight in zip(parent, weights, strict=True):
            merged[i] += weight
        weights, bonds = merged, _merged_bonds(bonds, parent, count)
        levels.append(blocks)
    return levels


def _part_levels(graph: OpGraph) -> list[list[Block]]:
    """All parts of each unit together, and all units of each part of the batch."""
    names: dict[tuple[str, ...], list[int]] = {}
    parts: dict[int | Block, list[int]] = {}
    for unit in graph.units():
        ops = [graph.ops[v] for v in unit]
        names.setdefault(tuple(op.name for op in ops), []).extend(unit)
        part = next((op.part for op in ops if op.part is not None), None)
        parts.setdefault(unit if part is None else part, []).extend(unit)
    return [[tuple(block) for block in blocks.values()] for blocks in (names, parts)]


def _bonds(graph: OpGraph, cluster: Cluster, blocks: Sequence[Block]) -> list[dict[int, float]]:
    """For each block, the transfer time that other blocks share with it, on an average link, with what it takes from the devices."""
    link = cluster.mean_link()
    block_of = {v: i for i, block in enumerate(blocks) for v in block}
    bonds: list[dict[int, float]] = [defaultdict(float) for _ in blocks]
    for tensor in graph.tensors:
        if len(tensor.readers) > _MOST_READERS:
            continue
        source = block_of[tensor.producer]
        for target in dict.fromkeys(block_of[w] for w in tensor.readers):
            if source != target:
                us = link.total_us(tensor.bytes) + 1e-9
                bonds[source][target] += us
                bonds[target][source] += us
    return bonds


def _matching(bonds: Sequence[dict[int, float]], weights: Sequence[float], heaviest_us: float) -> list[int]:
    """For each block, the number of the cluster that it and at most one neighbour become."""
    partner: list[int | None] = [None] * len(bonds)
    for i in sorted(range(len(bonds)), key=lambda i: (len(bonds[i]), weights[i], i)):
        if partner[i] is None:
            fitting = [j for j in bonds[i] if partner[j] is None and weights[i] + weights[j] <= heaviest_us]
            if fitting:
                j = max(fitting, key=lambda j: (bonds[i][j] / (weights[i] + weights[j] + 1e-9), -j))
                partner[i], partner[j] = j, i
    parent = [-1] * len(bonds)
    count = 0
    for i, other in enumerate(partner):
        if parent[i] < 0:
            parent[i] = count
            if other is not None:
                parent[other] = count
            count += 1
    return parent


def _merged(blocks: Sequence[Block], parent: Sequence[int], count: int) -> list[Block]:
    merged: list[list[int]] = [[] for _ in range(count)]
    for block, i in zip(blocks, parent, strict=True):
        merged[i] += block
    return [tuple(block) for block in merged]


def _merged_bonds(bonds: Sequence[dict[int, float]], parent: Sequence[int], count: int) -> list[dict[int, float]]:
    merged: list[dict[int, float]] = [defaultdict(float) for _ in range(count)]
    for i, row in enumerate(bonds):
        for j, us in row.items():
            if parent[i] != parent[j]:
                merged[parent[i]][parent[j]] += us
    return merged
