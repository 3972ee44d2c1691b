"""Kernels that set-up compiled: every method finds all of them, wherever the package was moved to."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baechi_ext.place.kernels import compile_all
from baechi_ext.simulate import jit
from tests.place.instances import RUNNABLE

ROOT = Path(__file__).parent.parent.parent
PLACES = """
import contextlib
import sys
from numba.core import event

class Forbidding(event.Listener):
    def on_start(self, event):
        raise RuntimeError(f"compiles {event.data['dispatcher']}")

    def on_end(self, event):
        pass

event.register("numba:compile", Forbidding())
from baechi_ext.errors import InfeasibleError, MissingBackendError, OptionError
from baechi_ext.ir import Cluster, Link
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import place
from tests.place.training import branchy_blocks

for blocks, memory_bytes, methods in ((1, None, sys.argv[1:]), (4, None, sys.argv[1:]), (4, 6_000_000, ["m_etf"])):
    graph = branchy_blocks(blocks, 2, 0, parameter_bytes=20_000)
    for method in methods:
        options = PlaceOptions(seed=1, time_limit_seconds=1)
        with contextlib.suppress(InfeasibleError, MissingBackendError, OptionError):  # scotch is a program of its own
            place(method, graph, Cluster.uniform(2, link=Link(1e-4, 5), memory_bytes=memory_bytes), options)
"""


@pytest.fixture
def moved(tmp_path: Path) -> Path:
    """The package in another place, with its compiled kernels."""
    assert compile_all() == 0
    package, folder = tmp_path / "baechi_ext", jit.cache_folder()
    shutil.copytree(ROOT / "baechi_ext", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(folder, package / "simulate" / "__pycache__" / folder.name)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return tmp_path


def run(install: Path, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment = {**inherited, "PYTHONPATH": str(install), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=install, env=environment, capture_output=True, text=True)


def test_no_method_compiles_anything(moved: Path) -> None:
    done = run(moved, PLACES, *RUNNABLE)
    assert (done.stderr, done.returncode) == ("", 0)


def test_another_processor_compiles_for_itself(moved: Path) -> None:
    done = run(moved, PLACES, "m_etf", NUMBA_CPU_NAME="generic")
    assert "RuntimeError: compiles" in done.stderr


@pytest.mark.slow
def test_a_wheel_brings_its_kernels_along(tmp_path: Path) -> None:
    for name in ("baechi_ext", "runtime", "setup.py", "pyproject.toml", "README.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")
    assert list(installed.rglob("*.pyc")) == []
    (installed / "tests").symlink_to(ROOT / "tests")
    done = run(installed, PLACES, "auto", "exact", "m_sct")
    assert (done.stderr, done.returncode) == ("", 0)
