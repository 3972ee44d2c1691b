"""What set-up installs: setup.py's ranges and constraints.txt's pins agree, and nothing more is needed or named."""

import ast
import sys
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from tests.test_layers import ROOT, imports, modules

_TREE = ast.parse((ROOT / "setup.py").read_text())
_NAMED = {ast.unparse(node.targets[0]): node.value for node in _TREE.body if isinstance(node, ast.Assign)}
RANGES: dict[str, list[str]] = ast.literal_eval(_NAMED["RANGES"])
PINS = {
    line.split("==")[0].lower(): line.split("==")[1]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
INSTALLED = [Requirement(text) for extra in ("core", "torch", "dev") for text in RANGES[extra]]


@pytest.mark.parametrize("requirement", INSTALLED, ids=str)
def test_every_range_has_a_pin_inside(requirement: Requirement) -> None:
    assert requirement.specifier.contains(PINS[requirement.name.lower()])


@pytest.mark.parametrize("requirement", INSTALLED, ids=str)
def test_the_suite_runs_within_the_ranges(requirement: Requirement) -> None:
    assert requirement.specifier.contains(version(requirement.name))


def test_the_library_imports_only_what_it_requires() -> None:
    core = {Requirement(text).name.lower() for text in RANGES["core"]}
    used = {name.split(".")[0] for path in modules("baechi_ext") for name in imports(path, top_level=True)}
    assert used - sys.stdlib_module_names - {"baechi_ext"} <= core


def test_set_up_names_no_place_to_download_from() -> None:
    for name in ("setup.py", "constraints.txt", "pyproject.toml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "http" not in text, name
        assert "index-url" not in text, name
        assert "find-links" not in text, name


def test_continuous_integration_runs_the_whole_suite() -> None:
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make lint", "make test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
