"""Settings of the whole suite: the same hypothesis examples every time, no deadline on a shared machine, methods only where their
solvers are, Ctrl-C as from a terminal, one thread for sums, the longest files first."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
# Before torch is imported, and for the processes that tests start: teams of threads that share cores with other tests mostly spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Shells start background jobs with Ctrl-C ignored, and what they start inherits that: tests that send it would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "runtime/sharding/test_execute.py",
    "runtime/test_models_on_processes.py",
    "runtime/tensorflow/test_models_on_servers.py",
    "runtime/test_faults.py",
    "runtime/test_models.py",
    "cli/test_terminated.py",
    "cli/test_train_tensorflow.py",
    "runtime/test_processes.py",
    "runtime/test_script_workers.py",
    "cli/test_made_by.py",
    "runtime/tensorflow/test_scripts.py",
    "runtime/test_listeners.py",
    "runtime/test_several_nodes.py",
    "docs/test_tutorial.py",
    "runtime/test_scripts.py",
    "cli/test_train_script.py",
    "cli/test_microbatches.py",
    "place/test_large_graphs.py",
)
"""Files that take a minute and more come first: one that began last would be waited for by all other processes of the suite."""


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_not_looked_through() -> Iterator[None]:
    """Freezes what frameworks, the tests themselves and their caches hold: collections of garbage, of which every profile makes one, took a
    third of the suite's own time."""
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(autouse=True, scope="session")
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs keep nothing for later ones in the home of whoever runs the tests, and read nothing from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAECHI_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _timing_of_its_own() -> None:
    """No test waits with its turns for steps of an earlier one."""
    if (turns := sys.modules.get("baechi_runtime.measure.turns")) is not None:
        turns._timed.clear()  # noqa: SLF001


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


def _turn(item: pytest.Item) -> int:
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    return LONGEST.index(path) if path in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    missing = missing_backends()
    for item in items:
        callspec = getattr(item, "callspec", None)
        for value in () if callspec is None else callspec.params.values():
            if isinstance(value, str) and value in missing:
                item.add_marker(pytest.mark.skip(reason=missing[value]))
