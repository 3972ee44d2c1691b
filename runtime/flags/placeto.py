"""The arguments of `baechi placeto`: actions, each with flags of its own. Reading them loads no framework."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from baechi_ext.datasets import FAMILIES, INSTALLED
from runtime.flags import common as flags
from runtime.flags import study as study_flags

if TYPE_CHECKING:
    from runtime.placeto.comparison import ComparisonRequest
    from runtime.placeto.training import TrainingRequest


DEFAULT_EVALUATIONS = 4000


class Report(Protocol):
    """What an action has found."""

    def lines(self) -> list[str]:
        """For a person."""

    def to_json(self) -> dict[str, Any]:
        """For a program."""


class Action(NamedTuple):
    """An action: a line for menus, its flags, and what it does with them; `run` loads what it needs."""

    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]


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
    parser.add_argument("--most_graphs", type=flags.at_least_one, metavar="N", help="of each source, the first so many (default all)")
    flags.add_cluster_flags(parser)


def _train_flags(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--policy", metavar="FILE", help="the policy to begin with (default: one that knows nothing)")
    group.add_argument("--algorithm", metavar="NAME", help="ppo (default) or reinforce")
    group.add_argument("--embedding", metavar="NAME", help="of a new policy: rounds (default), sweep, graphsage or pgnn")
    group.add_argument("--every_step", action="store_true", help="a new policy embeds ops at every step, as published (slow)")
    group.add_argument("--visits", type=flags.at_least_one, metavar="N", help="of a new policy: how often an episode visits a decision")
    for name, meaning in (
        ("updates", "of the policy (default 500)"),
        ("graphs", "for each update, drawn from the sources (default 4)"),
        ("exam_every", "updates between exams on a quarter of the graphs, from which nothing is learned (default 25)"),
        ("workers", "threads that run episodes; the result is the same (default 1)"),
    ):
        group.add_argument(f"--{name}", type=flags.at_least_one, metavar="N", help=meaning)
    group.add_argument("--episodes", type=flags.at_least_one, default=8, metavar="N", help="at once on each graph (default %(default)s)")
    group.add_argument("--patience", type=flags.whole, metavar="N", help="stop after so many exams without a better one (default 0: never)")
    group.add_argument("--start", metavar="NAME", help="where episodes begin: single (default), random or best")
    for name, meaning in (
        ("learning_rate", "at the first update and at the last (default 0.001,0.0001)"),
        ("entropy", "what staying undecided is worth, likewise (default 0.05,0.005)"),
    ):
        group.add_argument(f"--{name}", type=_pair, metavar="A,B", help=meaning)
    group.add_argument("--discount", type=flags.from_zero_to_one, metavar="F", help="of a reward, for each step it comes later (default 1)")
    group.add_argument("--seed", type=flags.whole, metavar="N", help="for all that is drawn (default 0)")
    group.add_argument("--time_limit", type=flags.positive, metavar="SECONDS", help="stop then; the same command goes on (default none)")
    group.add_argument("--tensorboard", action="store_true", help="write scalars to --out, too (needs tensorboard)")
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FOLDER", required=True, help="gets policy.json, progress.csv, and the training to go on with")
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def training_request_of(args: argparse.Namespace) -> "TrainingRequest":
    """What `placeto train` is to do. Raises OptionError for what can't be."""
    from baechi_ext.place.placeto.policy import PolicyConfig
    from baechi_ext.place.placeto.train import TrainingConfig
    from runtime.placeto.graphs import Source
    from runtime.placeto.training import TrainingRequest

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


def _train(args: argparse.Namespace) -> Report:
    from runtime.placeto.training import train

    return train(training_request_of(args))


def _evaluate_flags(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument("--policy", metavar="FILE", help="a policy file instead of the one that comes with the package")
    group.add_argument("--methods", metavar="A,B,...", help="only these of the methods that are compared (default all)")
    group.add_argument(
        "--evaluations",
        type=flags.at_least_one,
        default=DEFAULT_EVALUATIONS,
        metavar="N",
        help="plans that each method may simulate for each graph (default %(default)s)",
    )
    group.add_argument("--seed", type=flags.whole, default=0, metavar="N", help="for all that is drawn (default %(default)s)")
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FOLDER", help="write SOURCE.json, with every number, and SOURCE.md, a table")
    group.add_argument("--plot", action="store_true", help="write SOURCE.svg to --out, too, the distributions (needs matplotlib)")
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def comparison_request_of(args: argparse.Namespace) -> "ComparisonRequest":
    """What `placeto evaluate` is to do. Raises OptionError for what can't be."""
    from runtime.placeto.comparison import ComparisonRequest
    from runtime.placeto.graphs import Source

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


def _evaluate(args: argparse.Namespace) -> Report:
    from runtime.placeto.comparison import compare

    return compare(comparison_request_of(args))


def _study_flags(parser: argparse.ArgumentParser) -> None:
    add_source_flags(parser)
    study_flags.add_flags(parser)


def _study(args: argparse.Namespace) -> Report:
    request = study_flags.request_of(args)
    from runtime.placeto.study import study

    return study(request)


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


def _given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Of a dataclass's fields, those that flags were given for."""
    return {name: value for name in kind.__slots__ if (value := getattr(args, name, None)) is not None}
