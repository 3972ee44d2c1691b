"""`baechi report`: reads a run's folder and writes its page: template, style and script put together with the data, and a policy that lets
it run nothing else and fetch nothing."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from baechi_ext.ir.files import require_writable, write_text
from baechi_runtime.files.run_folder import PAGE, RunFolder, is_sharded_run
from baechi_runtime.report.page.data import page_data
from baechi_runtime.report.page.sharded import sharded_data
from baechi_runtime.report.palette import LIMIT
from baechi_runtime.report.reading import comparison_in
from baechi_runtime.report.sharded_summary import ShardedRun

_SHARED = ("elements.js", "header.js", "steps.js")
PLACED = (
    *(*_SHARED, "simulate.js", "base.js", "summary.js", "surface.js", "tracks.js", "timeline.js", "whatif.js", "memory.js"),
    *("layout.js", "graph.js", "methods.js", "explanation.js", "details.js", "main.js"),
)
"""The scripts of a placed run's page, in the order they run: each uses only those before it."""
SHARDED = (*_SHARED, "sharded_parts.js", "sharded_layers.js", "sharded_main.js")
"""The scripts of a sharded run's page."""


def write_page(folder: str, out: str | None) -> Path:
    """Writes the page to `out`, by default report.html in the folder, and returns where it is. Raises what reading the folder raises."""
    path = Path(folder) / PAGE if out is None else Path(out)
    if is_sharded_run(Path(folder)):
        page = render(sharded_data(ShardedRun.load(folder)), SHARDED)
    else:
        page = render(page_data(RunFolder.load(folder), comparison_in(folder)))
    require_writable(path)
    write_text(path, page)
    return path


def render(data: Mapping[str, Any], scripts: Sequence[str] = PLACED) -> str:
    """The HTML of `page_data`, or of `sharded_data`. Nothing in the data can end the element it stands in, and no script but ours runs."""
    script = "".join(map(_asset, scripts))
    style = _asset("style.css").replace("LIMIT_COLOUR", LIMIT)
    parts = {
        "POLICY": f"default-src 'none'; img-src data:; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'",
        "TITLE": html.escape(f"{data['headline']['title']} - {data['headline']['method']}"),
        "STYLE": style,
        "DATA": _embedded(data),
        "SCRIPT": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _asset("template.html"))


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON in which nothing looks like HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return (files("baechi_runtime.report.page") / name).read_text(encoding="utf-8")
