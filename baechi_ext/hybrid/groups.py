"""Groups of devices, as a cluster: each is one device to a placer, and its devices always do the same on their parts."""

from dataclasses import fields

from baechi_ext.ir.cluster import Cluster, Device, Link
from baechi_ext.shard.space import divisors

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
    devices = tuple(Device(name, _memory(cluster, group), _speed(cluster, group)) for name, group in zip(names, groups, strict=True))
    pairs = {}
    for i, source in enumerate(groups):
        for j, target in enumerate(groups):
            if i != j:
                links = [cluster.link(s, t) for s, t in zip(source, target, strict=True)]
                pairs[names[i], names[j]] = _slowest(links)
    return Cluster(devices, cluster.default, pairs, cluster.parallel_transfers)


def inner_link(cluster: Cluster, group: tuple[int, ...]) -> Link:
    """What a message inside a group takes at most. It is waited for, so what occupies the devices is part of it."""
    link = _slowest([cluster.link(s, t) for s in group for t in group if s != t])
    latency = link.latency_us + link.send_us + link.receive_us
    return Link(link.us_per_byte + link.send_us_per_byte + link.receive_us_per_byte, latency)


def _memory(cluster: Cluster, group: tuple[int, ...]) -> int | float | None:
    limits = [cluster.devices[d].memory_bytes for d in group]
    return min((limit for limit in limits if limit is not None), default=None)


def _speed(cluster: Cluster, group: tuple[int, ...]) -> float:
    return min(cluster.devices[d].speed for d in group)


def _slowest(links: list[Link]) -> Link:
    return Link(*(max((getattr(link, f.name) for link in links), default=0.0) for f in fields(Link)))
