"""Tries parts of an installation, each in a process of its own: `python -m baechi_runtime.cli.doctor.probe NAME` writes its findings as
JSON.

A probe may crash its process, and ortools and highspy cannot share one.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from baechi_ext.errors import SolverError


def kernels() -> dict[str, Any]:
    """Compiles with numba: the folder where it keeps what it compiled, and whether the project's kernels are there already."""
    import numba

    from baechi_ext.simulate.jit import cache_folder, is_first_use

    if numba.njit(lambda x: x + 1)(1) != 2:
        raise ArithmeticError("numba computes 1 + 1 wrongly")
    folder = cache_folder()
    return {"folder": None if folder is None else str(folder), "compiled": not is_first_use()}


def lp() -> dict[str, Any]:
    """Solves max x + y, x + 2 y <= 4, 3 x + y <= 6, whose optimum is 2.8, with the solver that m_sct would get."""
    import pulp

    from baechi_ext.place.sct_lp import lp_solver

    problem = pulp.LpProblem("two_variables", pulp.LpMaximize)
    x, y = (pulp.LpVariable(name, lowBound=0) for name in "xy")
    problem += x + y
    problem += x + 2 * y <= 4
    problem += 3 * x + y <= 6
    chosen = lp_solver(60.0)
    problem.solve(chosen)
    _require(pulp.value(problem.objective), 2.8)
    return {"solver": chosen.name}


def cp() -> dict[str, Any]:
    """The same in whole numbers, whose optimum is 2, with the solver that exact would get."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    x, y = (model.new_int_var(0, 10, name) for name in "xy")
    model.add(x + 2 * y <= 4)
    model.add(3 * x + y <= 6)
    model.maximize(x + y)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.solve(model)
    _require(solver.objective_value, 2)
    return {"solver": "CP-SAT"}


def torch() -> dict[str, Any]:
    """The CUDA version, GPUs and backends that this torch can use."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "nccl": distributed.is_available() and distributed.is_nccl_available(),
    }


def _require(found: float | None, expected: float) -> None:
    if found is None or abs(found - expected) > 1e-6:
        raise SolverError(f"the solver found {found}, and {expected} is right")


PROBES: dict[str, Callable[[], dict[str, Any]]] = {"kernels": kernels, "lp": lp, "cp": cp, "torch": torch}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(PROBES[sys.argv[1]]()) + "\n")
