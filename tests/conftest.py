"""How the whole suite runs: the same hypothesis examples every time, no deadline on a shared machine, methods only where their
solvers are, Ctrl-C as from a terminal."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
# Shells start background jobs with Ctrl-C ignored, and what they start inherits that: tests that send it would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_looked_through() -> Iterator[None]:
    """What frameworks, the tests themselves and their caches hold: collections of garbage, of which every profile is one, took a third of
    the suite's own time."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True)
def _same_folder() -> Iterator[None]:
    """A test that leaves the process in another folder would fail others later, in that one worker of the suite only."""
    before = os.getcwd()
    yield
    after = os.getcwd()
    os.chdir(before)
    assert after == before


def missing_backends() -> dict[str, str]:
    """Placement method or model -> why it can't run on this machine."""
    missing = {}
    if find_spec("pymetis") is None:
        missing["metis"] = "pymetis is not installed"
    if shutil.which("scotch_gmap") is None and shutil.which("gmap") is None:
        missing["scotch"] = "Scotch's gmap is not installed (apt-get install scotch)"
    if find_spec("torch") is None:
        missing["placeto"] = "torch is not installed"
    if find_spec("transformers") is None:
        missing["gpt2"] = "transformers is not installed"
    return missing


class _SkippedModule(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        raise pytest.skip.Exception("tensorflow is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Files of tests that have tensorflow in their path import it."""
    needs = any("tensorflow" in part for part in module_path.relative_to(Path(__file__).parent).parts)
    return _SkippedModule.from_parent(parent, path=module_path) if needs and find_spec("tensorflow") is None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = missing_backends()
    for item in items:
        callspec = getattr(item, "callspec", None)
        for value in () if callspec is None else callspec.params.values():
            if isinstance(value, str) and value in missing:
                item.add_marker(pytest.mark.skip(reason=missing[value]))
