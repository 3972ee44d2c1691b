"""The Dockerfile, as far as it can be checked without Docker: its steps are the Makefile's, its stages, versions and extras exist."""

import ast
import re
import subprocess
from pathlib import Path

from packaging.specifiers import SpecifierSet

from tests.docs.test_commands import make_targets
from tests.test_layers import ROOT
from tests.test_packaging import RANGES

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]


def given(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def test_only_what_a_dockerfile_knows() -> None:
    assert {name for name, _ in STEPS} <= {"ARG", "FROM", "RUN", "WORKDIR", "ENV", "COPY", "ENTRYPOINT", "CMD"}
    assert ast.literal_eval(given("ENTRYPOINT")[0]) == ["baechi"]


def test_what_is_run_is_the_makefiles_own() -> None:
    packages, torch, make = given("RUN")
    assert {"make", "gcc"} <= set(packages.split())
    assert "python3 -m venv .venv" in torch  # where make looks for one; torch is of the version that make asks for
    assert "--no-deps -c constraints.txt --index-url ${TORCH_INDEX} torch" in torch
    assert "constraints.txt ." in given("COPY")
    assert make.split()[0] == "make"
    assert set(make.split()[1:]) <= make_targets()


def test_every_stage_is_there() -> None:
    arguments = dict(rest.split("=") for rest in given("ARG"))
    stages = {line.split(" AS ")[1]: line.split(" AS ")[0] for line in given("FROM") if " AS " in line}
    assert set(stages) == {"base", "cpu", "cuda"}
    assert stages["cpu"] == stages["cuda"] == "base"
    assert given("FROM")[-1] == "${DEVICE}"
    assert arguments["DEVICE"] in stages
    supported = re.search(r'python_requires="([^"]+)"', (ROOT / "setup.py").read_text())[1]
    assert arguments["PYTHON"] in SpecifierSet(supported)
    assert stages["base"] == "python:${PYTHON}-slim-bookworm"


def test_extras_are_those_of_setup() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    usual = re.search(r"^EXTRAS \?= (\S+)$", makefile, re.MULTILINE)[1].split(",")
    cuda = next(line for line in given("ENV") if line.startswith("EXTRAS=")).removeprefix("EXTRAS=").split(",")
    assert set(usual) <= set(RANGES)
    assert set(cuda) == {*usual, "nvidia"}
    assert "'.[$(EXTRAS)]'" in makefile


def test_make_takes_extras_from_the_environment(tmp_path: Path) -> None:
    said = subprocess.run(
        ["make", "--dry-run", "--always-make", ".venv/installed"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "EXTRAS": "torch,nvidia"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-e '.[torch,nvidia]'" in said.stdout


def test_what_is_built_here_stays_out() -> None:
    left_out = set((ROOT / ".dockerignore").read_text().split())
    for line in (ROOT / ".gitignore").read_text().split():
        assert {line.strip("/"), f"**/{line.strip('/')}"} & left_out, line
