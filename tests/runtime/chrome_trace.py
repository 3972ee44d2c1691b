"""The rules of Chrome traces, checked event by event and without knowing how a trace was made."""

import math
from collections import defaultdict
from typing import Any

PHASES = {"X", "M", "C", "s", "t", "f"}
FLOW = "stf"


def problems_of(trace: dict[str, Any]) -> list[str]:
    """The problems of a trace, in sentences; none where readers will take it as it is meant."""
    events = trace["traceEvents"]
    if found := [problem for event in events for problem in _problems_of_event(event)]:
        return found
    times = [event["ts"] for event in events if event["ph"] != "M"]
    if times != sorted(times):
        found.append("the events are not in the order of time")
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    found += [f"row {row} holds slices that overlap in part: {pair}" for row, slices in rows.items() for pair in _overlaps(slices)]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    found += [f"row {row} has no name" for row in rows if row not in named]
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    found += [f"process {pid} has no name" for pid in {e["pid"] for e in events} - processes]
    of_process: dict[int, set[int]] = defaultdict(set)
    for pid, tid in named:
        of_process[tid].add(pid)
    found += [f"row {tid} is of processes {pids}" for tid, pids in of_process.items() if len(pids) > 1]
    return found + _problems_of_arrows(events)


def _problems_of_event(event: dict[str, Any]) -> list[str]:
    found = []
    phase = event.get("ph")
    if phase not in PHASES:
        return [f"unknown phase {phase!r}"]
    if type(event.get("name")) is not str or any(type(event.get(key)) is not int for key in ("pid", "tid")):
        found.append(f"name, pid or tid of {event}")
    if phase != "M" and not _is_time(event.get("ts")):
        found.append(f"ts of {event}")
    if phase == "X" and not (_is_time(event.get("dur")) and event.get("cat")):
        found.append(f"dur or cat of {event}")
    if phase in ("M", "C") and not event.get("args"):
        found.append(f"args of {event}")
    if phase == "C" and not all(_is_time(value) for value in event["args"].values()):
        found.append(f"counter {event}")
    if phase in FLOW and ("id" not in event or not event.get("cat")):
        found.append(f"id or cat of {event}")
    return found


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _ns(us: float) -> int:
    return round(us * 1000)


def _span(event: dict[str, Any]) -> tuple[int, int]:
    return _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])


def _overlaps(slices: list[dict[str, Any]]) -> list[str]:
    """As a reader opens and closes slices: what is open when another one starts holds it to its end."""
    found, open_ = [], []
    for event in sorted(slices, key=lambda e: (_span(e)[0], -_span(e)[1])):
        start, end = _span(event)
        while open_ and open_[-1][1] <= start:
            open_.pop()
        if open_ and open_[-1][1] < end:
            found.append(f"{open_[-1][2]} and {event['name']}")
        open_.append((start, end, event["name"]))
    return found


def _problems_of_arrows(events: list[dict[str, Any]]) -> list[str]:
    """Every arrow leaves once, arrives once, and is in a slice wherever it turns: the one that was opened last in its row, in the file's
    order."""
    found = []
    arrows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    latest: dict[tuple[int, int], dict[str, Any]] = {}
    for event in events:
        row = event["pid"], event["tid"]
        if event["ph"] == "X":
            latest[row] = event
        elif event["ph"] in FLOW:
            arrows[event["cat"], event["name"], event["id"]].append(event)
            if row not in latest or not _holds(latest[row], _ns(event["ts"])):
                found.append(f"{event} is in no slice")
    for key, arrow in arrows.items():
        phases = "".join(event["ph"] for event in arrow)
        if phases[0] != "s" or phases[-1] != "f" or set(phases[1:-1]) - {"t"} or len(phases) < len("sf"):
            found.append(f"arrow {key} goes {phases}")
        if arrow[-1].get("bp") != "e":
            found.append(f"arrow {key} ends in the next slice, not in the one that is open")
    return found


def _holds(event: dict[str, Any], ns: int) -> bool:
    start, end = _span(event)
    return start <= ns < end or start == ns == end
