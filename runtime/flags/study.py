"""The arguments of `baechi placeto study`. Reading them loads no framework."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from baechi_ext.datasets import SPLITS
from baechi_ext.errors import OptionError
from baechi_ext.place.traversal import TRAVERSALS
from runtime.flags import common as flags

if TYPE_CHECKING:
    from runtime.placeto.study import StudyRequest

ORDERS = ("alpha", "topo", "reversed_topo", "dfs_preorder", "dfs_postorder", "bfs")
"""Those of the published experiment."""
DEVICES, REPEATS, EPISODES = 3, 3, 50
MANY = 10**9


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What a study has besides its sources and their cluster."""
    group = parser.add_argument_group("study")
    orders = ", ".join(name for name in TRAVERSALS if name not in ORDERS)
    group.add_argument("--orders", type=_orders, default=ORDERS, metavar="A,B", help=f"default {','.join(ORDERS)}; there are also {orders}")
    splits = dict.fromkeys(SPLITS)
    group.add_argument("--split", type=flags.one_of(splits), default=SPLITS[0], metavar="NAME", help="train (default) or test")
    for name, default, meaning in (
        ("repeats", REPEATS, "of each order on each graph"),
        ("episodes", EPISODES, "of each training"),
        ("workers", 1, "processes; the result is the same"),
    ):
        group.add_argument(f"--{name}", type=flags.at_least_one, default=default, metavar="N", help=f"{meaning} (default %(default)s)")
    group.add_argument("--seed", type=flags.whole, default=0, metavar="N", help="for all that is drawn (default %(default)s)")
    group.add_argument("--budget", type=flags.positive, metavar="HOURS", help="as many graphs of each source as are expected to fit")
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FOLDER", required=True, help="gets study.md, and runs.csv, with which the same command goes on")
    group.add_argument("--plot", action="store_true", help="write boxes.svg, curves.svg and improvement.svg, too (needs matplotlib)")
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def request_of(args: argparse.Namespace) -> "StudyRequest":
    """What is to be studied, on 3 devices unless flags say otherwise. Raises OptionError for what can't be."""
    from runtime.placeto.study import StudyRequest, StudySettings

    if args.cluster is None and args.num_devices is None and args.num_gpus is None:
        args.num_devices = DEVICES
    if len(set(args.sources)) < len(args.sources):
        raise OptionError(f"a source is given twice among {', '.join(args.sources)}; give each once")
    settings = StudySettings(
        sources=tuple(args.sources),
        split=args.split,
        graphs=args.most_graphs or MANY,
        orders=args.orders,
        repeats=args.repeats,
        episodes=args.episodes,
        cluster=flags.cluster_of(args),
        seed=args.seed,
    )
    return StudyRequest(
        settings, Path(args.folder), Path(args.out), args.workers, args.budget, args.plot, flags.command_of(args)
    )


def _orders(text: str) -> tuple[str, ...]:
    """Flag type: different names of TRAVERSALS with commas."""
    names = tuple(text.split(","))
    for name in names:
        flags.one_of(TRAVERSALS)(name)
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an order twice")
    return names
