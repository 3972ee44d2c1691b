"""The results of benchmarks.step_time as one Markdown table.

    python -m benchmarks.step_time_table benchmarks/results/step_time_*.json > benchmarks/results/step_time.md
"""

from collections.abc import Sequence
from pathlib import Path

from baechi_ext.ir.files import read_json
from baechi_runtime.report.tables import as_size, as_time
from benchmarks.runner import Row, parsed, table

COLUMNS = {
    "model, workers": "{title}",
    "variant": "{variant}",
    "predicted": lambda row: "" if row["predicted_us"] is None else as_time(row["predicted_us"]),
    "measured": lambda row: as_time(row["measured_us"]["median"]),
    "min to max": lambda row: " to ".join(as_time(side(row["measured_us"]["samples"])) for side in (min, max)),
    "x eager": lambda row: "{median:.2f} ({low:.2f} to {high:.2f})".format_map(row["times_eager"]),
    "predicted off by": lambda row: "" if row["prediction_error"] is None else f"{row['prediction_error']:+.1%}",
    "moved": lambda row: as_size(row["bytes_moved"]) if row["lower_bound_us"] else "",
    "peak memory": lambda row: " + ".join(map(as_size, _measured(row["peak_memory_bytes"]))),
    "lower bound": lambda row: "" if row["lower_bound_us"] is None else as_time(row["lower_bound_us"]),
}


def _measured(peaks: dict[str, list[int]] | list[int]) -> list[int]:
    """Older results have no predicted peaks."""
    return peaks["measured"] if isinstance(peaks, dict) else peaks


def report(results: Sequence[Row]) -> str:
    """A row per variant of each result, and below what did not run and what others took."""
    rows, left_out, loads = [], [], set()
    for result in results:
        model = result["command"].partition("--model_name=")[2].split()
        title = f"{model[0] if model else 'wide_towers'}, {result['workers']}"
        rows += [{**row, "title": "" if i else title} for i, row in enumerate(result["rows"])]
        left_out += [f"- {title}: `{name}` not run: {reason}" for name, reason in result.get("left_out", {}).items()]
        load = "an unknown share" if result["load_of_others"] is None else f"{result['load_of_others']:.1%}"
        loads.add(f"Others used {load} of the cores. `{result['command']}`  ")
    return "\n".join((table(COLUMNS, rows), "", *left_out, *([""] if left_out else []), *sorted(loads)))


def main(argv: Sequence[str] | None = None) -> None:
    paths = parsed(__doc__, {"results": {"type": Path, "nargs": "+"}}, argv).results
    print(report([read_json(path, "result of benchmarks.step_time") for path in paths]))


if __name__ == "__main__":
    main()
