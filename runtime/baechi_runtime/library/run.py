"""Run: a step and its plan, as notebooks and scripts hold them. Its verbs are those of the command line; each that changes something makes
a further Run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from baechi_ext.cost.hardware import Hardware, costs_on, hardware_named
from baechi_ext.errors import BaechiError, InfeasibleError, OptionError
from baechi_ext.ir import Cluster, Link, OpGraph, Plan
from baechi_ext.ir.files import make_folder, require_writable, write_text
from baechi_ext.ir.hints import Pin
from baechi_ext.ir.made_by import CONFIG, MadeBy
from baechi_ext.ir.numbers import bytes_of, device_count, size_in_bytes
from baechi_ext.options import ApplyOptions
from baechi_ext.place.common import PlanResult
from baechi_ext.place.registry import METHODS
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers.comparison import Comparison
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.files.run_folder import PAGE, RunFolder, remove
from baechi_runtime.library.steps import Step, of_graph
from baechi_runtime.report import cell
from baechi_runtime.report.elsewhere import Elsewhere
from baechi_runtime.report.explaining import Explained, explained
from baechi_runtime.report.report import SINGLE
from baechi_runtime.report.tables import as_size, as_time, table_of, text_of

if TYPE_CHECKING:
    from rich.table import Table

_DEVICES = "a baechi_ext.Cluster; or so many of published hardware: devices=8, hardware='h100'"
"""The devices of a what-if, beside a number."""

@dataclass(frozen=True, repr=False)
class Run:
    """A step and its plan: `baechi_ext.plan` makes one. It is a value: `pin`, `what_if` and `compare` make further ones."""

    _step: Step
    _request: PlanRequest
    _result: PlanResult

    @property
    def plan(self) -> Plan:
        """A device for every op, and the order they run in."""
        return self._result.plan

    @property
    def timeline(self) -> Timeline:
        """The step as it is predicted."""
        return self._result.timeline

    @property
    def graph(self) -> OpGraph:
        """The step's ops and tensors, with the costs that the plan is predicted with."""
        return self.plan.graph

    @property
    def cluster(self) -> Cluster:
        """The devices that it is planned for, and their links."""
        return self.plan.cluster

    @property
    def step_us(self) -> float:
        """Microseconds of the predicted step."""
        return self.plan.predicted_step_us

    @property
    def bound_us(self) -> float:
        """Microseconds that no plan for these devices can be faster than."""
        return self.plan.lower_bound_us

    @cached_property
    def single_us(self) -> float:
        """Microseconds of the predicted step on one device, the fastest, with the others idle."""
        return self._step.single_on(self.cluster).makespan_us

    @property
    def speedup(self) -> float:
        """The predicted speed-up over one device."""
        return self.single_us / self.step_us if self.step_us else 1.0

    @property
    def peak_memory_bytes(self) -> tuple[int | float, ...]:
        """The most that each device holds at a time."""
        return self.plan.peak_memory_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on how the plan was made."""
        interrupted = ("interrupted: the best plan found until then",) if self._result.interrupted else ()
        whole = () if self._result.splits or len(self.cluster) == 1 else (self._result.why_whole,)
        return (*self._result.notes, *interrupted, *(whole if self._request.method == "auto" else ()))

    def explain(self, name: str | None = None) -> Explained:
        """Why the step takes so long, and what would change that; or, of a module, parameter or op called so (*, ? and [...] match as in a
        shell), why it is where it is, and the step with it elsewhere. Raises OptionError where nothing is called so."""
        return explained(self.plan, None if name is None else str(name))

    def pin(self, name: str, device: int | str) -> "Run":
        """The step planned anew with what is called so (as for `explain`) on this device: its index, or its name. Raises OptionError where
        nothing is, or another pin contradicts; InfeasibleError where no plan fits."""
        return self._planned(replace(self._request, pins=(*self._request.pins, Pin(str(name), str(device)))), self.cluster)

    def what_if(
        self,
        *,
        devices: int | Cluster | None = None,
        link: str | Link | None = None,
        device_memory: int | str | None = None,
        hardware: str | None = None,
    ) -> "Run":
        """The step planned anew on another cluster: of so many devices, with links of this speed (`"25GB/s"`; their latency stays), or with
        devices of this memory (`"16GiB"`). Costs of ops stay as they were measured; with `hardware` ("h100") devices and links are those
        of its data sheet, and costs what the ops' counts take them. Raises OptionError for what can't be read, and for further devices
        than one without a Link, as one device has none to measure; ProfileError where ops have no counts, InfeasibleError where no plan
        fits."""
        wanted = len(self.cluster) if devices is None else devices
        if hardware is not None:
            if isinstance(wanted, Cluster):
                raise OptionError(f"hardware={hardware!r} has a cluster of its own; give devices as a number, or leave one of both out")
            target = hardware_named(hardware)
            there = changed(target.cluster(device_count(wanted, _DEVICES)), link, device_memory)
            return on_hardware(self.graph, self._request, target, there)
        cluster = wanted if isinstance(wanted, Cluster) else sized(self.cluster, wanted)
        has_links = isinstance(wanted, Cluster) or isinstance(link, Link) or any(self.cluster.default.total)
        if len(cluster) > len(self.cluster) == 1 and not has_links:
            raise OptionError(
                f"this plan is for one device, so no link was measured, and {len(cluster)} devices need one; give what its transfers "
                "take, as link=baechi_ext.Link(us_per_byte=0.0001, latency_us=50)"
            )
        return self._planned(self._request, changed(cluster, link, device_memory))

    def compare(self, *methods: str, measure: bool = False) -> "Compared":
        """The step planned by each of these methods, or by the quick ones, beside this plan, and simulated. With `measure`, as by `baechi
        compare`, these plans are run in turn, beside the unplaced step and one device's program, and checked first. Raises OptionError for
        an unknown method, or where a graph is to be measured."""
        names = list(dict.fromkeys(methods or (self._request.method, *(name for name, entry in METHODS.items() if entry.cheap))))
        requests = [self._by(name) for name in names]
        if measure:
            return self._measured({SINGLE: self._by(SINGLE)} | dict(zip(names, requests, strict=True)))
        runs: dict[str, Run] = {}
        refusals: dict[str, str] = {}
        for number, request in enumerate(requests, start=1):
            try:
                of_all = f" ({number} of {len(names)})"
                runs[request.method] = self if request == self._request else self._planned(request, self.cluster, of_all)
            except BaechiError as e:  # of whatever kind, it is the method's own: requests are checked before
                refusals[request.method] = str(e)
        return Compared(runs, refusals)

    def _measured(self, requests: Mapping[str, PlanRequest]) -> "Compared":
        found = self._step.compare(requests, self.cluster)
        refusals = {c.method: c.refusal for c in found.contenders if c.refusal}
        planned = ((c.method, c.result) for c in found.contenders if c.result is not None and not c.refusal)
        return Compared({name: Run(self._step, requests[name], result) for name, result in planned}, refusals, found)

    def _by(self, method: str) -> PlanRequest:
        """The request for another method, whose own time limit is taken where none was given."""
        own, options = PlanRequest.of(method).options.time_limit_seconds, self._request.options
        is_given = options.time_limit_seconds != METHODS[self._request.method].time_limit_seconds
        limit = options.time_limit_seconds if is_given else own
        return replace(self._request, method=method, options=replace(options, time_limit_seconds=limit))

    def apply(self, **options: Unpack[ApplyOptions]) -> Any:
        """Has the step run by this plan. Of a module: itself, whose calls run placed from now on, as after `baechi_ext.parallelize`; of a
        Keras model likewise, whose `fit` does. Of a TensorFlow step: the placed one. Of a built-in model: the report of its step, measured
        beside the unplaced one. `ApplyOptions` says which options each takes.

        Raises OptionError for a graph, which has no code, MissingBackendError where the machine lacks devices,
        and what `parallelize` raises.
        """
        return self._step.apply(self._result, self._request, options)

    def save(self, path: str | Path) -> None:
        """Writes a folder that `baechi report`, `explain`, `simulate` and `diff` read: graph.json, plan.json, which has the cluster, and
        where costs were measured profile.json. Files of an earlier run there go. Raises FileError."""
        make_folder(Path(path))
        self._step.placement(self._result).save(Path(path), MadeBy())
        remove(Path(path) / CONFIG)  # its flags are not what this plan was made by

    def report(self, path: str | Path) -> Path:
        """Writes the page of the step, one HTML file that needs nothing else, and returns where it is: `path`, or report.html in that
        folder. Raises FileError."""
        from baechi_runtime.report.page.data import page_data
        from baechi_runtime.report.page.writing import render
        from baechi_runtime.report.report import Comparison

        file = Path(path) / PAGE if Path(path).is_dir() else Path(path)
        require_writable(file)
        folder = RunFolder(file.parent, self.graph, self.plan, self._step.profile, None, None)
        write_text(file, render(page_data(folder, Comparison(model=self._step.name, notes=list(self.notes)))))
        return file

    def _planned(self, request: PlanRequest, cluster: Cluster, number: str = "") -> "Run":
        return Run(self._step, request, self._step.plan(request, cluster, number))

    @property
    def _headline(self) -> str:
        return f"{self._step.name}: {self.plan.method}, {len(self.graph)} ops on {len(self.cluster)} device{'s' * (len(self.cluster) > 1)}"

    @property
    def _facts(self) -> dict[str, str]:
        above = f" (step {self.step_us / self.bound_us - 1:.1%} above)" if self.bound_us else ""
        return {
            "step": f"{as_time(self.step_us)}, predicted",
            "bound": f"{as_time(self.bound_us)}{above}",
            "speed-up": f"{self.speedup:.2f} over one device, predicted",
            "memory": f"{as_size(max(self.peak_memory_bytes))} at most",
            "moved": f"{as_size(self.timeline.bytes_moved)} in {len(self.timeline.transfers)} transfers",
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts.items())
        return f"<Run of {self._headline}; {facts}>"

    def _repr_html_(self) -> str:
        return cell.page_of(self._headline, cell.facts_of(self._facts), cell.timeline_of(self.timeline), cell.lines_of(self.notes))


@dataclass(frozen=True, repr=False)
class Compared(Mapping[str, Run]):
    """The plans of several methods, by their names, as a table; and why others have none."""

    runs: Mapping[str, Run]
    refusals: Mapping[str, str]
    measured: Comparison | None = None
    """Their steps, where these were measured."""

    def __getitem__(self, method: str) -> Run:
        return self.runs[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def best(self) -> Run:
        """The run of the least step, predicted or, where they were, measured. Raises InfeasibleError where no method has a plan."""
        if not self.runs:
            raise InfeasibleError("; ".join(self.refusals.values()), status="unknown")
        if self.measured is not None and self.measured.best is not None:
            return self.runs[self.measured.best]
        return min(self.runs.values(), key=lambda run: run.step_us)

    def _table(self) -> "Table":
        if self.measured is not None:
            return self.measured.table()

        def row(method: str, run: Run) -> tuple[str, ...]:
            above = f"{run.step_us / run.bound_us - 1:.1%}" if run.bound_us else "-"
            step = run.timeline
            moved = as_size(step.bytes_moved), as_size(max(run.peak_memory_bytes))
            return method, as_time(run.step_us), f"{run.speedup:.2f}", above, str(len(step.transfers)), *moved

        names = ("method", "predicted step", "speed-up", "above the bound", "transfers", "moved", "peak memory")
        return table_of(names, (row(method, run) for method, run in self.runs.items()))

    def __repr__(self) -> str:
        answer, remarks = self._lines()
        return text_of(*answer, self._table(), *remarks).rstrip("\n")

    def _repr_html_(self) -> str:
        title, (answer, remarks) = "predicted by simulation" if self.measured is None else self.measured.model, self._lines()
        return cell.page_of(title, cell.lines_of(answer), cell.html_of(self._table()), cell.lines_of(remarks))

    def _lines(self) -> tuple[list[str], list[str]]:
        """The sentences above the table, and those below it."""
        if self.measured is None:
            return [], [f"{method}: {why}" for method, why in self.refusals.items()]
        answer, *remarks = self.measured.lines()
        return [answer], remarks


def on_hardware(graph: OpGraph, request: PlanRequest, target: Hardware, cluster: Cluster) -> Run:
    """The graph planned for a cluster of published hardware, with the costs that its counts take there, and what that rests on as notes.
    Raises ProfileError where ops have no counts, and what planning raises."""
    there = replace(of_graph(costs_on(graph, target)), costs_given=False)
    result = there.plan(request, cluster)
    facts = Elsewhere(target, None, there.single_on(cluster), there.graph).facts(result)
    return Run(there, request, replace(result, notes=(*result.notes, *(f"{name}: {fact}" for name, fact in facts.items()))))


def changed(cluster: Cluster, link: str | Link | None, device_memory: int | str | None) -> Cluster:
    """The cluster with these links, and devices of this memory, where they are given. Raises OptionError for what can't be read."""
    if link is not None:
        cluster = replace(cluster, default=link_of(link, cluster.mean_link()), pairs={})
    if device_memory is not None:
        cluster = cluster.each_with("memory_bytes", [bytes_of(device_memory, "device_memory")] * len(cluster))
    return cluster


def link_of(given: str | Link, like: Link) -> Link:
    """The link that is given, or one of a speed, "25GB/s", and otherwise like another: of what a byte takes, the devices at its ends bear
    the same share. Raises OptionError for what is no speed."""
    if isinstance(given, Link):
        return given
    try:
        size, _, per = str(given).rpartition("/")
        if per.strip() != "s" or not (speed := size_in_bytes(size)):
            raise ValueError
    except ValueError as e:
        raise OptionError(f"link={given!r} is not a speed; write it like '25GB/s', or give a baechi_ext.Link") from e
    costs = {name: getattr(like, name) for name in ("us_per_byte", "send_us_per_byte", "receive_us_per_byte")}
    total = sum(costs.values())
    if not total:
        return replace(like, us_per_byte=1e6 / speed)
    return replace(like, **{name: 1e6 / speed * (cost / total) for name, cost in costs.items()})


def sized(cluster: Cluster, count: int) -> Cluster:
    """The first `count` devices of a cluster, and further ones like its last, with the links of that. Raises OptionError for what is no
    number of them."""
    devices = list(cluster.devices[: device_count(count, _DEVICES)])
    kind, numbers = devices[-1].name.rpartition(":")[0] or "device", {d.name for d in devices}
    names = (f"{kind}:{i}" for i in range(len(devices) + count) if f"{kind}:{i}" not in numbers)
    devices += [replace(devices[-1], name=name) for name, _ in zip(names, range(count - len(devices)), strict=False)]
    last = len(cluster) - 1
    pairs: dict[tuple[str, str], Link] = {}
    for i, j in permutations(range(len(devices)), 2) if cluster.pairs else ():
        like = min(i, last), min(j, last)
        if like == (last, last):  # new ones are to the last, and to each other, as that is to the one before it
            like = (last, last - 1) if i > j else (last - 1, last)
        link = cluster.pairs.get((cluster.devices[like[0]].name, cluster.devices[like[1]].name))
        if link is not None:
            pairs[devices[i].name, devices[j].name] = link
    return replace(cluster, devices=tuple(devices), pairs=pairs)
