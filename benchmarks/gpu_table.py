"""The reports and comparisons of benchmarks/gpu_half_hour.sh as Markdown tables, or the memory limit of its last step.

    python -m benchmarks.gpu_table runs/gpu_half_hour > runs/gpu_half_hour/gpu.md
    python -m benchmarks.gpu_table --tight=1.1 runs/gpu_half_hour/one_alexnet

`overhead` is our program on one device over eager, a ratio of pairs with its 95% interval; `sum of profile` what is predicted for one
device (what the ops take one by one, or what they take the host, if that is more; where steps are one graph, its time), beside what our
program takes.
"""

from collections.abc import Sequence
from pathlib import Path

from baechi_ext.ir.files import read_json
from baechi_runtime.report.tables import as_size, as_time
from benchmarks.runner import Row, parsed, table

COLUMNS = {
    "run": "{run}",
    "devices": "{executor}, {num_devices}",
    "eager": lambda row: as_time(row["measured_step_us"]["eager"]["median"]),
    "overhead": lambda row: "{median:.2f} ({low:.2f} to {high:.2f})".format_map(row["overhead_of_one_device_program"]),
    "torch.compile": lambda row: "".join(as_time(us["median"]) for name, us in row["measured_step_us"].items() if name == "torch.compile"),
    "sum of profile": lambda row: as_time(row["predicted_step_us"]["single"]),
    "one device": lambda row: as_time(row["measured_step_us"]["single"]["median"]),
    "predicted": lambda row: as_time(row["predicted_step_us"]["placed"]),
    "placed": lambda row: as_time(row["measured_step_us"]["placed"]["median"]),
    "peaks predicted": lambda row: _sizes(row["peak_memory_bytes"]["predicted"]),
    "measured": lambda row: _sizes(row["peak_memory_bytes"]["measured"]),
    "parity": lambda row: f"{row['parity']['max_rel_diff']:.1e} of {row['parity']['tolerance']:g}",
    "doubts": lambda row: "; ".join(row["doubts"]),
}
COMPARED = {
    "comparison": "{run}",
    "devices": "{executor}",
    "method": "{method}",
    "predicted": lambda row: as_time(row["predicted_step_us"]),
    "measured": lambda row: as_time(row["measured_step_us"]["median"]),
    "predicted over measured": lambda row: f"{row['predicted_step_us'] / row['measured_step_us']['median']:.2f}",
    "times as fast as one device": lambda row: "{median:.2f} ({low:.2f} to {high:.2f})".format_map(row["ratio"]),
    "as eager": lambda row: f"{row['eager_us'] / row['measured_step_us']['median']:.2f}",
    "transfers": "{transfers}",
    "parity": lambda row: f"{row['parity']['max_rel_diff']:.1e} of {row['parity']['tolerance']:g}",
}


def _sizes(sizes: Sequence[float]) -> str:
    return " + ".join(map(as_size, sizes))


def main(argv: Sequence[str] | None = None) -> None:
    flags = {"folder": {"type": Path}, "--tight": {"type": float, "help": "print this times a run's highest planned peak"}}
    args = parsed(__doc__, flags, argv)
    if args.tight is not None:
        print(int(args.tight * max(_read(args.folder / "report.json")["peak_memory_bytes"]["predicted"])))
    else:
        print(tables(args.folder))


def tables(folder: Path) -> str:
    """The table of the reports in a folder of run folders, that of its comparisons, and the command that made them."""
    reports = [_read(path) for path in sorted(folder.glob("*/report.json"))]
    compared = [{**found, **method, "eager_us": found["unplaced"]["measured_step_us"]["median"]}
                for found in map(_read, sorted(folder.glob("**/compare.json"))) for method in found["methods"]]  # fmt: skip
    parts = [table(COLUMNS, reports), *([table(COMPARED, compared)] if compared else []), f"`python -m benchmarks.gpu_table {folder}`"]
    return "\n\n".join(parts)


def _read(path: Path) -> Row:
    return {**read_json(path, "result of baechi"), "run": path.parent.name}


if __name__ == "__main__":
    main()
