"""Scotch (Pellegrini and Roman, HPCN Europe 1996): its program `gmap` maps the graph onto devices of unequal speed."""

import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from baechi_ext.errors import MissingBackendError, SolverError
from baechi_ext.place.common import PlanResult, Task
from baechi_ext.place.network import Network, best_partition

PROGRAMS = ("scotch_gmap", "gmap")
"""Debian's name first: there, `gmap` is another program, for genomes."""
_SHARES = 10_000
"""A device's share in the target file is a whole number of up to this."""


def scotch(task: Task) -> PlanResult:
    """A part for each device, mapped by Scotch: time, and where memory is limited bytes, in balance.

    It knows no precedence: what it cuts little of need not run at the same time. Raises MissingBackendError, too, where the program is
    not installed, SolverError where it fails or is not done by the time limit.
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
    with tempfile.TemporaryDirectory(prefix="baechi_scotch_") as folder:
        source, target, mapping = (Path(folder) / name for name in ("source.grf", "target.tgt", "mapping.map"))
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
