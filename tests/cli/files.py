"""Input files for the command line's tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
GRAPH = __file__
"""A file that is there, for command lines that are refused before anything is read."""


def a_graph(edges: Sequence[tuple[str, str, int]] = (("a", "b", 4), ("a", "c", 4)), **changes: dict[str, Any]) -> dict[str, Any]:
    """A graph file of three ops a, b and c, of 10 us each; `changes` replace fields of a node."""
    nodes = [{"id": v, "compute_us": 10, "persistent_bytes": 10, "op": "test", **changes.get(v, {})} for v in "abc"]
    return {"nodes": nodes, "edges": [{"source": s, "target": d, "bytes": size} for s, d, size in edges]}


def write(path: Path, value: dict[str, Any]) -> Path:
    """Writes `value` as JSON and returns the path."""
    path.write_text(json.dumps(value))
    return path
