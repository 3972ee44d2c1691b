"""The flags that say where ops are placed and how, and the ClusterRequest and PlanRequest they become."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from baechi_ext import hybrid
from baechi_ext.cost import scale_links
from baechi_ext.cost.hardware import CPU, HARDWARE
from baechi_ext.errors import OptionError
from baechi_ext.group.grouping import GroupOptions
from baechi_ext.group.registry import GROUPERS, PLACER_TYPES
from baechi_ext.ir.cluster import DEFAULT_LINK, Cluster, Link
from baechi_ext.ir.hints import DeviceMap, ExpertFile
from baechi_ext.ir.plan import PlanFile
from baechi_ext.place.adjust import ADJUSTMENTS
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.order_choice import AUTO
from baechi_ext.place.order_choice import HELP as AUTO_HELP
from baechi_ext.place.registry import METHODS
from baechi_ext.place.traversal import TRAVERSALS
from baechi_runtime.cli.flags import kinds
from baechi_runtime.cli.flags.kinds import Flag
from baechi_runtime.drivers.pipeline import PlanRequest

_DEFAULTS = PlanRequest()
_CLUSTER: dict[str, Flag] = {
    "cluster": (kinds.FILE, "a cluster file; see docs/files.md"),
    "num_devices": (kinds.DEVICES, "this many equal devices, instead of --cluster"),
    "num_gpus": (kinds.DEVICES, "the same; ignored if --num_devices is given"),
    "device_memory": (kinds.SIZE, "memory of each device: 16GiB, 800MB, or bytes"),
    "memory_fraction": (kinds.FRACTION, "the fraction of each device's memory that a plan may use"),
    "comm_cost_coeffs": (kinds.LINK, "sending n bytes takes A*n + B microseconds on every link (default 0.0001754,134)"),
}


_HERE = "this machine's cores, which are probed"


def hardware_flags(costs: str, names: Mapping[str, str]) -> dict[str, Flag]:
    """--hardware, which takes one of these names, and --measured_on for the `costs` of that command."""
    lines = "\n".join(f"{name}: {text}" for name, text in names.items())
    measured = f"the hardware that {costs} was measured on, whose times are then scaled; without it operations and bytes are counted"
    return {
        "hardware": (
            kinds.choice(names),
            f"plan for devices of this kind, which need not be here, and run nothing; see docs/hardware.md\n{lines}",
        ),
        "measured_on": (kinds.choice((*HARDWARE, CPU)), measured),
    }


def is_elsewhere(args: argparse.Namespace) -> bool:
    """True if --hardware is given. Raises OptionError for --measured_on alone."""
    if args.hardware is None and args.measured_on is not None:
        raise OptionError("--measured_on is for --hardware, whose costs are made of the measured ones; give that as well")
    return args.hardware is not None


PUBLISHED = {name: hardware.source for name, hardware in HARDWARE.items()}
PUBLISHED_AND_HERE = {**PUBLISHED, CPU: _HERE}


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that a ClusterRequest is made of."""
    kinds.add_group(parser, "cluster", _CLUSTER)


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """A cluster as flags describe it: from a file or so many equal devices, and what is different there; None: as it is."""

    file: Cluster | None = None
    num_devices: int | None = None
    link: Link | None = None
    memory_bytes: int | None = None
    memory_fraction: float | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> "ClusterRequest":
        """The request of the flags. Raises OptionError where they contradict each other, ClusterError or FileError for a bad file."""
        num_devices = args.num_gpus if args.num_devices is None else args.num_devices
        if args.cluster is not None and num_devices is not None:
            raise OptionError("--cluster and --num_devices cannot be used together; give one of them")
        file = None if args.cluster is None else Cluster.load(args.cluster)
        return cls(file, num_devices, args.comm_cost_coeffs, args.device_memory, args.memory_fraction)

    def cluster(self, base: Cluster | None = None) -> Cluster:
        """The cluster; what the flags leave out comes from `base` (a plan's cluster). Raises OptionError where they describe none."""
        cluster = self.file or base
        if self.num_devices is not None:
            like = Cluster.uniform(1, link=DEFAULT_LINK) if base is None else base
            cluster = Cluster.uniform(self.num_devices, link=like.default, parallel_transfers=like.parallel_transfers)
        if cluster is None:
            raise OptionError("no devices are given; add --num_devices=N or --cluster=FILE")
        if self.link is not None:
            cluster = replace(cluster, default=self.link, pairs={})
        if self.memory_bytes is not None:
            cluster = cluster.each_with("memory_bytes", [self.memory_bytes] * len(cluster))
        return cluster if self.memory_fraction is None else _part_of_memory(cluster, self.memory_fraction, "memory_fraction")


def _part_of_memory(cluster: Cluster, part: float, flag: str) -> Cluster:
    """The cluster with this part of each device's memory. Raises OptionError where all of it is unlimited."""
    if all(d.memory_bytes is None for d in cluster.devices):
        raise OptionError(f"--{flag} needs devices of limited memory; add --device_memory=SIZE")
    return cluster.each_with("memory_bytes", [None if d.memory_bytes is None else int(d.memory_bytes * part) for d in cluster.devices])


def placers_view(args: argparse.Namespace, cluster: Cluster) -> Cluster:
    """The cluster as --comm_cost_factor and --placer_memory_fraction say that the placer is to see it.

    Raises OptionError for a part of memory that is unlimited.
    """
    if args.placer_memory_fraction != 1:
        cluster = _part_of_memory(cluster, args.placer_memory_fraction, "placer_memory_fraction")
    return scale_links(cluster, args.comm_cost_factor)


_PIN = (
    "keep what PATTERN names on this device (its index or name), whatever the method; PATTERN is the name of a module, which covers what "
    "is below it, or of a parameter, an op's id or a colocation string; *, ? and [...] match as in a shell; repeatable"
)
_MAP = "a device_map of accelerate's as JSON, module name -> device: what --placement_method=expert does, and where auto and refine start"
_STARTS: dict[str, Flag] = {
    "initial_plan": (kinds.FILE, "auto, refine: a plan file of this graph to start the search from"),
    "expert_file": (kinds.FILE, "expert: a JSON object of op or colocation names -> device; see docs/files.md"),
    "device_map": (kinds.FILE, _MAP),
}
_SEED = "random seed of methods that use one; of a built-in model also of weights, inputs and dropout (default %(default)s)"
_PLACING: dict[str, Flag] = {
    "grouper": kinds.explained(GROUPERS, None, f"{_DEFAULTS.grouper}, with TensorFlow grain"),
    "placer_type": kinds.explained(PLACER_TYPES, None, f"{_DEFAULTS.placer_type}, with TensorFlow fusion"),
    "only_forward": (kinds.SWITCH, "place forward ops only; each backward op goes where its forward op goes"),
    "sct_threshold": (
        kinds.SHARE,
        "m_sct: a successor whose LP value is at most this is a favourite child (default %(default)s)",
        _DEFAULTS.options.sct_threshold,
    ),
    "traversal_order": kinds.explained({AUTO: (AUTO_HELP,), **TRAVERSALS}),
    "placeto_policy": (kinds.FILE, "placeto: a policy file, instead of the one in the package"),
    "placeto_episodes": (
        kinds.WHOLE,
        "placeto: number of episodes to train the policy on this graph, within --time_limit (default %(default)s)",
        _DEFAULTS.options.placeto_episodes,
    ),
    "seed": (kinds.WHOLE, _SEED, _DEFAULTS.options.seed),
    "time_limit": (kinds.SECONDS, "limit of solvers and searches (default 10 for auto and refine, else 60)"),
}
_WRONG_COSTS = (
    "plan with wrong costs: each op's time and each link's costs times a random factor from 1 to F (see --seed); the plan is judged with "
    "the right ones (default 1)"
)
_OF_BAECHI: dict[str, Flag] = {
    "only_important_ops": (kinds.SWITCH, "an op that takes hardly any time goes where a neighbour goes"),
    "consider_all_edges_in_grouping": (kinds.SWITCH, "colocation: edges of 0 bytes into update ops count, too"),
    "resolve_cycle": (kinds.SWITCH, "colocation: one node per group; edges that close a cycle are reversed"),
    "fusion_check_disjoint_paths": (kinds.SWITCH, "fusion: fuse wherever a search finds no second path"),
    "fusion_allow_cycle": (kinds.SWITCH, "fusion: fuse all connected ops of a group; edges that close a cycle are reversed"),
    "adjustment_method": kinds.explained(ADJUSTMENTS, _DEFAULTS.adjustment_method),
    "adjustment_with_memory_limit": (kinds.SWITCH, "a group goes to the first of its devices with room, in the method's order"),
    "comm_cost_factor": (kinds.FACTOR, "factor on the links' costs (default 1)", 1.0),
    "cost_factor": (kinds.FACTOR, _WRONG_COSTS, _DEFAULTS.cost_factor),
    "placer_memory_fraction": (kinds.FRACTION, "factor on --memory_fraction (default 1)", 1.0),
}
OF_PLANS = {*_STARTS, "pin", *_PLACING, *_OF_BAECHI} - {"seed", "placer_memory_fraction"}
"""Flags that are about the plan of a step and nothing else."""


def add_placing_flags(parser: argparse.ArgumentParser, *, method: bool = True) -> None:
    """The flags `plan_request` reads; without --placement_method where that is asked for."""
    group = parser.add_argument_group("placing")
    if method:
        kinds.add(group, {"placement_method": kinds.explained({**METHODS, hybrid.METHOD: (hybrid.HELP,)}, _DEFAULTS.method)})
    kinds.add(group, _STARTS)
    kinds.add_pin(group, _PIN)
    kinds.add(group, _PLACING)
    kinds.add_group(parser, "placing, further flags of Baechi's", _OF_BAECHI)


def plan_request(args: argparse.Namespace) -> PlanRequest:
    """The request that the placing flags describe. Raises OptionError where they contradict each other, FileError for bad files."""
    placer = "auto" if args.placement_method == hybrid.METHOD else args.placement_method
    options = PlaceOptions(**kinds.named(PlaceOptions, args), time_limit_seconds=args.time_limit or METHODS[placer].time_limit_seconds)
    return PlanRequest(
        method=args.placement_method,
        grouper=args.grouper or _DEFAULTS.grouper,
        placer_type=args.placer_type or _DEFAULTS.placer_type,
        only_forward=args.only_forward,
        expert_file=None if args.expert_file is None else ExpertFile.load(args.expert_file),
        initial_plan=None if args.initial_plan is None else PlanFile.load(args.initial_plan),
        device_map=None if args.device_map is None else DeviceMap.load(args.device_map),
        pins=tuple(args.pin),
        options=options,
        group_options=GroupOptions(
            only_important_ops=args.only_important_ops,
            consider_all_edges=args.consider_all_edges_in_grouping,
            resolve_cycle=args.resolve_cycle,
            check_disjoint_paths=args.fusion_check_disjoint_paths,
            allow_cycle=args.fusion_allow_cycle,
        ),
        adjustment_method=args.adjustment_method,
        adjustment_with_memory_limit=args.adjustment_with_memory_limit,
        cost_factor=args.cost_factor,
    )
