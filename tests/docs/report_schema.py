"""docs/report.schema.json, made from the declaration of Report: every object that `--json` prints, report.json and compare.json.

    python -m tests.docs.report_schema > docs/report.schema.json
"""

import json
import sys
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Any

from msgspec import convert
from msgspec.json import schema_components

from baechi_runtime.report import printed
from baechi_runtime.report.report import Report

FINITE = (sys.float_info.max, -sys.float_info.max)
"""Bounds that say no more than that JSON has no infinity."""


def kinds(of: type[Report] = Report) -> Iterator[type[Report]]:
    """All kinds of report; printed.py has the last of them."""
    if of.__struct_config__.tag.startswith("baechi "):
        yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


KINDS = sorted(kinds(printed.Report), key=lambda kind: str(kind.__struct_config__.tag))


def rendered() -> str:
    """The whole file."""
    refs, definitions = schema_components(KINDS, ref_template="#/$defs/{name}")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What baechi prints with --json, and writes as report.json and compare.json; `kind` says which it is",
        "anyOf": refs,
    }
    lines = (f"{json.dumps(name)}: {json.dumps(_written(definitions[name]))}" for name in sorted(definitions))
    return json.dumps(head)[:-1] + ',\n"$defs": {\n' + ",\n".join(lines) + "\n}}\n"


def _written(schema: Any) -> Any:
    """The schema of what is written: whatever has a default for older files is there today, unless it is left out where it is not known."""
    if isinstance(schema, list):
        return [_written(part) for part in schema]
    if isinstance(schema, str):
        return " ".join(schema.split())
    if not isinstance(schema, dict):
        return schema
    found = {key: _written(part) for key, part in schema.items() if key not in ("default", "minimum", "maximum") or part not in FINITE}
    if isinstance(properties := schema.get("properties"), dict):
        required = [name for name, of in properties.items() if "default" in of or name in schema["required"]]
        found["properties"] = {name: {k: v for k, v in of.items() if k != "default"} for name, of in found["properties"].items()}
        found["required"] = required
    return found


def require_reported(value: Mapping[str, Any]) -> None:
    """Asserts that a report is what its kind declares: all of its fields and no other, each of its type."""
    report = convert(value, reduce(or_, KINDS))
    assert report.to_json() == value, type(report)


if __name__ == "__main__":
    print(rendered(), end="")
