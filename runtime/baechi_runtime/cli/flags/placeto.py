"""The arguments of `baechi placeto`: actions, each with flags of its own. Reading them loads no framework."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from baechi_ext.datasets import FAMILIES, INSTALLED, SPLITS
from baechi_ext.errors import OptionError
from baechi_ext.place.traversal import TRAVERSALS
from baechi_runtime.cli.flags import common as flags

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from baechi_runtime.placeto.comparison import ComparisonRequest
    from baechi_runtime.placeto.study import StudyRequest
    from baechi_runtime.placeto.training import TrainingRequest
    from baechi_runtime.report.report import Report

DEFAULT_EVALUATIONS = 4000
ORDERS = ("alpha", "topo", "reversed_topo", "dfs_preorder", "dfs_postorder", "bfs")
"""Those of the published experiment."""
DEVICES, REPEATS, EPISODES = 3, 3, 50
MANY = 10**9


class Action(NamedTuple):
    """An action: a line for menus, its flags, and what it does with them; `run` loads what it needs."""

    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: "Callable[[argparse.Namespace], Report]"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A parser for each of ACTIONS."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="see baechi placeto ACTION --help")
    for name, action in ACTIONS.items():
        sub = actions.add_parser(
            name, help=action.help, description=action.help, allow_abbrev=False, formatter_class=parser.formatter_class
        )
        action.add_flags(sub)
        sub.set_defaults(act=action.run)


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Graphs, and the cluster they are placed on."""
    families = ", ".join(FAMILIES)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help=f"families of `datasets` ({families}), or folders of graph files")
    parser.add_argument("--folder", metavar="FOLDER", default=INSTALLED, help="where the families are (default: in the package)")
    parser.add_argument(
        "--most_graphs", type=flags.at_least_one, metavar="N", help="number of graphs of each source, from its first (default all)"
    )
    flags.add_cluster_flags(parser)


def _train_flags(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--policy", metavar="FILE", help="the policy to train further (default: a new one)")
    group.add_argument("--algorithm", metavar="NAME", help="ppo (default) or reinforce")
    group.add_argument("--embedding", metavar="NAME", help="how a new policy embeds ops: rounds (default), sweep, graphsage or pgnn")
    group.add_argument("--every_step", action="store_true", help="a new policy embeds ops at every step, as published (slow)")
    group.add_argument("--visits", type=flags.at_least_one, metavar="N", help="how often an episode of a new policy visits each op")
    for name, meaning in (
        ("updates", "number of updates of the policy (default 500)"),
        ("graphs", "graphs per update, drawn from the sources (default 4)"),
        ("exam_every", "updates between exams, on the quarter of the graphs that is held out (default 25)"),
        ("workers", "threads that run episodes; the result is the same (default 1)"),
    ):
        group.add_argument(f"--{name}", type=flags.at_least_one, metavar="N", help=meaning)
    group.add_argument(
        "--episodes", type=flags.at_least_one, default=8, metavar="N", help="episodes at once on each graph (default %(default)s)"
    )
    group.add_argument(
        "--patience", type=flags.whole, metavar="N", help="stop after this many exams without an improvement (default 0: never)"
    )
    group.add_argument("--start", metavar="NAME", help="where episodes begin: single (default), random or best")
    for name, meaning in (
        ("learning_rate", "learning rate at the first and at the last update (default 0.001,0.0001)"),
        ("entropy", "weight of the entropy bonus, likewise (default 0.05,0.005)"),
    ):
        group.add_argument(f"--{name}", type=_pair, metavar="A,B", help=meaning)
    group.add_argument("--discount", type=flags.from_zero_to_one, metavar="F", help="discount factor of rewards (default 1)")
    group.add_argument("--seed", type=flags.whole, metavar="N", help="random seed (default 0)")
    group.add_argument("--time_limit", type=flags.positive, metavar="SECONDS", help="stop then; the same command resumes (default none)")
    group.add_argument("--tensorboard", action="store_true", help="write scalars to --out, too (needs tensorboard)")
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FOLDER", required=True, help="folder for policy.json, progress.csv and the state to resume from")
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def training_request_of(args: argparse.Namespace) -> "TrainingRequest":
    """The request for `placeto train`. Raises OptionError for what is not possible."""
    from baechi_ext.place.placeto.policy import PolicyConfig
    from baechi_ext.place.placeto.train import TrainingConfig
    from baechi_runtime.placeto.graphs import Source
    from baechi_runtime.placeto.training import TrainingRequest

    return TrainingRequest(
        sources=tuple(Source(name, Path(args.folder), args.most_graphs) for name in args.sources),
        cluster=flags.cluster_of(args),
        out=Path(args.out),
        config=TrainingConfig(**_given(args, TrainingConfig)),
        policy=args.policy,
        network=PolicyConfig(**_given(args, PolicyConfig)),
        episodes=args.episodes,
        time_limit_seconds=args.time_limit,
        tensorboard=args.tensorboard,
        command=flags.command_of(args),
    )


def _train(args: argparse.Namespace) -> "Report":
    from baechi_runtime.placeto.training import train

    return train(training_request_of(args))


def _evaluate_flags(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument("--policy", metavar="FILE", help="a policy file, instead of the one in the package")
    group.add_argument("--methods", metavar="A,B,...", help="only these of the methods that are compared (default all)")
    group.add_argument(
        "--evaluations",
        type=flags.at_least_one,
        default=DEFAULT_EVALUATIONS,
        metavar="N",
        help="plans that each method may simulate for each graph (default %(default)s)",
    )
    group.add_argument("--seed", type=flags.whole, default=0, metavar="N", help="random seed (default %(default)s)")
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FOLDER", help="write SOURCE.json, with every number, and SOURCE.md, a table")
    group.add_argument("--plot", action="store_true", help="write SOURCE.svg to --out, too, the distributions (needs matplotlib)")
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def comparison_request_of(args: argparse.Namespace) -> "ComparisonRequest":
    """The request for `placeto evaluate`. Raises OptionError for what is not possible."""
    from baechi_runtime.placeto.comparison import ComparisonRequest
    from baechi_runtime.placeto.graphs import Source

    return ComparisonRequest(
        sources=tuple(Source(name, Path(args.folder), args.most_graphs) for name in args.sources),
        cluster=flags.cluster_of(args),
        methods=None if args.methods is None else tuple(args.methods.split(",")),
        policy=args.policy,
        evaluations=args.evaluations,
        seed=args.seed,
        out=None if args.out is None else Path(args.out),
        plot=args.plot,
        command=flags.command_of(args),
    )


def _evaluate(args: argparse.Namespace) -> "Report":
    from baechi_runtime.placeto.comparison import compare

    return compare(comparison_request_of(args))


def _study_flags(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
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
    group.add_argument("--seed", type=flags.whole, default=0, metavar="N", help="random seed (default %(default)s)")
    group.add_argument("--budget", type=flags.positive, metavar="HOURS", help="as many graphs of each source as are expected to fit")
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FOLDER", required=True, help="gets study.md, and runs.csv, with which the same command goes on")
    group.add_argument("--plot", action="store_true", help="write boxes.svg, curves.svg and improvement.svg, too (needs matplotlib)")
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def study_request_of(args: argparse.Namespace) -> "StudyRequest":
    """The request for a study, on 3 devices unless flags say otherwise. Raises OptionError for what is not possible."""
    from baechi_runtime.placeto.study import StudyRequest, StudySettings

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
    return StudyRequest(settings, Path(args.folder), Path(args.out), args.workers, args.budget, args.plot, flags.command_of(args))


def _study(args: argparse.Namespace) -> "Report":
    from baechi_runtime.placeto.study import study

    return study(study_request_of(args))


ACTIONS: dict[str, Action] = {
    "train": Action("train a policy on the graphs of families, or go on with a training", _train_flags, _train),
    "evaluate": Action("compare placeto with other methods on graphs it was not trained on", _evaluate_flags, _evaluate),
    "study": Action("find out which traversal order Placeto learns best in, family by family", _study_flags, _study),
}


def _pair(text: str) -> tuple[float, float]:
    """Flag type: A,B, both at least 0."""
    try:
        first, last = map(float, text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers A,B") from e
    if not (0 <= first < float("inf") and 0 <= last < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers of at least 0")
    return first, last


def _given(args: argparse.Namespace, kind: "type[DataclassInstance]") -> dict[str, Any]:
    """The fields of a dataclass for which flags were given, with their values."""
    return {f.name: value for f in fields(kind) if (value := getattr(args, f.name, None)) is not None}


def _orders(text: str) -> tuple[str, ...]:
    """Flag type: different names of TRAVERSALS with commas."""
    names = tuple(text.split(","))
    for name in names:
        flags.one_of(TRAVERSALS)(name)
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an order twice")
    return names
