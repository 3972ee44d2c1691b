"""What a comparison of methods says of the plan in its folder, which is that of the recommended one, in the words of a run's report."""

from collections.abc import Mapping
from typing import Any

SINGLE = "single"
_SAME = ("model", "executor", "command", "versions", "doubts", "notes", "load_of_others", "recommendation")


def report_of(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of report.json that compare.json knows, and `recommendation`."""
    report = {key: comparison[key] for key in _SAME if comparison.get(key) is not None}
    chosen = comparison.get("recommended")
    row = next((method for method in comparison.get("methods", []) if method.get("method") == chosen), None)
    if row is not None:
        report |= {"parity": row.get("parity"), "peak_memory_bytes": row.get("peak_memory_bytes")}
        report["measured_step_us"] = {"placed": row.get("measured_step_us") or {}}
        if chosen != SINGLE:
            report["speedup_interval"] = row.get("ratio")
    return report
