"""For the ops of a run, what the step would be with them elsewhere: for the most costly ones where trying all would take long."""

from typing import Any

from baechi_ext.explain import Mover
from baechi_runtime.files.run_folder import RunFolder

OPS_SIMULATED = 6_000_000
"""No more than this many ops are simulated in all: some seconds."""
LEAST, MOST = 20, 1000


def page_choices(run: RunFolder) -> dict[str, Any]:
    """`found`: choices, each for ops that move together; `of`: by op, which of them is its own, or null; `shown`: for how many."""
    graph, devices = run.graph, len(run.plan.cluster)
    units: dict[object, list[int]] = {}
    for v, op in enumerate(graph.ops):
        units.setdefault(v if op.colocation is None else op.colocation, []).append(v)
    costliest = sorted(units.values(), key=lambda unit: -sum(graph.ops[v].compute_us for v in unit))
    affordable = OPS_SIMULATED // max(1, graph.size * (devices - 1))
    costliest = costliest[: max(LEAST, min(MOST, affordable))]
    mover = Mover(run.plan)
    of: list[int | None] = [None] * len(graph)
    found: list[dict[str, Any]] = []
    for unit in costliest:
        for v in unit:
            of[v] = len(found)
        found.append(_said(mover, unit))
    shown = f"It was predicted with other devices only for the {len(costliest)} most costly of {len(units)} ops and colocation groups."
    return {"of": of, "found": found, "shown": shown}


def _said(mover: Mover, unit: list[int]) -> dict[str, Any]:
    choices = mover.choices(unit[:1])
    return {
        "moved": len(choices.moved),
        "verdict": choices.verdict,
        "step_us": choices.step_us,
        "choices": [{"device": c.device, "step_us": c.step_us, "fits": c.fits} for c in choices.choices],
    }
