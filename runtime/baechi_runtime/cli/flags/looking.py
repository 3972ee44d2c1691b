"""The arguments of the commands that show what there is, report, plot, trace and datasets, and the requests they become."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baechi_ext.datasets import FAMILIES, INSTALLED
from baechi_ext.errors import OptionError
from baechi_runtime.cli.flags.kinds import FILE, FOLDER, SWITCH, WHOLE, Flag, Kind, OneOf, add, becomes, whole

_FOLDER = "a folder with graph.json and plan.json, or with a shard plan, such as `baechi train --out=DIR` writes"
_ONLY = {"make": ("out", "graphs", "seed"), "list": ("folder", "json")}
"""Flags of `datasets` that are for one of its actions."""
DEFAULT_GRAPHS, MOST_GRAPHS = 32, 100


@dataclass(frozen=True, slots=True)
class ShowRequest:
    """A run's folder, and where the command writes what it shows; None: into the run's folder."""

    folder: str
    out: str | None = None
    ranks: str | None = None
    """A folder for a trace of each device by itself."""


@dataclass(frozen=True, slots=True)
class DatasetsRequest:
    """Families of graphs in a folder, to be listed, or where `graphs` is not 0 so many of each to be made with a seed."""

    families: tuple[str, ...]
    folder: Path
    graphs: int = 0
    seed: int = 0


def _even(text: str) -> int:
    """Flag type: an even number from 2 to 100."""
    value = whole(text)
    if value % 2 or not 2 <= value <= MOST_GRAPHS:
        raise argparse.ArgumentTypeError(f"{text!r} is not an even number from 2 to {MOST_GRAPHS}")
    return value


_TRACE_FLAGS: dict[str, Flag] = {
    "out": (FILE, "write the trace to this file, compressed if it ends in .gz (default: trace.json in DIR)"),
    "ranks": (FOLDER, "also write a trace of each device by itself into this folder, as torch's HTA reads ranks"),
}
_DATASETS_FLAGS: dict[str, Flag] = {
    "out": (FOLDER, "make: write FOLDER/FAMILY/graph_00.json.gz, ... and index.json (default datasets)"),
    "graphs": (Kind(_even, "N"), f"make: of each family (default {DEFAULT_GRAPHS}), half for testing"),
    "seed": (WHOLE, "make: architectures and split are drawn from it (default 0)"),
    "folder": (FOLDER, "list: what `make` wrote to (default what comes with the package)"),
    "json": (SWITCH, "list: print the indexes as JSON"),
}


def _of_a_run(what: str, flags: dict[str, Flag]) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[..., ShowRequest]]:
    """The flags, and the request, of a command that shows a run's folder, which is `what`."""

    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", metavar="DIR", help=what)
        add(parser, flags)

    return add_flags, becomes(ShowRequest)


def add_datasets_flags(parser: argparse.ArgumentParser) -> None:
    """make or list, the families, and what belongs to either."""
    families = "; ".join(f"{name}: {text}" for name, text in FAMILIES.items())
    parser.add_argument("action", type=OneOf(tuple(_ONLY)), metavar="ACTION", help="make: graph files; list: what there is of them")
    parser.add_argument("families", type=OneOf(tuple(FAMILIES)), nargs="*", metavar="FAMILY", help=f"{families} (list: default all)")
    add(parser, _DATASETS_FLAGS)


def datasets_request(args: argparse.Namespace) -> DatasetsRequest:
    """The request for `baechi datasets`. Raises OptionError where a flag belongs to the other action, or a family is missing."""
    makes = args.action == "make"
    others = {name: getattr(args, name) for name in _ONLY["list" if makes else "make"]}
    wrong = next((name for name, value in others.items() if value is not None and value is not False), None)  # a seed of 0 is given
    if wrong is not None:
        raise OptionError(f"--{wrong} is not for `baechi datasets {args.action}`; leave it out")
    if makes and not args.families:
        raise OptionError(f"no family is given; choose some of {', '.join(FAMILIES)}")
    families = tuple(dict.fromkeys(args.families or FAMILIES))
    if makes:
        return DatasetsRequest(families, Path(args.out or "datasets"), args.graphs or DEFAULT_GRAPHS, args.seed or 0)
    return DatasetsRequest(families, Path(args.folder or INSTALLED))


REPORT = _of_a_run(_FOLDER, {"out": (FILE, "write the page to this file (default: report.html in DIR)")})
PLOT = _of_a_run(_FOLDER, {"out": (FOLDER, "write the plots to this folder, made if need be (default: DIR)")})
TRACE = _of_a_run("a folder with graph.json and plan.json, such as `baechi train --out=DIR` writes", _TRACE_FLAGS)
DATASETS = (add_datasets_flags, datasets_request)
