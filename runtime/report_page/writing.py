"""`baechi report`: reads a run's folder and writes its page."""

from pathlib import Path

from baechi_ext.ir.files import read_json, require_writable, write_bytes
from runtime.report_page.data import page_data
from runtime.report_page.page import render
from runtime.run_folder import RunFolder

COMPARISON = "compare.json"
"""A comparison of methods, where a folder has one."""
PAGE = "report.html"


def write_page(folder: str, out: str | None) -> Path:
    """Writes the page to `out`, by default report.html in the folder, and returns where it is. Raises what reading the folder raises."""
    path = Path(folder) / PAGE if out is None else Path(out)
    run = RunFolder.load(folder)
    require_writable(path)
    compared = Path(folder) / COMPARISON
    comparison = read_json(compared, "comparison") if compared.is_file() else None
    write_bytes(path, render(page_data(run, comparison)).encode())
    return path
