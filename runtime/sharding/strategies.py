"""The strategies that are run: the cheapest that can be, and what people would do, from the same tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baechi_ext.errors import OptionError, ShardError
from baechi_ext.shard.baselines import Baseline, data_parallel, megatron, one_weird_trick
from baechi_ext.shard.graph import Strategy
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.memory import bytes_of
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import Found, SearchOptions, search, search_tables
from baechi_ext.shard.tables import Tables
from runtime.run_folder import STRATEGIES
from runtime.sharding.binding import bind, executable
from runtime.sharding.captured import CapturedGraph
from runtime.sharding.forecast import Forecast, Forecaster
from runtime.sharding.forward import ForwardGraph

NAMES = STRATEGIES
PASE, DATA_PARALLEL, EXPERT = NAMES


@dataclass(frozen=True)
class Runnable:
    """A strategy that can be run: a configuration for each node, and what it costs by the tables."""

    name: str
    configurations: list[tuple[int, ...]]
    cost: float
    note: str = ""


@dataclass(frozen=True)
class Searched:
    """The best strategy of all, the best of those that can be run, and the tables of these. `measured`: the best of these by measured
    costs, where calls were measured in all ways."""

    free: Found
    found: Found
    measured: Found | None = None

    @property
    def tables(self) -> Tables:
        """Those of what can be run."""
        return self.found.tables

    def of(self, strategy: Strategy) -> Found:
        """A strategy that can be run as if it had been found, in the tables of measured costs where there are some."""
        found = self.measured or self.found
        choice = tuple(found.tables.choice(strategy))
        return replace(found, choice=choice, cost=found.tables.cost(choice), held_bytes=bytes_of(found.tables, choice))

    def line(self) -> str:
        """What it costs that a strategy can be run."""
        gap = self.found.cost / self.free.cost - 1 if self.free.cost else 0.0
        sizes = f"{sum(self.tables.sizes)} of {sum(self.free.tables.sizes)} configurations"
        return f"{gap:.2%} above the best without that limit ({sizes} can be run)"


def search_runnable(
    forward: ForwardGraph, captured: CapturedGraph, machine: Machine, mesh: Sequence[int], options: SearchOptions | None = None
) -> Searched:
    """Searches among all strategies, and among those that a mesh can run. Raises ShardError where tables would be too large."""
    free = search(captured.graph, machine, options)
    return Searched(free, search_tables(executable(free.tables, bind(forward, captured), mesh), options))


def search_measured(searched: Searched, forecaster: Forecaster) -> Searched:
    """With a search in tables of measured costs besides. Every process has to call it; each gets the same answer."""
    return replace(searched, measured=search_tables(forecaster.tables(searched.tables)))


def runnable(searched: Searched, name: str) -> Runnable:
    """A strategy by name; `expert` is the cheaper of one weird trick and Megatron's. Raises OptionError for an unknown name."""
    tables, found = searched.tables, searched.found
    if name == PASE:
        return Runnable(name, found.strategy, found.cost, found.status)
    if name == DATA_PARALLEL:
        return _of(tables, name, data_parallel(tables))
    if name == EXPERT:
        return _of(tables, name, min(one_weird_trick(tables), megatron(tables), key=lambda b: b.cost))
    raise OptionError(f"unknown strategy {name!r}; choose one of {', '.join(NAMES)}")


@dataclass(frozen=True)
class Predicted:
    """A strategy that can be run, and what its step is predicted to take."""

    name: str
    configurations: list[tuple[int, ...]]
    forecast: Forecast
    note: str = ""


def predicted(searched: Searched, forecaster: Forecaster, name: str) -> Predicted:
    """A strategy by name, or of a shard plan file. `pase` is the one with the shortest predicted step among what the search finds in tables
    of measured costs (see `search_measured`) and of counted ones, what people would do, and the step that is not split. `expert` is the
    better one of its two."""
    if name.endswith(".json"):
        plan = of_plan(searched, name)
        return Predicted(name, plan.configurations, forecaster.step(plan.configurations), plan.note)
    if name == DATA_PARALLEL:
        chosen = runnable(searched, name)
        return Predicted(name, chosen.configurations, forecaster.step(chosen.configurations), chosen.note)
    if name == EXPERT:
        return _fastest(forecaster, name, [_of(searched.tables, name, b) for b in _people(searched.tables)[1:]])
    if name != PASE:
        raise OptionError(f"unknown strategy {name!r}; choose one of {', '.join(NAMES)}")
    whole = [(1,) * len(node.axes) for node in searched.tables.graph.nodes]
    found = searched.measured or searched.found
    best = _fastest(
        forecaster,
        name,
        [
            Runnable(name, found.strategy, found.cost, f"{found.status} by measured costs"),
            Runnable(name, searched.found.strategy, searched.found.cost, f"{searched.found.status} by counted operations"),
            *(_of(searched.tables, name, baseline) for baseline in _people(searched.tables)),
            Runnable(name, whole, 0.0),
        ],
    )
    return replace(best, note="nothing is split: no split was found that is predicted to pay") if best.configurations == whole else best


def _people(tables: Tables) -> list[Baseline]:
    return [data_parallel(tables), one_weird_trick(tables), megatron(tables)]


def _fastest(forecaster: Forecaster, name: str, candidates: Sequence[Runnable]) -> Predicted:
    """The first of the candidates with the shortest predicted step."""
    forecasts = [forecaster.step(candidate.configurations) for candidate in candidates]
    best = min(range(len(candidates)), key=lambda i: forecasts[i].step_us)
    return Predicted(name, candidates[best].configurations, forecasts[best], candidates[best].note)


def _of(tables: Tables, name: str, baseline: Baseline) -> Runnable:
    note = baseline.name if not baseline.note else f"{baseline.name}: {baseline.note}"
    return Runnable(name, tables.strategy(baseline.choice), baseline.cost, note)


def of_plan(searched: Searched, path: str) -> Runnable:
    """The strategy of a shard plan file. Raises FileError, PlanError, and ShardError where it is another model's or can't be run."""
    plan = ShardPlan.load(path)
    nodes = searched.tables.graph.nodes
    missing = [node.name for node in nodes if node.name not in plan.shard]
    if missing or len(plan.shard) != len(nodes):
        what = f"no layer {missing[0]}" if missing else f"{len(plan.shard)} layers, and the model {len(nodes)}"
        raise ShardError(f"{path} has {what}; make a plan of this model: baechi pase --model_name=... --executable --out={path}")
    splits = [plan.shard[node.name].splits for node in nodes]
    configurations = [tuple(split.get(axis.name, 1) for axis in node.axes) for node, split in zip(nodes, splits, strict=True)]
    return Runnable(path, configurations, searched.tables.cost(searched.tables.choice(configurations)), plan.status)
