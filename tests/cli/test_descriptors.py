"""File descriptors that run out: one line, and no traceback."""

import re

import pytest

from tests.runtime.trainings import STEP, baechi
from tests.runtime.workers import finish, only_error


@pytest.mark.parametrize(
    ("flags", "limit"), [(("--workers=process",), 27), (("--workers=process",), 8), (("--framework=tensorflow", "--num_devices=4"), 14)]
)
def test_too_few_for_the_devices(flags: tuple[str, ...], limit: int) -> None:
    process = baechi(*STEP, "--num_steps=2", *flags, wrapper=("sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"))
    code, out, err = finish(process, timeout=120)
    assert (code, out) == (1, "")
    assert re.search(r"process may open no more.*; raise the limit \(ulimit -n\), or use fewer devices$", only_error(err))
