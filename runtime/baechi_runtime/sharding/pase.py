"""`baechi pase`: searches the best sharding of a network, once or several times, and says what was found."""

import cProfile
import io
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from baechi_ext.errors import ShardError
from baechi_ext.ir.files import require_writable, write_text
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.shard.analysis import LayerCost, layer_costs
from baechi_ext.shard.baselines import Baseline, experts, random_walk
from baechi_ext.shard.graph import ShardGraph, dot
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import Found, SearchOptions, search
from baechi_runtime.models.registry import ModelOptions
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.printed import Sharding
from baechi_runtime.report.tables import aligned, as_size, as_time, show, table_of, text_of

if TYPE_CHECKING:
    from rich.table import Table

    from baechi_runtime.sharding.captured import CapturedGraph

WARMUP, REPEATS = 2, 5
_PROFILED = 30
"""Lines of a profile that are printed."""


@dataclass(frozen=True, kw_only=True)
class PaseRequest:
    """A network by name, with its batch and hidden width (None: the published one), a machine, and how to search and what to report.

    `script`: the network is the model that this one trains first. `model_options`: it is the captured model of that name, and its batch is
    among them; `cost_path`: a profile of it. `executable`: only strategies that `baechi train --sharding` can run.
    """

    graph: str
    network: ShardGraph | None = None
    """None where it is to be captured."""
    batch: int
    width: int | None
    cost_model: str
    splits_images: bool
    machine: Machine
    options: SearchOptions
    script: str | None = None
    script_arguments: tuple[str, ...] = ()
    model_options: ModelOptions | None = None
    cost_path: str | None = None
    executable: bool = False
    measure: bool = False
    profile: bool = False
    analyse: bool = False
    compare: bool = False
    dump: str | None = None
    out: str | None = None
    command: tuple[str, ...] = ()
    """The command line, word by word."""


@dataclass(frozen=True)
class PaseReport(Findings):
    """The strategy found, and, where asked for: the seconds of each repeat, a profile, costs by layer, and what others would do."""

    request: PaseRequest
    found: Found
    plan: ShardPlan
    seconds: list[float]
    profile: str
    layers: list[LayerCost]
    others: list[Baseline]
    model: "CapturedGraph | None" = None
    executable: str = ""
    """Says what it costs that the strategy can be run."""

    def report(self) -> Sharding:
        elimination, plan = self.found.elimination, {key: value for key, value in self.plan.to_json().items() if key != "kind"}
        layers = [
            {"name": c.name, "own_flop": c.own, "kinds_flop": c.kinds, "hidden_flop": c.hidden, "moved_flop": c.moved}
            for c in self.layers
        ]
        return Sharding(
            **plan,
            search_seconds=self.seconds,
            seconds=self.found.seconds,
            configurations=sum(self.found.tables.sizes),
            largest_table_bytes=8 * elimination.largest,
            operations=elimination.operations,
            width=elimination.width,
            captured=UNSET if self.model is None else self.model.to_json(),
            executable=self.executable or UNSET,
            layers=layers or UNSET,
            others=[{"name": b.name, "cost_flop": b.cost, "note": b.note} for b in self.others] or UNSET,
        )

    def print(self) -> None:
        """Prints it on stdout."""
        show(*self._parts())

    def lines(self) -> list[str]:
        return text_of(*self._parts()).splitlines()

    def _parts(self) -> "Iterator[str | Table]":
        """The costs, and how they were found; then tables."""
        plan, found, elimination = self.plan, self.found, self.found.elimination
        graph = found.tables.graph
        bound = "" if plan.status == "optimal" else f"; none costs less than {plan.lower_bound_flop:,.0f} ({self._gap():.2%} less)"
        largest = f"the largest over {elimination.width} layer{'s' * (elimination.width != 1)}, {as_size(8 * elimination.largest)}"
        facts = {
            "predicted step": f"{as_time(plan.predicted_step_us)} ({plan.cost_model} cost model)",
            "minimum cost": f"{plan.cost_flop:,.0f} FLOP a device ({plan.status}{bound})",
            "held": f"{as_size(plan.held_bytes)} a device (parameters, gradients, optimizer state, activations)",
            "graph": f"{graph.name}, {len(graph.nodes)} layers, batch {plan.batch}, on {plan.devices} devices",
            "search": f"{as_time(statistics.median(self.seconds) * 1e6)}{self._spread()}",
            "tables": f"{sum(found.tables.sizes)} configurations; {largest}",
            **({} if self.model is None else self.model.facts()),
            **({"executable": self.executable} if self.executable else {}),
            "shard plan": self.request.out or "not written (no --out)",
        }
        yield from aligned(facts)
        yield ""
        yield self._strategy()
        if self.others:
            rows = ((other.name, f"{other.cost / plan.cost_flop:.3f}", other.note) for other in self.others)
            yield ""
            yield table_of(("others", "x as much", "what it is"), rows, words=("what it is",))
        if self.layers:
            yield from ("", "where the cost lies")
            yield from self._analysis()
        if self.profile:
            yield from ("", *self.profile.splitlines())

    def _gap(self) -> float:
        return 1 - self.plan.lower_bound_flop / self.plan.cost_flop

    def _spread(self) -> str:
        if len(self.seconds) == 1:
            return ""
        return f" ({as_time(min(self.seconds) * 1e6)} to {as_time(max(self.seconds) * 1e6)}, median of {len(self.seconds)} after {WARMUP})"

    def _strategy(self) -> "Table":
        """A row a layer."""
        rows: list[tuple[str, str, str]] = []
        for name, layer in self.plan.shard.items():
            loops = ", ".join(f"{axis} {size}" for axis, size in layer.sizes.items())
            splits = ", ".join(f"{axis} {parts}" for axis, parts in layer.splits.items()) or "not split"
            rows.append((name, splits, loops))
        names = ("layer", "split into", "iteration space")
        return table_of(names, rows, words=names[1:])

    def _analysis(self) -> "Iterator[str | Table]":
        """The kinds of cost, then each layer's parts."""
        total = self.plan.cost_flop or 1.0
        kinds: dict[str, float] = defaultdict(float)
        for layer in self.layers:
            for kind, cost in layer.parts.items():
                kinds[kind] += cost
        costs = sorted(kinds.items(), key=itemgetter(1), reverse=True)
        yield table_of(("kind", "of all", "FLOP"), ((kind, f"{cost / total:.2%}", f"{cost:,.0f}") for kind, cost in costs))
        yield ""
        rows = []
        for layer in self.layers:
            compute = layer.kinds.get("compute", 0.0)
            parts = (layer.total, compute, layer.own - compute, layer.moved)
            rows.append((layer.name, *(f"{part / total:.2%}" for part in parts)))
        yield table_of(("layer", "total", "compute", "communication", "moving its inputs"), rows)


def run(request: PaseRequest, model: "CapturedGraph | None" = None) -> PaseReport:
    """Searches as asked, writes the files that were asked for, and returns the report. `model`: what was captured, to be sharded.

    Raises ShardError for what can't be searched, FileError for files that can't be written.
    """
    for path in (request.out, request.dump):
        if path is not None:
            require_writable(path)
    batch, devices = request.batch if model is None else model.batch, request.machine.devices
    if model is None and batch < devices:
        raise ShardError(f"a batch of {batch} is smaller than the number of devices, {devices}; give a larger one (-b) or fewer (-p)")
    if request.executable and model is None:
        raise ShardError("--executable is for what can be run, a captured model; give --model_name or a script, or drop it")
    graph = request.network if model is None else model.graph
    if graph is None:
        raise ShardError(f"{request.graph} has not been captured; give its captured graph")
    if request.dump is not None:
        write_text(request.dump, f"// {MadeBy(request.command)}\n{dot(graph)}")
    seconds: list[float] = []
    profile = cProfile.Profile()
    for i in range(WARMUP + REPEATS if request.measure else 1):
        if request.profile and not i:
            profile.enable()
        started = time.perf_counter()
        found, executable = search(graph, request.machine, request.options), ""
        if model is not None and request.executable:
            from baechi_runtime.sharding.binding import among_runnable

            searched = among_runnable(found, model, options=request.options)
            found, executable = searched.found, searched.line()
        if i >= WARMUP or not request.measure:
            seconds.append(time.perf_counter() - started)
        profile.disable()
    plan = ShardPlan.of(found, batch, request.cost_model, _options(request))
    if request.out is not None:
        plan.save(Path(request.out), MadeBy(request.command))
    layers = layer_costs(found.tables, found.choice) if request.analyse else []
    others = experts(found.tables) if request.compare else []
    if fitting := [b for b in others if b.fits]:  # and a walk from the best of them, for as long as the search took
        others.append(random_walk(found.tables, min(fitting, key=lambda b: b.cost), seconds=statistics.median(seconds)))
    text = io.StringIO()
    if request.profile:
        pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(_PROFILED)
    return PaseReport(request, found, plan, seconds, text.getvalue(), layers, others, model, executable)


def _options(request: PaseRequest) -> dict[str, Any]:
    """The options by which the plan was made, as far as they are not the default."""
    machine, plain = request.machine, Machine(devices=request.machine.devices)
    names = [name for name in Machine.__dataclass_fields__ if name not in ("devices", "flop_per_word")]
    changed = {name: getattr(machine, name) for name in names if getattr(machine, name) != getattr(plain, name)}
    if request.model_options is not None:
        changed |= {"captured": True} | {name: value for name, value in asdict(request.model_options).items() if value is not None}
    return {"order": request.options.order, "width": request.width, "splits_images": request.splits_images, **changed}
