"""A browser for all tests of a module."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.report_page.pages import headless


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with headless(tmp_path_factory.mktemp("profile")) as driver:
        yield driver
