"""The packages that set-up installs: setup.py's ranges and constraints.txt's pins agree, and nothing more is needed or named."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from baechi_runtime.cli.doctor.packages import PACKAGES, PYTHON
from tests.test_layers import ROOT, imports, modules

_TREE = ast.parse((ROOT / "setup.py").read_text())
_NAMED = {ast.unparse(node.targets[0]): node.value for node in _TREE.body if isinstance(node, ast.Assign)}
RANGES: dict[str, list[str]] = ast.literal_eval(_NAMED["RANGES"])
_PYTHON = next(k.value.value for node in ast.walk(_TREE) if isinstance(node, ast.Call) for k in node.keywords if k.arg == "python_requires")
PINS = {
    line.split("==")[0].lower(): line.split("==")[1]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
INSTALLED = [Requirement(text) for extra in ("core", "torch", "transformers", "solvers", "plots", "dev") for text in RANGES[extra]]


@pytest.mark.parametrize("requirement", [*INSTALLED, *map(Requirement, RANGES["nvidia"])], ids=str)
def test_every_range_has_a_pin_inside(requirement: Requirement) -> None:
    assert requirement.specifier.contains(PINS[requirement.name.lower()])


@pytest.mark.parametrize("requirement", INSTALLED, ids=str)
def test_the_suite_runs_within_the_ranges(requirement: Requirement) -> None:
    assert requirement.specifier.contains(version(requirement.name))


def test_the_doctor_knows_every_package_by_its_range() -> None:
    first = {text: extra for extra in reversed(RANGES) for text in RANGES[extra] if extra != "dev"}
    assert {package.needs: package.extra for package in PACKAGES} == {text: e for text, e in first.items() if e != "tensorflow-cpu"}
    assert Requirement(f"python{PYTHON}").specifier == Requirement(f"python{_PYTHON}").specifier


def test_kernels_are_compiled_by_a_numba_that_may_run_them() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [text for text in build if text.startswith("numba")] == [text for text in RANGES["core"] if text.startswith("numba")]


def test_the_library_imports_only_what_it_requires() -> None:
    core = {Requirement(text).name.lower() for text in RANGES["core"]}
    used = {name.split(".")[0] for path in modules("baechi_ext") for name in imports(path, top_level=True)}
    assert used - sys.stdlib_module_names - {"baechi_ext"} <= core


def test_the_package_says_what_it_is(tmp_path: Path) -> None:
    """On a package index: a whole description, without links and pictures that lead nowhere there."""
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={tmp_path}"], cwd=ROOT, check=True, capture_output=True)
    said = message_from_string((tmp_path / "baechi_ext.egg-info" / "PKG-INFO").read_text(encoding="utf-8"))
    assert (said["Name"], said["Description-Content-Type"]) == ("baechi-ext", "text/markdown")
    assert all(said.get_all(name) for name in ("Summary", "Author", "Project-URL", "Classifier", "Keywords"))
    text = said.get_payload()
    assert text.startswith("# baechi-ext") and "pip install" in text
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]*)\)", text))


def test_set_up_names_no_place_to_download_from() -> None:
    for name in ("setup.py", "constraints.txt", "pyproject.toml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "://" not in text.replace("https://doi.org/", "").replace("https://arxiv.org/", ""), name
        assert "index-url" not in text, name
        assert "find-links" not in text, name


def in_ci(tmp_path: Path, **programs: str) -> tuple[int, list[str], str]:
    """Exit code, output and errors of .ci/run where these shell scripts are all there is besides a shell; `make` says what it makes."""
    for name in ("bash", "dirname", "id", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name))
    for name, text in {"make": 'echo "made $1"', **programs}.items():
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "checkout" / ".ci" / "run"
    run.parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", run)
    (tmp_path / "checkout" / "bazel-bin").mkdir()
    (tmp_path / "checkout" / "bazel-bin" / "train").symlink_to(tmp_path / "bazel")
    done = subprocess.run([run], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_continuous_integration_runs_the_whole_suite(tmp_path: Path) -> None:
    code, lines, _ = in_ci(tmp_path, bazel='echo "bazel $@"')
    assert code == 0
    assert (lines[0], lines[-1]) == ("made lint", "made test")
    assert "bazel build --noshow_progress :train" in lines
    assert "bazel test --noshow_progress :framework_free_tests" in lines
    assert lines[-2] == "bazel shutdown"


def test_continuous_integration_goes_on_where_bazel_fails(tmp_path: Path) -> None:
    code, lines, errors = in_ci(tmp_path, bazel='echo "bazel $@"; [ "$1" != test ]')
    assert (code, lines[-1]) == (1, "made test")
    assert errors.startswith("error: the Bazel build or its tests failed")


@pytest.mark.parametrize("programs", [{}, {"apt-get": "exit 100"}])
def test_continuous_integration_says_that_bazel_is_missing(tmp_path: Path, programs: dict[str, str]) -> None:
    code, lines, _ = in_ci(tmp_path, **programs)
    assert (code, lines[0], lines[-1]) == (0, "made lint", "made test")
    assert lines[-2] == "no bazel: left out are the Bazel build and its tests, whose files `make test` runs too"


def test_continuous_integration_fails_with_the_suite(tmp_path: Path) -> None:
    code, lines, _ = in_ci(tmp_path, bazel="true", make='echo "made $1"; [ "$1" != test ]')
    assert (code != 0, lines[-1]) == (True, "made test")
