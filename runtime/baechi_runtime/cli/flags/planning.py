"""The flags of the commands about plans of graphs in files, place, simulate, explain, diff and export, and the requests they become."""

import argparse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baechi_ext.cost.hardware import HARDWARE, Hardware
from baechi_ext.errors import OptionError
from baechi_ext.ir.cluster import Cluster
from baechi_ext.ir.files import require_there, require_writable
from baechi_runtime.cli.flags import config as config_flags
from baechi_runtime.cli.flags.kinds import FACTOR, FILE, WHOLE, Flag, add, add_group, add_output_flags, add_pin, becomes, explained
from baechi_runtime.cli.flags.placing import (
    PUBLISHED,
    ClusterRequest,
    add_cluster_flags,
    add_placing_flags,
    hardware_flags,
    is_elsewhere,
    placers_view,
    plan_request,
)
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.report.exports import DEFAULT, FORMATS

if TYPE_CHECKING:
    from baechi_runtime.report.comparing_plans import WhatIf


@dataclass(frozen=True, slots=True)
class PlaceRequest:
    """A plan to make of the graph in a file, and the file it goes to."""

    graph: str
    cluster: Cluster
    plan: PlanRequest
    out: str | None
    hardware: Hardware | None = None
    """The hardware that the devices are of, for which costs are made; None: the graph's own costs count."""
    measured_on: str | None = None
    """The name of the hardware that the graph's costs are of; None: its counts are taken instead."""


@dataclass(frozen=True, slots=True)
class SimulateRequest:
    """A graph's file, and what is to be simulated of it."""

    graph: str
    what_if: "WhatIf"


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """A plan's file or folder, one op of it where that is asked for, and what is different about the cluster."""

    plan: str
    op: str | None
    graph: str | None
    cluster: ClusterRequest


@dataclass(frozen=True, slots=True)
class DiffRequest:
    """Files or folders of two plans of a graph."""

    before: str
    after: str
    graph: str | None = None


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A plan's file, and the format and file it is to be written to."""

    graph: str
    plan: str
    format: str
    out: str | None = None


_WHAT_IF: dict[str, Flag] = {
    "comm_cost_factor": (FACTOR, "all links cost this many times as much", 1.0),
    "cost_factor": (FACTOR, "multiply each op's time and each link's cost by a random factor from 1 to F (drawn from --seed)", 1.0),
    "seed": (WHOLE, "for --cost_factor (default %(default)s)", 0),
}
_PIN = (
    "what is called so is on this device (its index or name), with all that shares its colocation group; PATTERN as in "
    "`baechi place --pin`; may be given several times"
)
_OP = (
    "an op's id: why it is where it is, and the step with it on each other device; or the name of a module, a parameter or a colocation "
    "group, which may hold *, ? and [...]: the same for all of its ops together; or a shard plan's layer: why it is so"
)
_GRAPH: dict[str, Flag] = {"graph": (FILE, "the plan's graph (default: graph.json beside the plan)")}


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi place`."""
    parser.add_argument("graph", metavar="GRAPH", help="a graph file; see docs/files.md")
    add_placing_flags(parser)
    add_cluster_flags(parser)
    add_group(parser, "hardware", hardware_flags("GRAPH", PUBLISHED))
    config_flags.add_flag(parser, {"cluster", "num_devices", "num_gpus"})
    add_output_flags(parser, out="write the plan to this file")


def place_request(args: argparse.Namespace) -> PlaceRequest:
    """The request for `baechi place`. Raises OptionError where flags contradict each other, FileError for a bad file."""
    plan, asked = plan_request(args), ClusterRequest.of(args)
    hardware = HARDWARE[args.hardware] if is_elsewhere(args) else None
    if hardware is not None:
        if asked.num_devices is None:
            raise OptionError(f"--hardware={args.hardware} is what the devices are; add --num_devices=N, without --cluster")
        asked = replace(asked, file=hardware.cluster(asked.num_devices), num_devices=None)
    require_there(args.graph, "graph")
    request = PlaceRequest(args.graph, placers_view(args, asked.cluster()), plan, args.out, hardware, args.measured_on)
    if args.out is not None:
        require_writable(args.out)
    return request


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi simulate`."""
    parser.add_argument("graph", metavar="GRAPH", help="a graph file; see docs/files.md")
    parser.add_argument("plan", metavar="PLAN", help="a plan file of this graph; its cluster is used unless flags override it")
    add_cluster_flags(parser)
    add_pin(add_group(parser, "what if", _WHAT_IF), _PIN)
    add_output_flags(parser)


def simulate_request(args: argparse.Namespace) -> SimulateRequest:
    """The request for `baechi simulate`. Raises OptionError where flags contradict each other, FileError for a bad cluster file."""
    from baechi_runtime.report.comparing_plans import WhatIf

    cluster, changes = ClusterRequest.of(args), (args.comm_cost_factor, args.cost_factor, args.seed)
    return SimulateRequest(args.graph, WhatIf(args.plan, cluster.file, cluster.cluster, *changes, tuple(args.pin)))


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi explain`."""
    parser.add_argument("plan", metavar="PLAN", help="a plan or shard plan file, or the folder that `baechi train --out` wrote")
    parser.add_argument("op", metavar="OP", nargs="?", help=_OP)
    add(parser, _GRAPH)
    add_cluster_flags(parser)
    add_output_flags(parser)


def explain_request(args: argparse.Namespace) -> ExplainRequest:
    """The request for `baechi explain`. Raises OptionError where flags contradict each other, FileError for a bad cluster file."""
    return ExplainRequest(args.plan, args.op, args.graph, ClusterRequest.of(args))


def add_diff_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi diff`."""
    parser.add_argument("before", metavar="A", help="a plan or shard plan file, or the folder that `baechi train --out` wrote")
    parser.add_argument("after", metavar="B", help="another one of the same graph")
    add(parser, _GRAPH)
    add_output_flags(parser)


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi export`."""
    add(parser, {"format": explained({name: (text,) for name, (_, text) in FORMATS.items()}, DEFAULT)})
    add_device_map_flags(parser)


def add_device_map_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `baechi export-device-map`, which is that with its format chosen."""
    parser.set_defaults(format=DEFAULT)
    parser.add_argument("graph", metavar="GRAPH", help="a graph file whose ops know their modules: one that `baechi train --out` wrote")
    parser.add_argument("plan", metavar="PLAN", help="a plan file of this graph")
    add_output_flags(parser, out="write the result to this file (default: stdout)")


PLACE = (add_place_flags, place_request)
SIMULATE = (add_simulate_flags, simulate_request)
EXPLAIN = (add_explain_flags, explain_request)
DIFF = (add_diff_flags, becomes(DiffRequest))
EXPORT = (add_export_flags, becomes(ExportRequest))
EXPORT_DEVICE_MAP = (add_device_map_flags, becomes(ExportRequest))
