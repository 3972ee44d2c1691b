"""The strategies that are run: the cheapest that can be, and what people would do, from the same tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from baechi_ext.errors import OptionError, ShardError
from baechi_ext.shard.baselines import Baseline, data_parallel, megatron, one_weird_trick
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import Found, SearchOptions, search, search_tables
from baechi_ext.shard.tables import Tables
from runtime.sharding.binding import bind, executable
from runtime.sharding.captured import CapturedGraph
from runtime.sharding.forward import ForwardGraph

PASE, DATA_PARALLEL, EXPERT = "pase", "data_parallel", "expert"
NAMES = (PASE, DATA_PARALLEL, EXPERT)


@dataclass(frozen=True)
class Runnable:
    """A strategy that can be run: a configuration for each node, and what it costs by the tables."""

    name: str
    configurations: list[tuple[int, ...]]
    cost: float
    note: str = ""


@dataclass(frozen=True)
class Searched:
    """The best strategy of all, the best of those that can be run, and the tables of these."""

    free: Found
    found: Found

    @property
    def tables(self) -> Tables:
        """Those of what can be run."""
        return self.found.tables

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
