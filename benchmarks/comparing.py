"""The flags of `baechi compare`, behind --, and its table, for benchmarks that are a comparison in worker processes and something more."""

import argparse

from baechi_runtime.cli.flags.compare import compare_request
from baechi_runtime.cli.main import parsed
from baechi_runtime.drivers.comparison import CompareRequest
from benchmarks.runner import Row, table

FLAGS = {"flags": {"nargs": argparse.REMAINDER, "metavar": "-- FLAGS", "help": "flags of baechi compare"}}
COLUMNS = {
    "variant": "{method}",
    "predicted ms": lambda row: "" if row["predicted_step_us"] is None else f"{row['predicted_step_us'] / 1e3:.1f}",
    "measured ms": lambda row: f"{row['measured_step_us']['median'] / 1e3:.1f}",
    "x one device": lambda row: "{median:.2f} ({low:.2f} to {high:.2f})".format_map(row["ratio"]),
}


def request_of(args: argparse.Namespace) -> CompareRequest:
    """The request of the flags behind --, in worker processes."""
    return compare_request(parsed(["compare", "--workers=process", *args.flags[args.flags[:1] == ["--"] :]]))


def report(found: Row) -> str:
    """The variants that were measured."""
    rows = [found["unplaced"] | {"method": "eager"}, *(row for row in found["methods"] if row["measured_step_us"] is not None)]
    return table(COLUMNS, rows)
