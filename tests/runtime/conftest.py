"""One process that forks workers for the tests of all files."""

from collections.abc import Iterator

import pytest

from tests.runtime.forked_workers import ForkedWorkers, forked_workers


@pytest.fixture(scope="session")
def workers() -> Iterator[ForkedWorkers]:
    """Imported and captured once for all of them."""
    with forked_workers() as workers:
        yield workers
