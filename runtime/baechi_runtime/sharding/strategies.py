"""The strategies that are run: the cheapest that can be, and what people would do, from the same tables."""

from dataclasses import dataclass, replace

from baechi_ext.errors import OptionError, ShardError
from baechi_ext.shard.baselines import Baseline, data_parallel, megatron, one_weird_trick
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import search_tables
from baechi_runtime.files.run_folder import STRATEGIES
from baechi_runtime.report.tables import as_size
from baechi_runtime.sharding.binding import Searched
from baechi_runtime.sharding.captured import CapturedGraph
from baechi_runtime.sharding.forecast import Forecast, Forecaster

NAMES = STRATEGIES
PASE, DATA_PARALLEL, EXPERT = NAMES
NO_SPLIT = "nothing is split: no split was found that is predicted to pay"


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
    graph: CapturedGraph | None = None
    """The graph whose calls these are of; None: torch's own step, or the one that is not split."""

    @property
    def splits(self) -> bool:
        """True if any layer is split."""
        return any(parts > 1 for configuration in self.configurations for parts in configuration)


def predicted(searched: Searched, forecaster: Forecaster, name: str) -> Predicted:
    """A strategy by name, or of a shard plan file: of the candidates for it the first one with the shortest predicted step. Raises
    ShardError where none keeps within the memory limit."""
    fitting = _fitting(searched, name)
    found = [Predicted(name, c, forecaster.step(c), note, forecaster.model) for c, note in fitting]
    best = min(found, key=lambda p: p.forecast.step_us)
    return replace(best, note=NO_SPLIT) if name == PASE and not best.splits else best


def _fitting(searched: Searched, name: str) -> list[tuple[list[tuple[int, ...]], str]]:
    """The candidates for a strategy that hold no more than a device may."""
    found, limit = candidates(searched, name), searched.tables.machine.memory_bytes
    if limit is None:
        return found
    held = [searched.of(configurations).held_bytes for configurations, _ in found]
    if min(held) > limit:
        why = f"{name} would hold {as_size(min(held))} on each device, and --device_memory allows {as_size(limit)}"
        raise ShardError(f"{why}; give more, more processes or a smaller batch, or --sharding={PASE}, which keeps within it")
    return [candidate for candidate, size in zip(found, held, strict=True) if size <= limit]


def candidates(searched: Searched, name: str) -> list[tuple[list[tuple[int, ...]], str]]:
    """The strategies among which `predicted` chooses, and notes on them. `pase`: what the search finds in tables of measured costs (where
    there are some, see `search_measured`) and of counted ones, what people would do, and the step that is not split; `expert`: one weird
    trick, Megatron's.

    Raises OptionError for an unknown name, and what `_of_plan` raises.
    """
    tables = searched.tables
    if name.endswith(".json"):
        return [_of_plan(searched, name)]
    if name not in NAMES:
        raise OptionError(f"unknown strategy {name!r}; choose one of {', '.join(NAMES)}")
    people: list[Baseline] = [data_parallel(tables)] if name != EXPERT else []
    people += [one_weird_trick(tables), megatron(tables)] if name != DATA_PARALLEL else []
    of_people = [(tables.strategy(b.choice), f"{b.name}: {b.note}" if b.note else b.name) for b in people]
    if name != PASE:
        return of_people
    searches = [(searched.measured, "measured costs"), (searched.found, "counted operations")]
    of_searches = [(found.strategy, f"{found.status} by {costs}") for found, costs in searches if found is not None]
    return [*of_searches, *of_people, (_whole(searched), "")]


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
    for node in nodes:
        loops, given = {axis.name for axis in node.axes}, plan.shard[node.name].sizes.keys()
        if loops != given:
            what = f"{node.name} with the loops {', '.join(given)}, and the model's are {', '.join(axis.name for axis in node.axes)}"
            raise ShardError(f"{path} has {what}; make a plan of this model: baechi pase --model_name=... --executable --out={path}")
    splits = [plan.shard[node.name].splits for node in nodes]
    configurations = [tuple(split.get(axis.name, 1) for axis in node.axes) for node, split in zip(nodes, splits, strict=True)]
    searched.tables.choice(configurations)  # raises where it can't be run
    return configurations, plan.status
