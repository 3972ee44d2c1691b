"""Methods of graph partitioning: the least transfer time between balanced parts of an undirected network with whole weights.

METIS: Karypis and Kumar, SIAM J. Scientific Computing 20, 1998. Scotch, whose program `gmap` maps the graph onto devices of unequal speed:
Pellegrini and Roman, HPCN Europe 1996. Neither knows precedence: what they cut little of need not run at the same time.
"""

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from baechi_ext.die_with_parent import with_this_process
from baechi_ext.errors import MissingBackendError, SolverError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.files import temporary_folder
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.place.chunks import Unit, held_bytes, spread, sums
from baechi_ext.place.common import PlanResult, Proposal, Task, arrange, conclude
from baechi_ext.place.sct_lp import pair_costs_us

_TOTAL = 100_000_000  # all weights of one kind add up to about this much, which 32 bits hold


@dataclass(frozen=True)
class Network:
    """Vertices are units: colocation groups, and ops without one. `edges[v]` are its neighbours with the weights of the edges."""

    edges: tuple[dict[int, int], ...]
    weights: tuple[int, ...]
    """The weights to be spread over the devices in proportion to `shares`."""
    shares: tuple[float, ...]
    """Each device's part of the weight; they add up to 1."""
    seed: int
    time_limit_seconds: float


def networks(task: Task, ordered: Sequence[Unit]) -> list[Network]:
    """The graph with edges weighted by transfer times and vertices by their times, for shares as the devices' speeds.

    Where memory is limited there are two more: vertices weighted by the bytes they hold, for shares as the devices' limits, and
    by both, half and half.
    """
    graph, cluster, options = task.graph, task.cluster, task.options
    edges = _edges(graph, cluster, ordered)
    times = _parts(sums([op.compute_us for op in graph.ops], ordered))
    speeds = _parts([device.speed for device in cluster.devices])
    kinds = [(times, speeds)]
    limits = [device.memory_bytes for device in cluster.devices]
    known = [limit for limit in limits if limit is not None]
    if known:
        sizes = _parts(held_bytes(graph, ordered))
        rooms = _parts([max(known) if limit is None else limit for limit in limits])
        kinds += [(sizes, rooms), (_mean(times, sizes), _mean(speeds, rooms))]
    whole = [tuple(1 + round(part * _TOTAL) for part in parts) for parts, _ in kinds]
    seed, seconds = options.seed, options.time_limit_seconds
    return [Network(edges, weights, tuple(shares), seed, seconds) for weights, (_, shares) in zip(whole, kinds, strict=True)]


def best_partition(task: Task, partition: Callable[[Network], Sequence[int]]) -> PlanResult:
    """The plan of the best partition of the networks (a part per vertex, as many parts as devices), the parts on the devices that suit them
    best."""
    ordered = task.graph.units()

    def placed(parts: Sequence[int]) -> Proposal:
        return arrange(task, lambda sequence: spread(task.graph, ordered, [sequence[part] for part in parts]))

    proposals: list[Proposal] = []
    for network in networks(task, ordered):
        left_seconds = task.options.time_limit_seconds - task.elapsed_seconds()
        if proposals and left_seconds <= 0:
            break
        try:
            proposals.append(placed(partition(replace(network, time_limit_seconds=left_seconds) if proposals else network)))
        except SolverError:
            if not proposals:
                raise
            break
    return conclude(task, proposals)


def _edges(graph: OpGraph, cluster: Cluster, ordered: Sequence[Unit]) -> tuple[dict[int, int], ...]:
    unit_of = {v: u for u, unit in enumerate(ordered) for v in unit}
    costs: list[dict[int, float]] = [defaultdict(float) for _ in ordered]
    for (v, w), cost in pair_costs_us(graph, cluster).items():
        a, b = unit_of[v], unit_of[w]
        if a != b:
            costs[a][b] += cost
            costs[b][a] += cost
    total = sum(sum(row.values()) for row in costs) or 1.0
    return tuple({u: 1 + round(cost / total * _TOTAL) for u, cost in sorted(row.items())} for row in costs)


def _parts(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total if total else 1 / len(values) for value in values]


def _mean(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in zip(first, second, strict=True)]


def metis(task: Task) -> PlanResult:
    """A part for each device by multilevel recursive bisection: time, and where memory is limited bytes, in balance.

    Raises MissingBackendError, too, where pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError as e:
        raise MissingBackendError(
            "metis needs pymetis, which is not installed; pip install pymetis, or choose another --placement_method"
        ) from e
    return best_partition(task, partial(_partition, pymetis))


def _partition(pymetis: Any, network: Network) -> list[int]:
    """A part for each vertex: recursive bisection, one call of METIS a step; asked for more than two parts it may stop at an empty one."""
    found = [0] * len(network.weights)
    pending = [(list(range(len(found))), list(range(len(network.shares))))]
    while pending:
        vertices, parts = pending.pop()
        if len(parts) == 1 or not vertices:
            for v in vertices:
                found[v] = parts[0]
            continue
        middle = len(parts) // 2
        shares = [sum(network.shares[p] for p in half) for half in (parts[:middle], parts[middle:])]
        side = _bisect(pymetis, network, vertices, [share / sum(shares) if sum(shares) else 0.5 for share in shares])
        for half, which in ((parts[:middle], 0), (parts[middle:], 1)):
            pending.append(([v for v, s in zip(vertices, side, strict=True) if s == which], half))
    return found


def _bisect(pymetis: Any, network: Network, vertices: Sequence[int], shares: Sequence[float]) -> Sequence[int]:
    """0 or 1 for each vertex."""
    number = {v: i for i, v in enumerate(vertices)}
    rows = [[(number[w], weight) for w, weight in network.edges[v].items() if w in number] for v in vertices]
    weights = [network.weights[v] for v in vertices]
    if not any(rows) or not min(shares):  # METIS divides by the shares
        return _largest_first(weights, shares)
    found: Sequence[int] = pymetis.part_graph(
        2,
        pymetis.CSRAdjacency(adj_starts=[0, *accumulate(map(len, rows))], adjacent=[w for row in rows for w, _ in row]),
        vweights=weights,
        eweights=[weight for row in rows for _, weight in row],
        tpwgts=[shares[0], 1 - shares[0]],
        recursive=True,
        options=pymetis.Options(seed=network.seed),
    ).vertex_part
    return found


def _largest_first(weights: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Sides for vertices that nothing connects: the heaviest first, each to the side that is then filled least; none to no share."""
    filled = [0.0, 0.0]
    side = [0] * len(weights)
    for v in sorted(range(len(weights)), key=lambda v: (-weights[v], v)):
        side[v] = min((0, 1), key=lambda s: (filled[s] + weights[v]) / shares[s] if shares[s] else float("inf"))
        filled[side[v]] += weights[v]
    return side


PROGRAMS = ("scotch_gmap", "gmap")
"""Debian's name first: there, `gmap` is another program, for genomes."""
_SHARES = 10_000  # a device's share in the target file is a whole number of up to this


def scotch(task: Task) -> PlanResult:
    """A part for each device, mapped by Scotch: time, and where memory is limited bytes, in balance.

    Raises MissingBackendError, too, where the program is not installed, SolverError where it fails or is not done by the time limit.
    """
    return best_partition(task, partial(partition, find_program()))


def find_program() -> str:
    """The path of Scotch's `gmap`. Raises MissingBackendError where there is none."""
    for name in PROGRAMS:
        path = shutil.which(name)
        if path is not None and (name != "gmap" or _is_scotch(path)):
            return path
    raise MissingBackendError(
        f"scotch needs Scotch's program {' or '.join(PROGRAMS)}, which is not installed; apt-get install scotch, "
        f"or choose another --placement_method"
    )


def _is_scotch(path: str) -> bool:
    try:
        said = subprocess.run([path, "-V"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"gmap/gpart" in said.stdout + said.stderr


def partition(program: str, network: Network) -> list[int]:
    """A part for each vertex, as `program` maps them; the same each time. Raises SolverError."""
    if len(network.weights) < 2 or len(network.shares) < 2:  # which the program does not survive
        return [max(range(len(network.shares)), key=network.shares.__getitem__)] * len(network.weights)
    with temporary_folder() as folder:
        source, target, mapping = (folder / name for name in ("source.grf", "target.tgt", "mapping.map"))
        source.write_text(source_text(network), encoding="ascii")
        target.write_text(target_text(network), encoding="ascii")
        try:
            done = subprocess.run(
                [program, "-Cd", str(source), str(target), str(mapping)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=network.time_limit_seconds,
                check=False,
                preexec_fn=with_this_process(),  # noqa: PLW1509 - one system call, no locks
            )
        except subprocess.TimeoutExpired as e:
            raise SolverError(f"{program} did not finish within {network.time_limit_seconds:g} s; raise --time_limit") from e
        except OSError as e:
            raise SolverError(f"{program} cannot be run: {e.strerror or e}; install Scotch again") from e
        if done.returncode != 0 or not mapping.exists():
            said = " ".join(done.stderr.split())[:200] or "nothing"
            raise SolverError(f"{program} ended with status {done.returncode} and said: {said}; choose another --placement_method")
        return parse_mapping(mapping.read_text(encoding="ascii", errors="replace"), len(network.weights))


def source_text(network: Network) -> str:
    """The network as a Scotch source graph: per vertex its weight, how many edges it has, and their weights and ends."""
    lines = ["0", f"{len(network.weights)} {sum(map(len, network.edges))}", "0 011"]
    for weight, row in zip(network.weights, network.edges, strict=True):
        lines.append(" ".join(map(str, (weight, len(row), *(x for w, cost in row.items() for x in (cost, w))))))
    return "\n".join(lines) + "\n"


def target_text(network: Network) -> str:
    """The devices as a Scotch target: a complete graph whose vertices have weights."""
    largest = max(network.shares)
    shares = [max(1, round(share / largest * _SHARES)) for share in network.shares]
    return f"cmpltw\n{len(shares)}\n{' '.join(map(str, shares))}\n"


def parse_mapping(text: str, n: int) -> list[int]:
    """A part for each of n vertices, from a Scotch mapping file. Raises SolverError where it is none."""
    try:
        part = {int(v): int(d) for v, d in (line.split() for line in text.splitlines()[1:] if line.strip())}
        return [part[v] for v in range(n)]
    except (ValueError, KeyError) as e:
        raise SolverError(f"Scotch wrote an invalid mapping ({e!r}); choose another --placement_method") from e
