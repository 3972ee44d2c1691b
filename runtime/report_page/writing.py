"""`baechi report`: reads a run's folder and writes its page."""

from pathlib import Path

from baechi_ext.ir.files import require_writable, write_bytes
from runtime.report_page.data import page_data
from runtime.report_page.page import render
from runtime.report_page.said import Compared
from runtime.run_folder import PAGE, RunFolder


def write_page(folder: str, out: str | None) -> Path:
    """Writes the page to `out`, by default report.html in the folder, and returns where it is. Raises what reading the folder raises."""
    path = Path(folder) / PAGE if out is None else Path(out)
    run = RunFolder.load(folder)
    require_writable(path)
    write_bytes(path, render(page_data(run, Compared.load(folder))).encode())
    return path
