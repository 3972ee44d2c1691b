"""Reports of older versions are read, and none of their fields has another name or shape today."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import inspect

from baechi_ext.errors import FileError
from baechi_runtime.report.reading import read, report_of_run
from baechi_runtime.report.report import Call, Comparison, Report, Script, Sharded, Step, Training, Verified
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
    for kind in ([], {}, 3):
        with pytest.raises(FileError, match=r"report.json: Expected `str`, got .* - at `\$.kind`"):
            report_of_run({"kind": kind}, Path("report.json"))


def test_a_difference_that_is_infinite_is_read_back() -> None:
    """It is written as null, as that of a call whose shapes differ."""
    report = Script(modules=[Call(module="Net", verification=Verified(steps=2, of=5, last=4))])
    assert report.to_json()["modules"][0]["verification"]["max_rel_diff"] is None
    assert report_of_run(report.to_json(), Path("report.json")) == report


def fields_in(of: inspect.Type) -> Iterator[inspect.Field]:
    """The fields of all structs that a value of this type may hold."""
    if isinstance(of, inspect.StructType):
        yield from of.fields
    found = [getattr(of, name) for name in ("item_type", "value_type") if hasattr(of, name)]
    for part in (*found, *getattr(of, "types", ()), *(field.type for field in getattr(of, "fields", ()))):
        yield from fields_in(part)


@pytest.mark.parametrize("kind", [Comparison, Script, Sharded, Step, Training])
def test_what_may_be_null_may_be_left_out(kind: type[Report]) -> None:
    """Readers take the one for the other."""
    fields = list(fields_in(inspect.type_info(kind)))
    assert len(fields) > 30
    assert [field.name for field in fields if field.required and getattr(field.type, "includes_none", False)] == []
