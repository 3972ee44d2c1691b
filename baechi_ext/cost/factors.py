"""Costs made larger or uncertain on purpose: how much a plan depends on them (Baechi's --comm_cost_factor and --cost_factor)."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import permutations
from random import Random

from baechi_ext.ir.cluster import Cluster, Link
from baechi_ext.ir.op_graph import OpGraph


def scale_links(cluster: Cluster, factor: float, per_byte: float | None = None) -> Cluster:
    """The cluster with every cost of every link times `factor`; those of a byte times `per_byte`, where that is given."""
    return with_links(cluster, lambda link: _times(link, factor, per_byte))


def with_links(cluster: Cluster, changed: Callable[[Link], Link]) -> Cluster:
    """The cluster with each of its links `changed`."""
    pairs = {ends: changed(link) for ends, link in cluster.pairs.items()}
    return replace(cluster, default=changed(cluster.default), pairs=pairs)


def vary_costs(graph: OpGraph, cluster: Cluster, factor: float, seed: int) -> tuple[OpGraph, Cluster]:
    """Each op's time, and the costs of each directed link, times a random number of its own between 1 and `factor`.

    The same seed draws the same numbers.
    """
    draw = Random(seed)
    ops = [replace(op, compute_us=op.compute_us * draw.uniform(1, factor)) for op in graph.ops]
    ends = permutations(range(len(cluster)), 2)
    names = [device.name for device in cluster.devices]
    pairs = {(names[i], names[j]): _times(cluster.link(i, j), draw.uniform(1, factor)) for i, j in ends}
    return graph.replace_ops(ops), replace(cluster, pairs=pairs)


def _times(link: Link, factor: float, per_byte: float | None = None) -> Link:
    of_a_byte = factor if per_byte is None else per_byte
    return Link(**{f.name: getattr(link, f.name) * (of_a_byte if "per_byte" in f.name else factor) for f in fields(link)})
