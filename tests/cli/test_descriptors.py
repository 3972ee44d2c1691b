"""File descriptors that run out: one line, and no traceback."""

import re
from pathlib import Path

import pytest

from baechi_runtime.files.run_folder import RunFolder
from tests.runtime.trainings import STEP, baechi
from tests.runtime.workers import finish, only_error

EACH_TIME = (("thread", ">&-"), ("process", "<&- >&- 2>&-"))


@pytest.mark.parametrize(
    ("flags", "limit"), [(("--workers=process",), 27), (("--workers=process",), 8), (("--framework=tensorflow", "--num_devices=4"), 14)]
)
def test_too_few_for_the_devices(flags: tuple[str, ...], limit: int) -> None:
    process = baechi(*STEP, "--num_steps=2", *flags, wrapper=("sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"))
    code, out, err = finish(process, timeout=120)
    assert (code, out) == (1, "")
    assert re.search(r"process may open no more.*; raise the limit \(ulimit -n\), or use fewer devices$", only_error(err))


@pytest.mark.parametrize(
    ("workers", "closed"),
    [
        pytest.param(workers, closed, marks=() if (workers, closed) in EACH_TIME else pytest.mark.slow)
        for workers in ("thread", "process")
        for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
    ],
)
def test_closed_streams_end_no_run(tmp_path: Path, workers: str, closed: str) -> None:
    """It says nothing there, and its files are whole."""
    flags = ("--num_steps=2", f"--workers={workers}", f"--out={tmp_path}")
    process = baechi(*STEP, *flags, wrapper=("sh", "-c", f'exec "$@" {closed}', "sh"))
    code, out, err = finish(process, timeout=120)
    assert code == 0, err
    assert ("made by" in out) == (" >" not in f" {closed}")
    assert RunFolder.load(tmp_path).report is not None


@pytest.mark.parametrize("closed", ["2>&-", ">&-"])
def test_errors_that_nobody_is_told_keep_their_exit_code(closed: str) -> None:
    process = baechi("place", "none.json", wrapper=("sh", "-c", f'exec "$@" {closed}', "sh"))
    assert finish(process, timeout=120)[0] == 1
