"""`baechi report`: reads a run's folder and writes its page."""

from pathlib import Path

from baechi_ext.ir.files import require_writable, write_bytes
from baechi_runtime.files.run_folder import PAGE, RunFolder, is_sharded_run
from baechi_runtime.report.page.data import page_data
from baechi_runtime.report.page.page import SHARDED, render
from baechi_runtime.report.page.sharded import sharded_data
from baechi_runtime.report.run_summary import Compared
from baechi_runtime.report.sharded_summary import ShardedRun


def write_page(folder: str, out: str | None) -> Path:
    """Writes the page to `out`, by default report.html in the folder, and returns where it is. Raises what reading the folder raises."""
    path = Path(folder) / PAGE if out is None else Path(out)
    page = _sharded(folder) if is_sharded_run(Path(folder)) else _placed(folder)
    require_writable(path)
    write_bytes(path, page.encode())
    return path


def _placed(folder: str) -> str:
    return render(page_data(RunFolder.load(folder), Compared.load(folder)))


def _sharded(folder: str) -> str:
    return render(sharded_data(ShardedRun.load(folder)), SHARDED)
