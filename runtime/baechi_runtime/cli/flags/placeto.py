"""The arguments of `baechi placeto`: actions, each with flags of its own. Reading them loads no framework."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from baechi_ext.datasets import FAMILIES, INSTALLED, SPLITS
from baechi_ext.place.traversal import TRAVERSALS
from baechi_runtime.cli.flags import kinds
from baechi_runtime.cli.flags.kinds import Flag, Kind
from baechi_runtime.cli.flags.placing import ClusterRequest, add_cluster_flags

if TYPE_CHECKING:
    from baechi_runtime.report.findings import Findings

ORDERS = ("alpha", "topo", "reversed_topo", "dfs_preorder", "dfs_postorder", "bfs")
"""Those of the published experiment."""
DEVICES = 3
MANY = 10**9


def _pair(text: str) -> tuple[float, float]:
    """Flag type: A,B, both at least 0."""
    try:
        first, last = map(float, text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers A,B") from e
    if not (0 <= first < float("inf") and 0 <= last < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers of at least 0")
    return first, last


def _orders(text: str) -> tuple[str, ...]:
    """Flag type: different names of TRAVERSALS with commas."""
    names = kinds.listed(text)
    for name in names:
        kinds.OneOf(tuple(TRAVERSALS))(name)
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an order twice")
    return names


_SOURCES: dict[str, Flag] = {
    "folder": (kinds.FOLDER, "where the families are (default: in the package)", INSTALLED),
    "most_graphs": (kinds.COUNT, "number of graphs of each source, from its first (default all)"),
}
_TRAINING: dict[str, Flag] = {
    "policy": (kinds.FILE, "the policy to train further (default: a new one)"),
    "algorithm": (kinds.NAME, "ppo (default) or reinforce"),
    "visits": (kinds.COUNT, "how often an episode of a new policy visits each op (default 1)"),
    "updates": (kinds.COUNT, "number of updates of the policy (default 500)"),
    "graphs": (kinds.COUNT, "graphs per update, drawn from the sources (default 4)"),
    "exam_every": (kinds.COUNT, "updates between exams, on the quarter of the graphs that is held out (default 25)"),
    "workers": (kinds.COUNT, "threads that run episodes; the result is the same (default 1)"),
    "episodes": (kinds.COUNT, "episodes at once on each graph (default %(default)s)", 8),
    "patience": (kinds.WHOLE, "stop after this many exams without an improvement (default 0: never)"),
    "start": (kinds.NAME, "where episodes begin: single (default), random or best"),
    "learning_rate": (Kind(_pair, "A,B"), "learning rate at the first and at the last update (default 0.001,0.0001)"),
    "entropy": (Kind(_pair, "A,B"), "weight of the entropy bonus, likewise (default 0.05,0.005)"),
    "discount": (kinds.SHARE, "discount factor of rewards (default 1)"),
    "seed": (kinds.WHOLE, "random seed (default 0)"),
    "time_limit": (kinds.SECONDS, "stop then; the same command resumes (default none)"),
    "tensorboard": (kinds.SWITCH, "write scalars to --out, too (needs tensorboard)"),
}
_COMPARISON: dict[str, Flag] = {
    "policy": (kinds.FILE, "a policy file, instead of the one in the package"),
    "methods": (Kind(kinds.listed, "A,B,..."), "only these of the methods that are compared (default all)"),
    "evaluations": (kinds.COUNT, "plans that each method may simulate for each graph (default %(default)s)", 4000),
    "seed": (kinds.WHOLE, "random seed (default %(default)s)", 0),
}
_OTHER_ORDERS = ", ".join(name for name in TRAVERSALS if name not in ORDERS)
_STUDY: dict[str, Flag] = {
    "orders": (Kind(_orders, "A,B"), f"default {','.join(ORDERS)}; there are also {_OTHER_ORDERS}", ORDERS),
    "split": (kinds.choice(SPLITS), "train (default) or test", SPLITS[0]),
    "repeats": (kinds.COUNT, "of each order on each graph (default %(default)s)", 3),
    "episodes": (kinds.COUNT, "of each training (default %(default)s)", 50),
    "workers": (kinds.COUNT, "processes; the result is the same (default %(default)s)", 1),
    "seed": (kinds.WHOLE, "random seed (default %(default)s)", 0),
    "budget": (Kind(kinds.positive, "HOURS"), "as many graphs of each source as are expected to fit"),
}


@dataclass(frozen=True)
class PlacetoRequest:
    """Work on learned placers, and the folder it writes into."""

    out: Path | None
    run: "Callable[[], Findings]"


class Action(NamedTuple):
    """An action: a line for menus, its own flags under a title, what --out and --plot do, and the request, which loads what it needs."""

    help: str
    title: str
    table: dict[str, Flag]
    out: str
    needs_out: bool
    plot: str
    request: Callable[[argparse.Namespace], PlacetoRequest]

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Graphs, the cluster they are placed on, the action's own flags, and its output."""
        families = ", ".join(FAMILIES)
        parser.add_argument("sources", nargs="+", metavar="SOURCE", help=f"families of `datasets` ({families}), or folders of graph files")
        kinds.add(parser, _SOURCES)
        add_cluster_flags(parser)
        kinds.add_group(parser, self.title, self.table)
        group = parser.add_argument_group("output")
        group.add_argument("--out", metavar="FOLDER", required=self.needs_out, help=self.out)
        kinds.add(group, {"plot": (kinds.SWITCH, self.plot), "json": kinds.JSON} if self.plot else {"json": kinds.JSON})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A parser for each of ACTIONS."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, help="see baechi placeto ACTION --help")
    for name, action in ACTIONS.items():
        sub = actions.add_parser(
            name, help=action.help, description=action.help, allow_abbrev=False, formatter_class=parser.formatter_class
        )
        action.add_flags(sub)
        sub.set_defaults(action=name)


def request_of(args: argparse.Namespace) -> PlacetoRequest:
    """The request for `baechi placeto`. Raises OptionError for what is not possible, FileError for a bad cluster file."""
    return ACTIONS[args.action].request(args)


def _on_sources(args: argparse.Namespace) -> dict[str, Any]:
    from baechi_runtime.placeto.graphs import Source, require_titles

    sources = tuple(Source(name, Path(args.folder), args.most_graphs) for name in args.sources)
    require_titles(sources)
    return {"sources": sources, "cluster": ClusterRequest.of(args).cluster(), "out": None if args.out is None else Path(args.out)}


def _train(args: argparse.Namespace) -> PlacetoRequest:
    from baechi_ext.place.placeto.policy import PolicyConfig
    from baechi_ext.place.placeto.train import TrainingConfig
    from baechi_runtime.placeto.training import TrainingRequest, train

    values = kinds.named(TrainingRequest, args) | _on_sources(args)
    values["config"] = TrainingConfig(**kinds.named(TrainingConfig, args))
    values["network"] = PolicyConfig(**kinds.named(PolicyConfig, args))
    request = TrainingRequest(**values, time_limit_seconds=args.time_limit)
    return PlacetoRequest(request.out, partial(train, request))


def _evaluate(args: argparse.Namespace) -> PlacetoRequest:
    from baechi_runtime.placeto.comparison import ComparisonRequest, compare

    request = ComparisonRequest(**kinds.named(ComparisonRequest, args) | _on_sources(args))
    return PlacetoRequest(request.out, partial(compare, request))


def _study(args: argparse.Namespace) -> PlacetoRequest:
    """A study, on 3 devices unless flags say otherwise."""
    from baechi_runtime.placeto.graphs import Source, require_titles
    from baechi_runtime.placeto.study import StudyRequest, StudySettings, study

    if args.cluster is None and args.num_devices is None and args.num_gpus is None:
        args.num_devices = DEVICES
    require_titles([Source(name, Path(args.folder)) for name in args.sources])
    values = {"sources": tuple(args.sources), "graphs": args.most_graphs or MANY, "cluster": ClusterRequest.of(args).cluster()}
    settings = StudySettings(**kinds.named(StudySettings, args) | values)
    request = StudyRequest(settings, Path(args.folder), Path(args.out), args.workers, args.budget, args.plot, args.command)
    return PlacetoRequest(request.out, partial(study, request))


ACTIONS: dict[str, Action] = {
    "train": Action(
        "train a policy on the graphs of families, or go on with a training",
        *("training", _TRAINING, "folder for policy.json, progress.csv and the state to resume from", True, ""),
        _train,
    ),
    "evaluate": Action(
        "compare placeto with other methods on graphs it was not trained on",
        *("comparison", _COMPARISON, "write SOURCE.json, with every number, and SOURCE.md, a table", False),
        "write SOURCE.svg to --out, too, the distributions (needs matplotlib)",
        _evaluate,
    ),
    "study": Action(
        "find out which traversal order Placeto learns best in, family by family",
        *("study", _STUDY, "gets study.md, and runs.csv, with which the same command goes on", True),
        "write boxes.svg, curves.svg and improvement.svg, too (needs matplotlib)",
        _study,
    ),
}

PLACETO = (add_flags, request_of)
