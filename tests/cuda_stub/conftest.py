"""These tests run where the devices are pretended (make test-cuda-stub); elsewhere their files are skipped unread."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest


class Elsewhere(pytest.Module):
    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip("needs pretended CUDA devices: make test-cuda-stub")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if "CUDA_STUB" in os.environ else Elsewhere.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Each test begins and ends with devices that do at once what they are given."""
    from tests.cuda_stub import kernels

    kernels.order(None)
    yield
    kernels.order(None)
