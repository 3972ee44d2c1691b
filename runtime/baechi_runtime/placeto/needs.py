"""The number of plans that searches must simulate until they are as good as others, or nearly as good as they ever get."""

from collections.abc import Mapping
from statistics import median

from baechi_runtime.placeto.contenders import Entry

NEAR = 0.01
"""A step that is longer by this part is near another."""
GOALS = {"own": "its own end", "rnn": "the RNN placer's end", "m_etf": "`m_etf`"}
"""Goals that searches are to come near to."""

Needs = dict[str, int | None]
"""By goal; None where the search does not come near it, and no key where nobody knows it."""


def needs(entries: Mapping[str, Entry | str]) -> dict[str, Needs]:
    """By method that searches plan by plan, how many plans it simulated until its best one was NEAR each goal.

    Ends are those of curves: before an order is chosen.
    """
    found = {name: e for name, e in entries.items() if isinstance(e, Entry)}
    ends = {name: e.curve[-1][1] if e.curve else e.step_us for name, e in found.items()}
    return {
        name: {goal: _plans_until(e, (1 + NEAR) * ends[of]) for goal in GOALS if (of := name if goal == "own" else goal) in ends}
        for name, e in found.items()
        if e.curve
    }


def _plans_until(e: Entry, step_us: float) -> int | None:
    return next((plans for plans, us in e.curve if us <= step_us), None)


def table(rows: list[dict[str, Needs]]) -> list[str]:
    """A table in Markdown: medians of the graphs on which a method comes near a goal, and on how many that is; nothing without searches."""
    methods = list(dict.fromkeys(name for row in rows for name in row))
    if not methods:
        return []
    title = f"Plans simulated until within {NEAR:.0%} of ... (median, and on how many of the graphs; before an order is chosen):"
    found = [title, "", f"| method | {' | '.join(GOALS.values())} |", "|---" * (len(GOALS) + 1) + "|"]
    for method in methods:
        found.append(f"| {method} | {' | '.join(_cell([row[method] for row in rows if method in row], goal) for goal in GOALS)} |")
    return found


def _cell(rows: list[Needs], goal: str) -> str:
    known = [row[goal] for row in rows if goal in row]
    reached = [plans for plans in known if plans is not None]
    counts = f"{len(reached)} of {len(known)}"
    if not known:
        return "-"
    return f"{median(reached):.0f} ({counts})" if reached else f"- ({counts})"
