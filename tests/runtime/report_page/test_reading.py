"""Reports of older versions are read, and none of their fields has another name or shape today."""

import json
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.errors import FileError
from baechi_runtime.report.reading import read, report_of_run
from baechi_runtime.report.report import Comparison, Report, Script, Sharded, Step, Training
from tests.docs.report_schema import require_reported

OLDER: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "older_reports.json").read_text(encoding="utf-8"))
"""By command, what `--json` printed when steps, trainings and scripts had no kind; some lists are cut."""


def is_kept(older: Any, now: Any) -> bool:
    """True if all that is in the older value is there, by the same names; null is the same as left out."""
    if isinstance(older, dict):
        return isinstance(now, dict) and all(value is None or is_kept(value, now.get(key)) for key, value in older.items())
    return older == now if not isinstance(older, list) else len(older) == len(now) and all(map(is_kept, older, now))


@pytest.mark.parametrize(
    ("name", "kind"), [("train", Step), ("training", Training), ("script", Script), ("compare", Comparison), ("shard", Sharded)]
)
def test_reports_of_older_versions(name: str, kind: type[Report]) -> None:
    older, path = OLDER[name], Path("report.json")
    report = report_of_run(older, path) if "kind" not in older else read(older, kind, path, "baechi")
    assert type(report) is kind
    assert is_kept(older, report.to_json())
    require_reported(report.to_json())


def test_a_report_of_another_kind_is_refused() -> None:
    with pytest.raises(FileError, match=r"report.json: Invalid value 'baechi plan' - at `\$.kind`; write it again with baechi train --out"):
        report_of_run({"kind": "baechi plan"}, Path("report.json"))
