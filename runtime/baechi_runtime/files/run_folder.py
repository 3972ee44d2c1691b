"""RunFolder: what `baechi train --out=DIR` left in DIR, for whoever shows or explains it."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from baechi_ext.cost import Profile
from baechi_ext.errors import FileError, MismatchError
from baechi_ext.hybrid.plan import HybridPlan, load_plan
from baechi_ext.ir import OpGraph, Plan
from baechi_ext.ir.cluster import Device
from baechi_ext.ir.files import make_folder, read_json, write_json
from baechi_ext.ir.hints import as_pinned
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.ir.measured import MeasuredStep
from baechi_ext.place.registry import METHODS
from baechi_ext.simulate import Timeline, simulate

MEASURED, COMPARISON, REPORT = "measured.json", "compare.json", "report.json"
PAGE = "report.html"
SPLIT_GRAPH, SINGLE_GRAPH, PARTS_GRAPH = "graph_split.json", "graph_single.json", "graph_parts.json"
SHARDING_REPORT = "baechi sharding report"
"""The kind of a sharded run's report."""
SHARD_PLAN, STRATEGY_PLAN = "shard_plan.json", "shard_plan_{}.json"
"""A sharded run's plan, and that of each strategy it compares: by its name, or its number where a file gives it (`file_2`)."""
TP_PLAN = "tp_plan.json"
STRATEGIES = ("pase", "data_parallel", "expert")
"""The strategies that are called by a name."""
_PLACED = ("graph.json", "profile.json", "plan.json", MEASURED, COMPARISON, "compare.png", SPLIT_GRAPH, SINGLE_GRAPH, PARTS_GRAPH)
_SHARDED = (SHARD_PLAN, TP_PLAN, *map(STRATEGY_PLAN.format, STRATEGIES))
_OF_A_RUN = (*_PLACED, *_SHARDED, REPORT, PAGE)
_NUMBERED = re.compile(r"(shard_plan_file_[1-9][0-9]*|plan_auto_[1-9][0-9]*_parts)\.json")
_FURTHER = re.compile(r"placed_([2-9]|[1-9][0-9]+)")
"""The folder of a script's second module that is placed, its third, ..."""
_HALF_WRITTEN = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp")
"""The name of what `baechi_ext.ir.files.write_bytes` writes beside a file."""
_WRITER = "baechi train --model_name=NAME --out={}"


@dataclass(frozen=True)
class RunFolder:
    """A run: what it was predicted to take, and, where it came so far, what it took."""

    path: Path
    graph: OpGraph
    """With the costs that the plan was made with. Of a plan on groups of devices it is the graph of a group's part of each op."""
    plan: Plan
    """The plan; for one on groups of devices, the plan whose devices are the groups."""
    profile: Profile | None
    report: Mapping[str, Any] | None
    measured: MeasuredStep | None
    """None where the plan has not been run yet."""
    hybrid: HybridPlan | None = None
    """The plan in the folder's file where it is one on groups of devices."""

    @classmethod
    def load(cls, path: str | Path) -> "RunFolder":
        """Raises FileError where the folder lacks its graph or plan, and what reading its files raises; MismatchError where its measured
        step ran by another plan."""
        folder = Path(path)
        if not folder.is_dir():
            raise FileError(f"there is no folder {str(folder)!r}; name one that {_WRITER.format('DIR')} has written")
        if is_sharded_run(folder):
            raise FileError(
                f"{str(folder)!r} has a sharded run, whose steps were timed as a whole and not op by op; baechi report, plot, explain and "
                "diff show it, and baechi train --model_name=NAME --out=DIR without --sharding records each op"
            )
        for name in ("graph.json", "plan.json"):
            if not (folder / name).is_file():
                raise FileError(f"{str(folder)!r} has no {name}; name a folder that {_WRITER.format('DIR')} has written")
        graph = OpGraph.load(folder / "graph.json")
        plan = as_pinned(load_plan(folder / "plan.json", graph))
        profile = Profile.load(folder / "profile.json", graph) if (folder / "profile.json").is_file() else None
        report = _read_report(folder / "report.json") if (folder / "report.json").is_file() else None
        measured = MeasuredStep.load(folder / MEASURED, graph) if (folder / MEASURED).is_file() else None
        hybrid = plan if isinstance(plan, HybridPlan) else None
        if hybrid is not None:
            plan = hybrid.of_groups
        if measured is not None:
            _require_same_plan(plan, measured, folder)
        return cls(folder, plan.graph, plan, profile, report, measured, hybrid)

    @property
    def whole(self) -> OpGraph:
        """The graph of the whole step, on however many devices an op of it runs."""
        return self.graph if self.hybrid is None else self.hybrid.graph

    @property
    def devices(self) -> tuple[Device, ...]:
        """The single devices, also where those of `plan` are groups."""
        return (self.plan if self.hybrid is None else self.hybrid).cluster.devices

    @property
    def splits(self) -> bool:
        """True if more than one device has something to do."""
        return len(set(self.plan.placement)) > 1 or (self.hybrid is not None and self.hybrid.group_size > 1)

    @cached_property
    def timeline(self) -> Timeline:
        """The step as it is predicted."""
        return simulate(self.graph, self.plan.cluster, self.plan.placement, self.plan.priority)

    @cached_property
    def made_by(self) -> MadeBy:
        """The command and versions in the report, else those in the plan."""
        said, planned = MadeBy.from_json(self.report or {}, FileError), self.plan.made_by
        return MadeBy(said.command or planned.command, said.versions or planned.versions)


def method_plan(method: str) -> str:
    """Where a comparison keeps a method's plan."""
    return f"plan_{method}.json"


def is_sharded_run(folder: Path) -> bool:
    """True if the folder's run is one of `baechi train --sharding`, or a shard plan alone."""
    if (folder / "plan.json").is_file() or (folder / "graph.json").is_file():
        return False
    if (folder / SHARD_PLAN).is_file():
        return True
    return (folder / REPORT).is_file() and read_json(folder / REPORT, "report").get("kind") == SHARDING_REPORT


def sharded_plan_of(folder: Path) -> Path | None:
    """The shard plan of the folder's run; None where that is not sharded, or ran by torch's own means alone."""
    plan = folder / SHARD_PLAN
    return plan if is_sharded_run(folder) and plan.is_file() else None


def folder_of(number: int) -> str:
    """The folder, in a script's, of the placed module of that number; the first one is 0."""
    return f"placed_{number + 1}" if number else "."


@contextlib.contextmanager
def said_where_plans_are(folder: str | Path | None) -> Iterator[None]:
    """Adds, to an interrupt that says nothing yet, where the plans are that the folder holds by now."""
    try:
        yield
    except KeyboardInterrupt as e:
        plans = [] if folder is None else sorted(path.name for path in Path(folder).glob("plan*.json"))
        if e.args or not plans or folder is None:
            raise
        raise KeyboardInterrupt(f"interrupted; {Path(folder) / plans[0]} is kept{_and_others(plans)}") from e


def _and_others(plans: Sequence[str]) -> str:
    return f", and so are {', '.join(plans[1:])}" if len(plans) > 1 else ""


def best_until_then(folder: str | Path | None) -> str:
    """Says where the best plan of an interrupted search is; empty where it is kept nowhere."""
    return "" if folder is None else f"interrupted; the best plan found until then is {Path(folder) / 'plan.json'}"


def is_of_a_run(name: str) -> bool:
    """True if a run may have written the file of that name into its folder; the next run there replaces it."""
    return name in _OF_A_RUN or name in map(method_plan, METHODS) or _NUMBERED.fullmatch(name) is not None


def begin_run(folder: Path) -> None:
    """Makes the folder, or removes what an earlier run left there, before another one writes its plan: what is not written again would be
    of another run, and what was half written as that was killed is nobody's. Files that no run writes stay. Raises FileError where nothing
    can be written, or something not removed."""
    make_folder(folder)
    for path in list(folder.iterdir()):
        half = _HALF_WRITTEN.fullmatch(path.name)
        if is_of_a_run(half[1] if half else path.name) and not path.is_dir():
            remove(path)
        elif _FURTHER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            begin_run(path)
            with contextlib.suppress(OSError):  # something else is in there
                path.rmdir()


def remove(path: Path) -> None:
    """Removes a file of an earlier run, where there is one. Raises FileError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise FileError(f"cannot remove {str(path)!r}, which an earlier run left: {e.strerror}; choose another --out") from e


def save_plan(folder: Path, plan: Plan, graph: OpGraph, profile: Profile | None, made_by: MadeBy) -> None:
    """Writes graph.json, plan.json and profile.json into the folder; files of an earlier run there go. Raises FileError."""
    begin_run(folder)
    graph.save(folder / "graph.json", made_by)
    plan.save(folder / "plan.json", made_by)
    if profile is not None:
        profile.save(folder / "profile.json", made_by)


@dataclass(frozen=True)
class KeptStep:
    """A placed step of a script."""

    graph: OpGraph
    profile: Profile | None
    plan: Plan
    measured: MeasuredStep | None
    report: Mapping[str, Any]
    """The step's report, in JSON."""
    interrupted: bool = False
    """True if the plan is what an interrupted search had found, and no step ran by it."""


def keep_script(folder: Path, steps: Sequence[KeptStep], report: Mapping[str, Any]) -> None:
    """Writes the files of a run for the first placed step of a script, with the script's `report`, and for each further one a folder in
    there that is such a folder, too; command and versions are those of the report."""
    begin_run(folder)
    made_by = MadeBy.from_json(report, FileError)
    for number, step in enumerate(steps):
        place = folder / folder_of(number)
        save_plan(place, step.plan, step.graph, step.profile, made_by)
        if step.measured is not None:
            step.measured.save(place / MEASURED, made_by)
        if number:
            write_json(place / "report.json", signed(dict(step.report), made_by))
    write_json(folder / "report.json", dict(report))


def said_of_interrupt(folder: Path, steps: Sequence[KeptStep]) -> str:
    """Says where the plan of a script's interrupted search is, in the folder that keeps its steps; empty where none was interrupted."""
    plans = [folder / folder_of(number) for number, step in enumerate(steps) if step.interrupted]
    return best_until_then(plans[-1] if plans else None)


def _read_report(path: Path) -> dict[str, Any]:
    report = read_json(path, "report")
    try:
        MadeBy.from_json(report, FileError)
    except FileError as e:
        raise FileError(f"{path}: {e}; write it again with baechi train --out") from e
    return report


def _require_same_plan(plan: Plan, measured: MeasuredStep, folder: Path) -> None:
    for difference in _differences(plan, measured):
        raise MismatchError(f"{folder / MEASURED}{difference}: they are of two runs; run {_WRITER.format(folder)} again")


def _differences(plan: Plan, measured: MeasuredStep) -> Iterator[str]:
    index, devices = plan.graph.index, len(plan.cluster)
    if measured.memory is not None and len(measured.memory) != devices:
        yield f" has the memory of {len(measured.memory)} devices, and plan.json has {devices}"
    for op in measured.ops:
        planned = plan.placement[index[op.id]]
        if op.device != planned:
            yield f": op {op.id!r} ran on device {op.device}, and plan.json says {planned}"
    for transfer in measured.transfers:
        planned = plan.placement[index[transfer.op]]
        if transfer.source != planned or transfer.target >= devices:
            went = f"an output of op {transfer.op!r} went from device {transfer.source} to {transfer.target}"
            yield f": {went}, and plan.json has the op on device {planned} of {devices}"
