"""All compiled kernels ahead of time: `python -m baechi_ext.place.kernels` fills the cache (`simulate.jit`), in as many processes as there
are cores.

Each kernel is called on two ops, the way that placers call it, so what is compiled is what they load. Where all is there already that
takes a second.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.op_graph import Op, OpGraph
from baechi_ext.place.exact.process import threads
from baechi_ext.python_process import command_of, surroundings

_GRAPH = OpGraph.from_edges([Op("a", compute_us=1.0), Op("b", compute_us=1.0)], [("a", "b", 1, "t")])
_CLUSTER = Cluster.uniform(2)


def bound() -> None:
    from baechi_ext.simulate.relaxation import lower_bound_us

    lower_bound_us(_GRAPH, _CLUSTER)


def simulate() -> None:
    from baechi_ext.simulate import Simulator

    Simulator(_GRAPH, _CLUSTER).evaluate([0, 1])


def search() -> None:
    from baechi_ext.place.fit_kernel import fit
    from baechi_ext.place.refine_kernel import anneal, make_search
    from baechi_ext.simulate.arrays import make_problem, make_state

    problem = make_problem(_GRAPH, _CLUSTER)
    for kernel in (anneal, fit):
        kernel(problem, make_state(problem), make_search(problem, [[[0], [1]]]))


def schedule() -> None:
    from baechi_ext.place.list_scheduler import runner

    runner(_GRAPH, _CLUSTER, None)(0.0, True, None)


def exhaust() -> None:
    from baechi_ext.place.exact.search import Search
    from baechi_ext.simulate import Simulator

    Search(Simulator(_GRAPH, _CLUSTER)).run(float("inf"))


def episodes() -> None:
    from baechi_ext.place.placeto.decisions import Decisions
    from baechi_ext.place.placeto.environment import Environment

    environment = Environment(Decisions.of(_GRAPH, _CLUSTER), batch=1)
    environment.reset([0, 1])
    environment.observe()
    environment.step(np.zeros(1, np.int64))


_TOGETHER: tuple[tuple[Callable[[], None], ...], ...] = ((simulate, search, episodes), (exhaust,), (schedule,), (bound,))
"""Those in one process have parts in common. The longest come first."""


def compile_all() -> int:
    """Compiles what the cache lacks; returns 0, or the exit status of a process that failed."""

    def run(chosen: Sequence[Callable[[], None]]) -> int:
        return subprocess.run(command_of("baechi_ext.place.kernels", *(f.__name__ for f in chosen)), env=surroundings()).returncode

    with ThreadPoolExecutor(threads()) as pool:
        return max(pool.map(run, _TOGETHER), key=abs)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
    sys.exit(0 if sys.argv[1:] else compile_all())
