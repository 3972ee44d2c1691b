"""The flags of the commands about plans of graphs in files: place, simulate, explain, diff and export."""

import argparse

from baechi_ext.ir.hints import Pin
from baechi_runtime.cli.flags import config as config_flags
from baechi_runtime.cli.flags.common import add_choice, add_cluster_flags, add_output_flags, add_placing_flags, positive, whole
from baechi_runtime.report.exports import DEFAULT, FORMATS


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi place`."""
    parser.add_argument("graph", metavar="GRAPH", help="a graph file; see docs/files.md")
    add_placing_flags(parser)
    add_cluster_flags(parser)
    config_flags.add_flag(parser)
    add_output_flags(parser, out="write the plan to this file")


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi simulate`."""
    parser.add_argument("graph", metavar="GRAPH", help="a graph file; see docs/files.md")
    parser.add_argument("plan", metavar="PLAN", help="a plan file of this graph; its cluster is used unless flags override it")
    add_cluster_flags(parser)
    group = parser.add_argument_group("what if")
    group.add_argument("--comm_cost_factor", type=positive, default=1.0, metavar="F", help="all links cost this many times as much")
    group.add_argument(
        "--cost_factor",
        type=positive,
        default=1.0,
        metavar="F",
        help="each op's time and each link's costs are a random number from 1 to F, drawn from --seed, times as much",
    )
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="for --cost_factor (default %(default)s)")
    group.add_argument(
        "--pin",
        type=Pin.parse,
        action="append",
        default=[],
        metavar="PATTERN=DEVICE",
        help="what is called so is on this device (its index or name), with all that shares its colocation group; PATTERN as in "
        "`baechi place --pin`; may be given several times",
    )
    add_output_flags(parser)


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi explain`."""
    parser.add_argument("plan", metavar="PLAN", help="a plan or shard plan file, or the folder that `baechi train --out` wrote")
    parser.add_argument(
        "op",
        metavar="OP",
        nargs="?",
        help="an op's id: why it is where it is, and the step with it on each other device; or the name of a module, a parameter or a "
        "colocation group, which may hold *, ? and [...]: the same for all of its ops together; or a shard plan's layer: why it is so",
    )
    _add_graph_flag(parser)
    add_cluster_flags(parser)
    add_output_flags(parser)


def add_diff_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi diff`."""
    parser.add_argument("before", metavar="A", help="a plan or shard plan file, or the folder that `baechi train --out` wrote")
    parser.add_argument("after", metavar="B", help="another one of the same graph")
    _add_graph_flag(parser)
    add_output_flags(parser)


def _add_graph_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graph", metavar="FILE", help="the plan's graph (default: graph.json beside the plan)")


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi export`."""
    add_choice(parser, "--format", {name: (text,) for name, (_, text) in FORMATS.items()}, DEFAULT)
    add_device_map_flags(parser)


def add_device_map_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi export-device-map`, which is that with its format chosen."""
    parser.set_defaults(format=DEFAULT)
    parser.add_argument("graph", metavar="GRAPH", help="a graph file whose ops know their modules: one that `baechi train --out` wrote")
    parser.add_argument("plan", metavar="PLAN", help="a plan file of this graph")
    add_output_flags(parser, out="write the result to this file")
