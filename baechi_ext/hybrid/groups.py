"""Groups of devices, as a cluster: each is one device to a placer, and its devices always do the same on their parts."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import permutations

from baechi_ext.ir.cluster import Cluster, Device, Link
from baechi_ext.shard.tables import divisors

Groups = tuple[tuple[int, ...], ...]
"""The device indices of each group."""


def group_sizes(cluster: Cluster) -> list[int]:
    """All sizes of groups that devices can be divided into, ascending."""
    return divisors(len(cluster), len(cluster))


def groups_of(cluster: Cluster, size: int) -> Groups:
    """Neighbours in the cluster's order share a group."""
    return tuple(tuple(range(first, first + size)) for first in range(0, len(cluster), size))


def group_cluster(cluster: Cluster, groups: Groups) -> Cluster:
    """The groups as devices. A group is as fast as its slowest device and holds, on each, what the smallest holds.

    A tensor goes from one group to another in its parts, each device to the one in its own place, at the pace of the slowest such pair.
    """
    names = ["+".join(cluster.devices[d].name for d in group) for group in groups]
    devices = []
    for name, group in zip(names, groups, strict=True):
        members = [cluster.devices[d] for d in group]
        memory = min((d.memory_bytes for d in members if d.memory_bytes is not None), default=None)
        devices.append(Device(name, memory, min(d.speed for d in members)))
    pairs = {}
    for i, j in permutations(range(len(groups)), 2):
        pairs[names[i], names[j]] = slowest([cluster.link(s, t) for s, t in zip(groups[i], groups[j], strict=True)])
    return Cluster(tuple(devices), cluster.default, pairs, cluster.parallel_transfers)


def inner_link(cluster: Cluster, group: tuple[int, ...]) -> Link:
    """The most that a message inside a group takes. It is waited for, so what occupies the devices is part of it."""
    link = slowest([cluster.link(s, t) for s in group for t in group if s != t])
    latency = link.latency_us + link.send_us + link.receive_us
    return Link(link.us_per_byte + link.send_us_per_byte + link.receive_us_per_byte, latency)


def slowest(links: Sequence[Link]) -> Link:
    """A link of the largest cost of each kind."""
    return Link(*(max((getattr(link, f.name) for link in links), default=0.0) for f in fields(Link)))
