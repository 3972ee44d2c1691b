"""Graphs and clusters to learn from which traversal order suits which graph: some to fit rules to, others to check them on.

Half are of the families of baechi_ext.datasets, by their split; half are generated, of the shapes that methods are tuned on and of the
three that are held out. Each graph stands on clusters drawn from its name.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from baechi_ext import datasets
from baechi_ext.ir import Cluster, Link, OpGraph
from benchmarks.families import link_of_ratio, tightened
from benchmarks.shapes import FAMILIES

SHAPES = {"train": ("layered", "fork_join", "series_parallel", "random", "training"), "test": ("wavefront", "recurrent", "transformer")}
GENERATED = 48
"""Graphs of each split."""
FEWEST_OPS, MOST_OPS = 20, 400
BAECHIS_LINK = Link(us_per_byte=0.0001754, latency_us=134.0)


@dataclass(frozen=True)
class OrderCase:
    """A graph on a cluster."""

    split: str
    name: str
    """The graph's name; its cases share it."""
    number: int
    """The cluster's number."""
    graph: OpGraph
    cluster: Cluster


def order_cases(clusters: int) -> Iterator[OrderCase]:
    """Each graph of both splits on so many clusters; all kinds mixed, so that the first cases are a sample of all."""
    graphs = [(split, name, graph) for split in SHAPES for name, graph in (*_captured(split), *_generated(split))]
    for number in range(clusters):
        for split, name, graph in sorted(graphs, key=lambda entry: zlib.crc32(entry[1].encode())):
            yield OrderCase(split, name, number, graph, _cluster(graph, np.random.default_rng(zlib.crc32(f"{name} {number}".encode()))))


def _captured(split: str) -> Iterator[tuple[str, OpGraph]]:
    for family in datasets.FAMILIES:
        for graph in datasets.load(family, split):
            yield graph.name, graph


def _generated(split: str) -> Iterator[tuple[str, OpGraph]]:
    """Sizes are log-uniform."""
    shapes = SHAPES[split]
    for i in range(GENERATED):
        shape = shapes[i % len(shapes)]
        rng = np.random.default_rng(zlib.crc32(f"order {split} {i}".encode()))
        ops = round(np.exp(rng.uniform(np.log(FEWEST_OPS), np.log(MOST_OPS))))
        yield f"{split}_{shape}_{i}", FAMILIES[shape](ops, rng)


def _cluster(graph: OpGraph, rng: np.random.Generator) -> Cluster:
    """2 to 8 equal devices; in a quarter of the cases the link that `baechi place` takes where none is given, else transfers that take
    0.1 to 10 times as long as ops; in half of them memory that is tight."""
    count, own, ratio, tight = int(rng.choice([2, 3, 4, 8])), rng.random() < 0.25, 10 ** rng.uniform(-1, 1), rng.random() < 0.5
    cluster = Cluster.uniform(count, link=BAECHIS_LINK if own else link_of_ratio(graph, ratio))
    return tightened(graph, cluster) if tight else cluster
