"""The shapes of generated graphs and what their ops cost: each family is a function of a size and a random generator.

A shape is an array of (source, target) pairs with source < target. Times have a mean of MEAN_US, tensors of MEAN_BYTES. Two ops
in ten have a second output; what an op reads of another is one of the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from baechi_ext.ir import Op, OpGraph

MEAN_US, MEAN_BYTES, MEAN_PARAMETER_BYTES = 100.0, 1e6, 4e6
Rng = np.random.Generator
Pairs = np.ndarray
"""An array of integers with two columns: source and target."""


def layered(n: int, rng: Rng) -> Pairs:
    """Layers of about sqrt(n) ops; an op reads one to five ops, four in five of them in the layer before, the others further up."""
    width = max(2, round(n**0.5))
    sizes = rng.integers(max(1, width // 2), width + width // 2 + 1, size=n)
    first = np.concatenate([[0], np.cumsum(sizes)])
    layer = np.searchsorted(first, np.arange(n), side="right") - 1
    readers = np.repeat(np.arange(n), rng.integers(1, 6, size=n))
    readers = readers[layer[readers] > 0]
    at = layer[readers]
    far = rng.random(len(readers)) < 0.2
    low = np.where(far, 0, first[at - 1])
    return _pairs([low + (rng.random(len(readers)) * (first[at] - low)).astype(np.int64), readers])


def fork_join(n: int, rng: Rng) -> Pairs:
    """Stages in a row: one op forks into parallel chains, one op joins them. A chain's ops also read the fork and the op before last."""
    pairs, fork = [], 0
    while fork < n - 1:
        width = int(rng.integers(2, 13))
        v, ends = fork + 1, []
        for _ in range(width):
            chain = [fork, *range(v, min(n - 1, v + int(rng.integers(1, 7))))]
            v = max(v, chain[-1] + 1)
            pairs += [(chain[j], chain[i]) for i in range(1, len(chain)) for j in (0, i - 1, max(0, i - 2))]
            ends.append(chain[-1])
        pairs += [(end, v) for end in ends]
        fork = v
    return _pairs(np.transpose(pairs))


def series_parallel(n: int, rng: Rng) -> Pairs:
    """Made from one edge: a random edge becomes two in a row, and half the time it stays beside them. About 1.5 edges an op."""
    edges = [(0, 1)]
    for v in range(2, n):
        i = int(rng.integers(len(edges)))
        s, t = edges[i]
        if rng.random() < 0.5:
            edges[i] = (s, v)
        else:
            edges.append((s, v))
        edges.append((v, t))
    return _relabelled(n, edges)


def random(n: int, rng: Rng) -> Pairs:
    """Each op reads about three earlier ones, most of them near, some far back: distances are log-uniform."""
    readers = np.repeat(np.arange(n), np.minimum(np.arange(n), rng.poisson(3.0, size=n)))
    distances = np.exp(rng.random(len(readers)) * np.log(np.maximum(readers, 1))).astype(np.int64)
    return _pairs([readers - np.clip(distances, 1, readers), readers])


def wavefront(n: int, rng: Rng) -> Pairs:
    """A square grid: each op reads its left, upper and upper left neighbours, as the steps and layers of a recurrent net do."""
    side = max(1, round(n**0.5))
    v = np.arange(n)
    row, column = v // side, v % side
    steps = [(side, row > 0), (1, column > 0), (side + 1, (row > 0) & (column > 0))]
    return _pairs(np.concatenate([[v[ok] - back, v[ok]] for back, ok in steps], axis=1))


def recurrent(n: int, rng: Rng) -> Pairs:
    """A grid of four to eight layers, each a chain over time that also reads the layer below."""
    layers = int(rng.integers(4, 9))
    v = np.arange(n)
    below, before = v[v % layers > 0], v[v >= layers]
    return _pairs(np.concatenate([[below - 1, below], [before - layers, before]], axis=1))


def transformer(n: int, rng: Rng) -> Pairs:
    """Blocks of one op in, heads of query, key, value, scores and mix, one op out with a shortcut, and two ops with a shortcut."""
    heads = int(rng.integers(4, 13))
    edges, last = [], 0
    for start in range(1, n, 5 * heads + 4):
        norm, first, out = start, start + 1, start + 1 + 5 * heads
        edges += [(last, norm), (last, out), (out, out + 1), (out + 1, out + 2), (out, out + 2)]
        for q in range(first, out, 5):
            k, v, scores, mix = range(q + 1, q + 5)
            edges += [(norm, q), (norm, k), (norm, v), (q, scores), (k, scores), (scores, mix), (v, mix), (mix, out)]
        last = out + 2
    pairs = _pairs(np.transpose(edges))
    return pairs[pairs[:, 1] < n]


def _relabelled(n: int, edges: list[tuple[int, int]]) -> Pairs:
    """The edges with ops numbered in a topological order."""
    readers: list[list[int]] = [[] for _ in range(n)]
    missing = [0] * n
    for s, t in edges:
        readers[s].append(t)
        missing[t] += 1
    order = [v for v in range(n) if missing[v] == 0]
    for v in order:
        for w in readers[v]:
            missing[w] -= 1
            if missing[w] == 0:
                order.append(w)
    rank = np.empty(n, dtype=np.int64)
    rank[order] = np.arange(n)
    return _pairs(rank[np.transpose(edges)])


def _pairs(ends: ArrayLike) -> Pairs:
    """The pairs, in order and each once, of a row of sources and one of targets."""
    return np.unique(np.asarray(ends, dtype=np.int64).T, axis=0)


@dataclass(frozen=True)
class Costs:
    """The distribution of op times: `spread` is the sigma of a log-normal, or with `pareto` the tail index."""

    spread: float
    pareto: bool = False

    def times_us(self, n: int, rng: Rng) -> np.ndarray:
        drawn = rng.pareto(self.spread, size=n) + 1 if self.pareto else rng.lognormal(0.0, self.spread, size=n)
        return np.round(drawn * (MEAN_US / drawn.mean()), 3)


def inference(shape: Callable[[int, Rng], Pairs], costs: Costs, n: int, rng: Rng) -> OpGraph:
    """The shape itself; three ops in ten hold parameters, as many need temporary memory."""
    pairs = shape(n, rng)
    times, sizes = costs.times_us(n, rng), _sizes(MEAN_BYTES, n, rng)
    parameters = _sizes(MEAN_PARAMETER_BYTES, n, rng) * (rng.random(n) < 0.3)
    temporary = _sizes(MEAN_BYTES, n, rng) * (rng.random(n) < 0.3)
    ops = [
        Op(f"n{v}", compute_us=float(times[v]), persistent_bytes=int(parameters[v]), output_bytes=int(sizes[v]),
           temporary_bytes=int(temporary[v]))
        for v in range(n)
    ]  # fmt: skip
    second = (rng.random(len(pairs)) < 0.5) & (rng.random(n) < 0.2)[pairs[:, 0]]
    edges = [
        (f"n{s}", f"n{t}", int(sizes[s]) // 2 if other else int(sizes[s]), "second" if other else "")
        for (s, t), other in zip(pairs.tolist(), second.tolist(), strict=True)
    ]
    return OpGraph.from_edges(ops, edges, name=shape.__name__)


def training(shape: Callable[[int, Rng], Pairs], costs: Costs, n: int, rng: Rng) -> OpGraph:
    """The shape as a forward pass, its mirror image backward, and updates: about `n` ops.

    A backward op takes twice its forward op's time, reads the gradients of what the forward op's readers made of its output, and
    the forward op's inputs. Two forward ops in five have a parameter, every eighth of those shares the one before; forward,
    backward and update ops of a parameter are a colocation group, and the update op holds a slot for its optimizer.
    """
    forward = max(2, round(n / 2.4))
    pairs = shape(forward, rng)
    times, sizes = costs.times_us(forward, rng), _sizes(MEAN_BYTES, forward, rng)
    parameters = _sizes(MEAN_PARAMETER_BYTES, forward, rng)
    group = _parameter_groups(forward, rng)
    ops, edges = [], []
    label = [None if g < 0 else f"parameter {g}" for g in group.tolist()]
    held = [int(size) if g == v else 0 for v, (g, size) in enumerate(zip(group.tolist(), parameters, strict=True))]
    for v in range(forward):
        ops.append(Op(f"f{v}", "forward", "forward", float(times[v]), held[v], int(sizes[v]), 0, label[v]))
    for v in reversed(range(forward)):
        gradient = int(sizes[v])
        ops.append(Op(f"b{v}", "backward", "backward", float(2 * times[v]), 0, gradient, gradient // 2, label[v], forward_op=f"f{v}"))
    for s, t in pairs.tolist():
        size = int(sizes[s])
        edges += [(f"f{s}", f"f{t}", size, ""), (f"b{t}", f"b{s}", size, f"gradient of f{s}"), (f"f{s}", f"b{t}", size, "")]
    for v in sorted(set(range(forward)) - set(pairs[:, 0].tolist())):
        edges.append((f"f{v}", f"b{v}", int(sizes[v]), ""))
    for v in range(forward):
        if held[v]:
            ops.append(Op(f"u{v}", "update", "update", float(0.05 * times[v]), held[v], 0, 0, label[v], forward_op=f"f{v}"))
    for v, g in enumerate(group.tolist()):
        if g >= 0:
            edges.append((f"b{v}", f"u{g}", held[g], "weight"))
    return OpGraph.from_edges(ops, edges, name=f"training {shape.__name__}")


def _parameter_groups(n: int, rng: Rng) -> np.ndarray:
    """For each forward op the first op with its parameter, or -1."""
    group = np.where(rng.random(n) < 0.4, np.arange(n), -1)
    owners = np.flatnonzero(group >= 0)
    for before, v in zip(owners, owners[1:], strict=False):
        if rng.random() < 1 / 8:
            group[v] = group[before]
    return group


def _sizes(mean: float, n: int, rng: Rng) -> np.ndarray:
    drawn = rng.lognormal(0.0, 1.2, size=n)
    return np.maximum(2, np.round(drawn * (mean / drawn.mean()) / 2) * 2).astype(np.int64)


FAMILIES: dict[str, Callable[[int, Rng], OpGraph]] = {
    "layered": partial(inference, layered, Costs(0.6)),
    "fork_join": partial(inference, fork_join, Costs(1.0)),
    "series_parallel": partial(inference, series_parallel, Costs(1.0)),
    "random": partial(inference, random, Costs(1.5, pareto=True)),
    "training": partial(training, layered, Costs(1.5)),
    "wavefront": partial(inference, wavefront, Costs(1.5)),
    "recurrent": partial(training, recurrent, Costs(0.8)),
    "transformer": partial(training, transformer, Costs(1.5)),
}
"""The last three are for HELD_OUT alone."""
