"""Graphs for the tests of what learns: no two ops alike, so that nothing has to be broken by file order."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from baechi_ext.ir import OpGraph
from tests.build import graph_of


def distinct(n: int = 14, seed: int = 0) -> OpGraph:
    """A random connected graph whose ops and tensors all differ; three ops are a colocation group."""
    draw = random.Random(seed)
    names = [f"op{v:02}" for v in range(n)]
    pairs = [(v, w) for v in range(n) for w in range(v + 1, n) if w == v + 1 or draw.random() < 0.2]
    sizes = [draw.uniform(1, 9) for _ in names]
    edges = [(names[v], names[w], sizes[v]) for v, w in pairs if (v, w) != (4, 5)]
    fields = {field: {name: draw.uniform(1, 9) for name in names} for field in ("persistent_bytes", "temporary_bytes")}
    return graph_of({name: draw.uniform(1, 9) for name in names}, *edges, colocation=dict.fromkeys(names[2:9:3], "g"), **fields)


def shuffled(graph: OpGraph, seed: int = 1) -> OpGraph:
    """The same graph in another file order."""
    value = graph.to_json()
    draw = random.Random(seed)
    draw.shuffle(value["nodes"])
    draw.shuffle(value["edges"])
    return OpGraph.from_json(value)


def towers(count: int = 2, length: int = 4) -> OpGraph:
    """Independent chains of ops of 10 us: one device each is the best, and takes 10 x length."""
    names = [[f"t{i}{j}" for j in range(length)] for i in range(count)]
    edges = [(a, b, 1) for row in names for a, b in zip(row, row[1:], strict=False)]
    return graph_of({name: 10.0 for row in names for name in row}, *edges)


def write_family(folder: Path, family: str, train: Sequence[OpGraph], test: Sequence[OpGraph] = ()) -> None:
    """The files of a family with these graphs; its sizes are not looked at here."""
    (folder / family).mkdir(parents=True)
    entries = []
    for i, graph in enumerate((*train, *test)):
        graph.save(folder / family / f"graph_{i:02}.json")
        sizes = dict.fromkeys(("captured_ops", "nodes", "edges", "compute_us", "longest_path_us"), 1)
        entries.append({"file": f"graph_{i:02}.json", "split": "train" if i < len(train) else "test", **sizes})
    (folder / family / "index.json").write_text(json.dumps({"graphs": entries}))
