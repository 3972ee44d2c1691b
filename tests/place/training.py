"""Graphs shaped like a training step: a forward graph, then its mirror image, each backward op tied to its forward op."""

import random
from collections.abc import Sequence

from baechi_ext.ir import Op, OpGraph


def training_step(names: Sequence[str], edges: Sequence[tuple[str, str]], seed: int, *, parameter_bytes: int = 0) -> OpGraph:
    """Forward ops take 500 to 20,000 microseconds, their backward ops 1.5 to 2.5 times that; tensors have 10 KB to 1 MB."""
    rng = random.Random(seed)
    time_us = {name: rng.uniform(500, 20_000) for name in names}
    size = {name: rng.randrange(10_000, 1_000_000) for name in names}
    ops = [Op(x, compute_us=time_us[x], persistent_bytes=parameter_bytes, output_bytes=size[x], colocation=x) for x in names]
    ops += [
        Op(f"b.{x}", phase="backward", compute_us=time_us[x] * rng.uniform(1.5, 2.5), output_bytes=size[x], colocation=x)
        for x in reversed(names)
    ]
    found = [(s, d, size[s], "y") for s, d in edges] + [(x, f"b.{x}", size[x], "y") for x in names]
    for s, d in edges:
        found += [(f"b.{d}", f"b.{s}", size[s], f"gradient of {s}"), (s, f"b.{d}", size[s], "y")]
    return OpGraph.from_edges(ops, found)


def towers(count: int, length: int, seed: int) -> OpGraph:
    """Independent chains that are joined at the end of the forward pass."""
    chains = [[f"t{i}.{j}" for j in range(length)] for i in range(count)]
    edges = [pair for chain in chains for pair in zip(chain, [*chain[1:], "join"], strict=True)]
    return training_step([*(x for chain in chains for x in chain), "join"], edges, seed)


def branchy_blocks(blocks: int, branches: int, seed: int, *, parameter_bytes: int = 0) -> OpGraph:
    """Blocks in a row, each of parallel branches of one to three ops that end in one op."""
    rng = random.Random(seed)
    names, edges, last = ["in"], [], "in"
    for b in range(blocks):
        ends = []
        for i in range(branches):
            branch = [f"{b}.{i}.{j}" for j in range(rng.randint(1, 3))]
            edges += zip([last, *branch], branch, strict=False)
            names += branch
            ends.append(branch[-1])
        last = f"{b}.out"
        names.append(last)
        edges += [(end, last) for end in ends]
    return training_step(names, edges, seed, parameter_bytes=parameter_bytes)
