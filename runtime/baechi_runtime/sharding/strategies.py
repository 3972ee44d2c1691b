"""The strategies that are run: the cheapest that can be, and what people would do, from the same tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baechi_ext.errors import OptionError, ShardError
from baechi_ext.shard.baselines import Baseline, data_parallel, megatron, one_weird_trick
from baechi_ext.shard.graph import Strategy
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import Found, SearchOptions, search, search_tables
from baechi_ext.shard.tables import Tables, bytes_of
from baechi_runtime.files.run_folder import STRATEGIES
from baechi_runtime.sharding.binding import bind, executable
from baechi_runtime.sharding.captured import CapturedGraph
from baechi_runtime.sharding.forecast import Forecast, Forecaster
from baechi_runtime.sharding.layout import mesh_shape

NAMES = STRATEGIES
PASE, DATA_PARALLEL, EXPERT = NAMES
NO_SPLIT = "nothing is split: no split was found that is predicted to pay"


@dataclass(frozen=True)
class Searched:
    """The best strategy of all, the best of those that can be run, and the tables of these. `measured`: the best of these by measured
    costs, where calls were measured in all ways."""

    free: Found
    found: Found
    measured: Found | None = None

    @property
    def tables(self) -> Tables:
        """The tables of what can be run."""
        return self.found.tables

    def of(self, strategy: Strategy) -> Found:
        """A strategy that can be run as if it had been found, in the tables of measured costs where there are some."""
        found = self.measured or self.found
        choice = tuple(found.tables.choice(strategy))
        return replace(found, choice=choice, cost=found.tables.cost(choice), held_bytes=bytes_of(found.tables, choice))

    def line(self) -> str:
        """Say what it costs to keep to strategies that can be run."""
        gap = self.found.cost / self.free.cost - 1 if self.free.cost else 0.0
        sizes = f"{sum(self.tables.sizes)} of {sum(self.free.tables.sizes)} configurations"
        return f"{gap:.2%} above the best without that limit ({sizes} can be run)"


def search_runnable(
    captured: CapturedGraph, machine: Machine, mesh: Sequence[int] | None = None, options: SearchOptions | None = None
) -> Searched:
    """Searches among all strategies, and among those that a mesh can run, by default that of the prime factors. Raises ShardError where
    tables would be too large."""
    free = search(captured.graph, machine, options)
    tables = executable(free.tables, bind(captured), mesh or mesh_shape(machine.devices))
    return Searched(free, search_tables(tables, options))


def search_measured(searched: Searched, forecaster: Forecaster) -> Searched:
    """Add a search in tables of measured costs. Every process has to call it; each gets the same answer."""
    return replace(searched, measured=search_tables(forecaster.tables(searched.tables)))


@dataclass(frozen=True)
class Predicted:
    """A strategy that can be run, and what its step is predicted to take."""

    name: str
    configurations: list[tuple[int, ...]]
    forecast: Forecast
    note: str = ""

    @property
    def splits(self) -> bool:
        """True if any layer is split."""
        return any(parts > 1 for configuration in self.configurations for parts in configuration)


def predicted(searched: Searched, forecaster: Forecaster, name: str) -> Predicted:
    """A strategy by name, or of a shard plan file: of the candidates for it the first one with the shortest predicted step."""
    found = [Predicted(name, configurations, forecaster.step(configurations), note) for configurations, note in candidates(searched, name)]
    best = min(found, key=lambda p: p.forecast.step_us)
    return replace(best, note=NO_SPLIT) if name == PASE and not best.splits else best


def candidates(searched: Searched, name: str) -> list[tuple[list[tuple[int, ...]], str]]:
    """The strategies among which `predicted` chooses, and notes on them. `pase`: what the search finds in tables of measured costs (see
    `search_measured`) and of counted ones, what people would do, and the step that is not split; `expert`: one weird trick, Megatron's.

    Raises OptionError for an unknown name, and what `_of_plan` raises.
    """
    tables, found = searched.tables, searched.measured or searched.found
    if name.endswith(".json"):
        return [_of_plan(searched, name)]
    if name not in NAMES:
        raise OptionError(f"unknown strategy {name!r}; choose one of {', '.join(NAMES)}")
    people: list[Baseline] = [data_parallel(tables)] if name != EXPERT else []
    people += [one_weird_trick(tables), megatron(tables)] if name != DATA_PARALLEL else []
    of_people = [(tables.strategy(b.choice), f"{b.name}: {b.note}" if b.note else b.name) for b in people]
    if name != PASE:
        return of_people
    searches = [
        (found.strategy, f"{found.status} by measured costs"),
        (searched.found.strategy, f"{searched.found.status} by counted operations"),
    ]
    return [*searches, *of_people, (_whole(searched), "")]


def _whole(searched: Searched) -> list[tuple[int, ...]]:
    return [(1,) * len(node.axes) for node in searched.tables.graph.nodes]


def _of_plan(searched: Searched, path: str) -> tuple[list[tuple[int, ...]], str]:
    """The strategy of a shard plan file, and its status. Raises FileError, PlanError, and ShardError where it is another model's or can't
    be run."""
    plan = ShardPlan.load(path)
    nodes = searched.tables.graph.nodes
    missing = [node.name for node in nodes if node.name not in plan.shard]
    if missing or len(plan.shard) != len(nodes):
        what = f"no layer {missing[0]}" if missing else f"{len(plan.shard)} layers, and the model {len(nodes)}"
        raise ShardError(f"{path} has {what}; make a plan of this model: baechi pase --model_name=... --executable --out={path}")
    splits = [plan.shard[node.name].splits for node in nodes]
    configurations = [tuple(split.get(axis.name, 1) for axis in node.axes) for node, split in zip(nodes, splits, strict=True)]
    searched.tables.choice(configurations)  # raises where it can't be run
    return configurations, plan.status
