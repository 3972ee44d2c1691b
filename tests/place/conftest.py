"""Scotch's programs are started without the system call that ends them with this process, for which it would have to fork: where torch and
TensorFlow are loaded that takes a tenth of a second. A test in a process of its own has it."""

from collections.abc import Iterator

import pytest

from baechi_ext.place import partitioners


@pytest.fixture(scope="session", autouse=True)
def _started_without_a_fork() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioners, "with_this_process", lambda: None)
        yield
