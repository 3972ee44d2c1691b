"""The flags that sub-commands share, and the values they become: a Cluster and a PlanRequest."""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from baechi_ext import hybrid
from baechi_ext.cost import scale_links
from baechi_ext.errors import OptionError
from baechi_ext.group.grouping import GroupOptions
from baechi_ext.group.registry import GROUPERS, PLACER_TYPES
from baechi_ext.ir.cluster import Cluster, Device, Link
from baechi_ext.ir.hints import DeviceMap, ExpertFile, Pin
from baechi_ext.ir.numbers import as_number
from baechi_ext.place.adjust import ADJUSTMENTS
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.order_choice import AUTO
from baechi_ext.place.order_choice import HELP as AUTO_HELP
from baechi_ext.place.registry import METHODS, require_taken
from baechi_ext.place.traversal import TRAVERSALS
from baechi_runtime.drivers.pipeline import MAPPED, SEARCHES, PlanRequest

DEFAULT_LINK = Link(us_per_byte=0.0001754, latency_us=134.0)
"""Baechi's own defaults."""
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}
_DEFAULTS = PlanRequest()
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)")


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """The flags `cluster_of` reads."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--cluster", metavar="FILE", help="a cluster file; see docs/files.md")
    group.add_argument("--num_devices", type=number_of_devices, metavar="N", help="this many equal devices, instead of --cluster")
    group.add_argument("--num_gpus", type=number_of_devices, metavar="N", help="the same; ignored if --num_devices is given")
    group.add_argument("--device_memory", type=size_in_bytes, metavar="SIZE", help="memory of each device: 16GiB, 800MB, or bytes")
    group.add_argument("--memory_fraction", type=fraction, metavar="F", help="the fraction of each device's memory that a plan may use")
    group.add_argument(
        "--comm_cost_coeffs",
        type=link_of_coefficients,
        metavar="A,B",
        help="sending n bytes takes A*n + B microseconds on every link (default 0.0001754,134)",
    )


def cluster_of(args: argparse.Namespace, base: Cluster | None = None) -> Cluster:
    """The cluster that the flags describe; what they leave out comes from `base` (a plan's cluster).

    Raises OptionError where they contradict each other or describe no cluster, ClusterError or FileError for a bad file.
    """
    num_devices = args.num_gpus if args.num_devices is None else args.num_devices
    if args.cluster is not None and num_devices is not None:
        raise OptionError("--cluster and --num_devices exclude each other; give one of them")
    cluster = base if args.cluster is None else Cluster.load(args.cluster)
    if num_devices is not None:
        cluster = Cluster.uniform(num_devices, link=DEFAULT_LINK if base is None else base.default)
    if cluster is None:
        raise OptionError("no devices are given; add --num_devices=N or --cluster=FILE")
    if args.comm_cost_coeffs is not None:
        cluster = replace(cluster, default=args.comm_cost_coeffs, pairs={})
    if args.device_memory is not None:
        cluster = replace(cluster, devices=tuple(replace(d, memory_bytes=args.device_memory) for d in cluster.devices))
    if args.memory_fraction is not None:
        if all(d.memory_bytes is None for d in cluster.devices):
            raise OptionError("--memory_fraction needs devices of limited memory; add --device_memory=SIZE")
        cluster = replace(cluster, devices=tuple(_use_part(d, args.memory_fraction) for d in cluster.devices))
    return cluster


def _use_part(device: Device, part: float) -> Device:
    return device if device.memory_bytes is None else replace(device, memory_bytes=int(device.memory_bytes * part))


def add_placing_flags(parser: argparse.ArgumentParser, *, method: bool = True) -> None:
    """The flags `plan_request` reads; without --placement_method where that is asked for."""
    group = parser.add_argument_group("placing")
    if method:
        add_choice(group, "--placement_method", {**METHODS, hybrid.METHOD: (hybrid.HELP,)}, _DEFAULTS.method)
    group.add_argument("--initial_plan", metavar="FILE", help="auto, refine: a plan file of this graph to start the search from")
    group.add_argument("--expert_file", metavar="FILE", help="expert: a JSON object of op or colocation names -> device; see docs/files.md")
    group.add_argument(
        "--device_map",
        metavar="FILE",
        help="a device_map of accelerate's as JSON, module name -> device: what --placement_method=expert does, and where auto and refine "
        "start",
    )
    group.add_argument(
        "--pin",
        type=Pin.parse,
        action="append",
        default=[],
        metavar="PATTERN=DEVICE",
        help="keep what PATTERN names on this device (its index or name), whatever the method; PATTERN is the name of a module, which "
        "covers what is below it, or of a parameter, an op's id or a colocation string; *, ? and [...] match as in a shell; repeatable",
    )
    add_choice(group, "--grouper", GROUPERS, None, f"{_DEFAULTS.grouper}, with TensorFlow grain")
    add_choice(group, "--placer_type", PLACER_TYPES, None, f"{_DEFAULTS.placer_type}, with TensorFlow fusion")
    group.add_argument(
        "--only_forward", action="store_true", help="place forward ops only; each backward op goes where its forward op goes"
    )
    group.add_argument(
        "--sct_threshold",
        type=from_zero_to_one,
        default=_DEFAULTS.options.sct_threshold,
        metavar="F",
        help="m_sct: a successor whose LP value is at most this is a favourite child (default %(default)s)",
    )
    add_choice(group, "--traversal_order", {AUTO: (AUTO_HELP,), **TRAVERSALS}, None)
    group.add_argument("--placeto_policy", metavar="FILE", help="placeto: a policy file, instead of the one in the package")
    group.add_argument(
        "--placeto_episodes",
        type=whole,
        default=_DEFAULTS.options.placeto_episodes,
        metavar="N",
        help="placeto: number of episodes to train the policy on this graph, within --time_limit (default %(default)s)",
    )
    group.add_argument(
        "--seed", type=whole, default=_DEFAULTS.options.seed, metavar="N", help="random seed of methods that use one (default %(default)s)"
    )
    group.add_argument(
        "--time_limit",
        type=positive,
        metavar="SECONDS",
        help="limit of solvers and searches (default 10 for auto and refine, else 60)",
    )
    _add_further_flags_of_baechi(parser.add_argument_group("placing, further flags of Baechi's"))


def _add_further_flags_of_baechi(group: argparse._ArgumentGroup) -> None:
    for flag, meaning in (
        ("only_important_ops", "an op that takes hardly any time goes where a neighbour goes"),
        ("consider_all_edges_in_grouping", "colocation: edges of 0 bytes into update ops count, too"),
        ("resolve_cycle", "colocation: one node per group; edges that close a cycle are reversed"),
        ("fusion_check_disjoint_paths", "fusion: fuse wherever a search finds no second path"),
        ("fusion_allow_cycle", "fusion: fuse all connected ops of a group; edges that close a cycle are reversed"),
    ):
        group.add_argument(f"--{flag}", action="store_true", help=meaning)
    add_choice(group, "--adjustment_method", ADJUSTMENTS, _DEFAULTS.adjustment_method)
    group.add_argument(
        "--adjustment_with_memory_limit",
        action="store_true",
        help="a group goes to the first of its devices with room, in the method's order",
    )
    group.add_argument("--comm_cost_factor", type=positive, default=1.0, metavar="F", help="factor on the links' costs (default 1)")
    group.add_argument(
        "--cost_factor",
        type=positive,
        default=_DEFAULTS.cost_factor,
        metavar="F",
        help="plan with wrong costs: each op's time and each link's costs times a random factor from 1 to F (see --seed); the plan is "
        "judged with the right ones (default 1)",
    )
    group.add_argument("--placer_memory_fraction", type=fraction, default=1.0, metavar="F", help="factor on --memory_fraction (default 1)")


def placers_view(args: argparse.Namespace, cluster: Cluster) -> Cluster:
    """The cluster as --comm_cost_factor and --placer_memory_fraction say that the placer is to see it.

    Raises OptionError for a part of memory that is unlimited.
    """
    if args.placer_memory_fraction != 1 and all(d.memory_bytes is None for d in cluster.devices):
        raise OptionError("--placer_memory_fraction needs devices of limited memory; add --device_memory=SIZE")
    devices = tuple(_use_part(device, args.placer_memory_fraction) for device in cluster.devices)
    return scale_links(replace(cluster, devices=devices), args.comm_cost_factor)


def plan_request(args: argparse.Namespace) -> PlanRequest:
    """The request that the placing flags describe. Raises OptionError where they contradict each other, FileError for a bad expert file."""
    if args.expert_file is not None and args.placement_method != "expert":
        raise OptionError("--expert_file is only for --placement_method=expert; drop it or choose that method")
    if args.initial_plan is not None and args.placement_method not in SEARCHES:
        raise OptionError(f"--initial_plan is only for --placement_method={' and '.join(SEARCHES)}; drop it or choose one of them")
    _check_device_map(args)
    placer = "auto" if args.placement_method == hybrid.METHOD else args.placement_method
    seconds = args.time_limit or METHODS[placer].time_limit_seconds
    options = PlaceOptions(
        seed=args.seed,
        sct_threshold=args.sct_threshold,
        time_limit_seconds=seconds,
        traversal_order=args.traversal_order,
        placeto_policy=args.placeto_policy,
        placeto_episodes=args.placeto_episodes,
    )
    require_taken(placer, options)
    return PlanRequest(
        method=args.placement_method,
        grouper=args.grouper or _DEFAULTS.grouper,
        placer_type=args.placer_type or _DEFAULTS.placer_type,
        only_forward=args.only_forward,
        expert_file=None if args.expert_file is None else ExpertFile.load(args.expert_file),
        initial_plan=args.initial_plan,
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


def _check_device_map(args: argparse.Namespace) -> None:
    if args.device_map is None:
        return
    if args.placement_method not in MAPPED:
        raise OptionError(f"--device_map is only for --placement_method={', '.join(MAPPED)}; drop it or choose one of them")
    for other in ("expert_file", "initial_plan"):
        if getattr(args, other) is not None:
            raise OptionError(f"--device_map and --{other} exclude each other; give one of them")


def command_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The command line, word by word."""
    return ("baechi", *getattr(args, "command_line", ()))


def add_output_flags(parser: argparse.ArgumentParser, out: str | None = None) -> None:
    """--json, and --out where the command writes a file (`out` says which)."""
    group = parser.add_argument_group("output")
    if out is not None:
        group.add_argument("--out", metavar="FILE", help=out)
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def add_choice(
    group: argparse._ActionsContainer,
    flag: str,
    table: Mapping[str, tuple[Any, ...]],
    default: str | None,
    otherwise: str = "the method's own",
) -> None:
    """A flag that takes one of the keys of `table`, whose entries end with a line on each."""
    lines = "\n".join(f"{name}: {getattr(entry, 'help', entry[-1])}" for name, entry in table.items()).replace("%", "%%")
    said = f"one of these (default {otherwise if default is None else default})"
    group.add_argument(flag, type=one_of(table), default=default, metavar="NAME", help=f"{said}\n{lines}")


def one_of(names: Mapping[str, object]) -> Callable[[str], str]:
    """A flag type that takes one of `names` and lists them where it gets another."""

    def choose(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown value {text!r}; choose one of {', '.join(names)}")
        return text

    return choose


def whole(text: str) -> int:
    """Flag type: a whole number of at least 0."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 999999999")
    return int(text)


def at_least_one(text: str) -> int:
    """Flag type: a whole number of at least 1."""
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def number_of_devices(text: str) -> int:
    """Flag type: a whole number from 1 to 1024."""
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1024")
    return int(text)


def size_in_bytes(text: str) -> int:
    """Flag type: bytes, written plainly or with a unit: KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 16GiB, 800MB or 1000000 (bytes)")
    number = int(match[1]) if "." not in match[1] else float(match[1])
    return int(number * _UNITS[match[2].upper()])


def fraction(text: str) -> float:
    """Flag type: a number above 0 and up to 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def from_zero_to_one(text: str) -> float:
    """Flag type: a number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def positive(text: str) -> float:
    """Flag type: a number above 0."""
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def link_of_coefficients(text: str) -> Link:
    """Flag type: `a,b`, both at least 0; a transfer of n bytes takes a * n + b microseconds."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers a,b (microseconds per byte, microseconds)")
    slope, latency = map(_number, parts)
    if slope < 0 or latency < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a negative coefficient; expected at least 0")
    return Link(us_per_byte=slope, latency_us=latency)


def _number(text: str) -> float:
    try:
        return as_number(float(text), "it", ValueError, minimum=float("-inf"))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number") from e
