"""The results of benchmarks.step_time as one Markdown table.

    python -m benchmarks.step_time_table benchmarks/results/step_time_*.json > benchmarks/results/step_time.md
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from baechi_ext.ir.files import read_json
from runtime.tables import as_size, as_time

HEADER = "| model, workers | variant | predicted | measured | min to max | x eager | predicted off by | moved | peak memory | lower bound |"


def lines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown, a row per variant of each result."""
    yield HEADER
    yield "|---" * HEADER.count(" | ") + "|---|"
    for result in results:
        title = f"{result['command'].partition('--model_name=')[2].split()[0]}, {result['workers']}"
        for row in result["rows"]:
            yield _row(title, row)
            title = ""
        for name, reason in result.get("left_out", {}).items():
            yield f"| | {name} | not run: {reason} |" + " |" * (HEADER.count(" | ") - 2)
    yield ""
    yield from sorted({f"Others used {_load(result)} of the cores. `{result['command']}`  " for result in results})


def _load(result: dict[str, Any]) -> str:
    return "an unknown share" if result["load_of_others"] is None else f"{result['load_of_others']:.1%}"


def _row(title: str, row: dict[str, Any]) -> str:
    measured, ratio, samples = row["measured_us"], row["times_eager"], row["measured_us"]["samples"]
    cells = [
        title,
        row["variant"],
        "" if row["predicted_us"] is None else as_time(row["predicted_us"]),
        as_time(measured["median"]),
        f"{as_time(min(samples))} to {as_time(max(samples))}",
        f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        "" if row["prediction_error"] is None else f"{row['prediction_error']:+.1%}",
        as_size(row["bytes_moved"]) if row["lower_bound_us"] else "",
        " + ".join(map(as_size, _measured(row["peak_memory_bytes"]))),
        "" if row["lower_bound_us"] is None else as_time(row["lower_bound_us"]),
    ]
    return f"| {' | '.join(cells)} |"


def _measured(peaks: dict[str, list[int]] | list[int]) -> list[int]:
    """Older results have no predicted peaks."""
    return peaks["measured"] if isinstance(peaks, dict) else peaks


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    for line in lines([read_json(path, "result of benchmarks.step_time") for path in parser.parse_args(argv).results]):
        print(line)


if __name__ == "__main__":
    main()
