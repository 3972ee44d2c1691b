"""The arguments of the commands that show what there is: report, plot, trace and datasets. Reading them loads no framework."""

import argparse
from pathlib import Path

from baechi_ext.datasets import FAMILIES, INSTALLED
from baechi_ext.errors import OptionError
from baechi_runtime.cli.flags import common as flags

_FOLDER = "a folder with graph.json and plan.json, or with a shard plan, such as `baechi train --out=DIR` writes"
ACTIONS = {"make": None, "list": None}
DEFAULT_GRAPHS = 32
MOST_GRAPHS = 100
ONLY_MAKE = ("out", "graphs", "seed")


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of `baechi report`."""
    parser.add_argument("folder", metavar="DIR", help=_FOLDER)
    parser.add_argument("--out", metavar="FILE", help="write the page to this file (default: report.html in DIR)")


def add_plot_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of `baechi plot`."""
    parser.add_argument("folder", metavar="DIR", help=_FOLDER)
    parser.add_argument("--out", metavar="FOLDER", help="write the plots to this folder, made if need be (default: DIR)")


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of `baechi trace`."""
    parser.add_argument("folder", metavar="DIR", help="a folder with graph.json and plan.json, such as `baechi train --out=DIR` writes")
    where = "write the trace to this file, compressed if it ends in .gz (default: trace.json in DIR)"
    parser.add_argument("--out", metavar="FILE", help=where)
    ranks = "also write a trace of each device by itself into this folder, as torch's HTA reads ranks"
    parser.add_argument("--ranks", metavar="FOLDER", help=ranks)


def add_datasets_flags(parser: argparse.ArgumentParser) -> None:
    """make or list, the families, and what belongs to either."""
    families = "; ".join(f"{name}: {text}" for name, text in FAMILIES.items())
    parser.add_argument("action", type=flags.one_of(ACTIONS), metavar="ACTION", help="make: graph files; list: what there is of them")
    parser.add_argument("families", type=flags.one_of(FAMILIES), nargs="*", metavar="FAMILY", help=f"{families} (list: default all)")
    parser.add_argument("--out", metavar="FOLDER", help="make: write FOLDER/FAMILY/graph_00.json.gz, ... and index.json (default datasets)")
    parser.add_argument("--graphs", type=_even, metavar="N", help=f"make: of each family (default {DEFAULT_GRAPHS}), half for testing")
    parser.add_argument("--seed", type=flags.whole, metavar="N", help="make: architectures and split are drawn from it (default 0)")
    parser.add_argument("--folder", metavar="FOLDER", help="list: what `make` wrote to (default what comes with the package)")
    parser.add_argument("--json", action="store_true", help="list: print the indexes as JSON")


def _even(text: str) -> int:
    """Flag type: an even number from 2 to 100."""
    value = flags.whole(text)
    if value % 2 or not 2 <= value <= MOST_GRAPHS:
        raise argparse.ArgumentTypeError(f"{text!r} is not an even number from 2 to {MOST_GRAPHS}")
    return value


def check_datasets(args: argparse.Namespace) -> None:
    """Raises OptionError where a flag belongs to the other action, or a family is missing."""
    other = ("folder", "json") if args.action == "make" else ONLY_MAKE
    wrong = next((name for name in other if getattr(args, name) is not None and getattr(args, name) is not False), None)
    if wrong is not None:
        raise OptionError(f"--{wrong} is not for `baechi datasets {args.action}`; leave it out")
    if args.action == "make" and not args.families:
        raise OptionError(f"no family is given; choose some of {', '.join(FAMILIES)}")


def target_of(args: argparse.Namespace) -> tuple[Path, int, int]:
    """The folder that `make` writes to, the number of graphs of each family, and their seed."""
    return Path(args.out or "datasets"), args.graphs or DEFAULT_GRAPHS, args.seed or 0


def source_of(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """The folder that `list` reads, and its families."""
    return Path(args.folder or INSTALLED), list(dict.fromkeys(args.families or FAMILIES))
