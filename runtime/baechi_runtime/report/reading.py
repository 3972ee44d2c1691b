"""Reports as they are read from files: checked against their declaration, with an error that says where a file is damaged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import ValidationError, convert

from baechi_ext.errors import FileError
from baechi_ext.ir.files import read_json
from baechi_runtime.files.run_folder import COMPARISON, REPORT, RunFolder
from baechi_runtime.report.report import Comparison, Report, Run, Script, Step, Training

R = TypeVar("R", bound=Report)


def read(value: Mapping[str, Any], kind: type[R], path: Path, command: str) -> R:
    """The report in the object of a file; null is the same as left out, and older files may lack their kind. Raises FileError, which says
    where the file is damaged, what was expected there, and by which command it is written again."""
    try:
        return convert(_known(value), kind)
    except (ValidationError, UnicodeEncodeError) as e:  # the latter: half a surrogate pair where it can't be
        raise FileError(f"{path}: {e}; write it again with {command} --out") from e


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(found) for key, found in value.items() if found is not None}
    return [_known(found) for found in value] if isinstance(value, list) else value


def comparison_in(folder: str | Path) -> Comparison:
    """The comparison in a run's folder; an empty one where there is none. Raises FileError."""
    path = Path(folder) / COMPARISON
    return read(read_json(path, "comparison"), Comparison, path, "baechi compare") if path.is_file() else Comparison()


def results_of(run: RunFolder, compared: Comparison) -> Run:
    """The run's report, else its comparison. Raises FileError."""
    return compared if run.report is None else report_of_run(run.report, run.path / REPORT)


def report_of_run(value: Mapping[str, Any], path: Path) -> Run:
    """The report in report.json, in those of older versions of the kind that its fields are of. Raises FileError."""
    kinds = {kind.__struct_config__.tag: kind for kind in (Step, Script, Training)}
    older = Training if "losses" in value else Script if "summary" in value else Step
    kind = value.get("kind")
    return read(value, kinds.get(kind, Step) if isinstance(kind, str) else older, path, "baechi train")
