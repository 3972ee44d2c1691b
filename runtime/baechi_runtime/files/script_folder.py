"""The folder that `baechi train SCRIPT --out=DIR` writes: the files of a run for the first placed step of the script, and for each further
one a folder in DIR that is such a folder, too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baechi_ext.cost import Profile
from baechi_ext.errors import FileError
from baechi_ext.ir import OpGraph, Plan
from baechi_ext.ir.files import make_folder, write_json
from baechi_ext.ir.made_by import MadeBy, signed
from baechi_ext.ir.measured import MeasuredStep
from baechi_runtime.files.run_folder import MEASURED, begin_run, best_until_then, folder_of


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


def keep(folder: Path, steps: Sequence[KeptStep], report: Mapping[str, Any]) -> None:
    """Writes graph.json, plan.json, profile.json, measured.json and report.json of every step, as far as they exist. The first one's
    report is the script's, `report`; the others have command and versions in common with it."""
    begin_run(folder)
    made_by = MadeBy.from_json(report, FileError)
    for number, step in enumerate(steps):
        place = folder / folder_of(number)
        make_folder(place)
        step.graph.save(place / "graph.json", made_by)
        step.plan.save(place / "plan.json", made_by)
        if step.profile is not None:
            step.profile.save(place / "profile.json", made_by)
        if step.measured is not None:
            step.measured.save(place / MEASURED, made_by)
        if number:
            write_json(place / "report.json", signed(dict(step.report), made_by))
    write_json(folder / "report.json", dict(report))


def said_of_interrupt(folder: Path, steps: Sequence[KeptStep]) -> str:
    """Says where the plan of a script's interrupted search is, in the folder that keeps its steps; empty where none was interrupted."""
    plans = [folder / folder_of(number) for number, step in enumerate(steps) if step.interrupted]
    return best_until_then(plans[-1] if plans else None)

