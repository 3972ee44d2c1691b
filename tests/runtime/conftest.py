"""One process that forks workers for the tests of all files, and one thread for those whose sums are compared."""

import sys
from collections.abc import Iterator

import pytest

from tests.runtime.forked_workers import ForkedWorkers, forked_workers


@pytest.fixture(scope="session")
def workers() -> Iterator[ForkedWorkers]:
    """Imported and captured once for all of them."""
    with forked_workers() as workers:
        yield workers


@pytest.fixture(autouse=True, scope="module")
def _no_traces_of_other_files() -> None:
    """TorchDynamo traces no class too often because of modules in other files: torch 2.11 counts all modules of a class together."""
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compiler.reset()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are added up in one order everywhere. TorchDynamo knows nothing of other tests' modules."""
    import torch

    torch.compiler.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
