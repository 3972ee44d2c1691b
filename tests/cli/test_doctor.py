"""`baechi doctor`: what works, what is missing, what that costs; and that a part that crashes takes nobody along."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from baechi_runtime.cli.doctor import packages
from baechi_runtime.cli.doctor.diagnosis import Check, Diagnosis

ROOT = Path(__file__).parents[2]


def doctor(*flags: str, before: Path | None = None) -> subprocess.CompletedProcess:
    """`baechi doctor`, where the modules in the folder `before` come before those installed."""
    path = os.pathsep.join(map(str, filter(None, (before, ROOT))))
    command, environment = [sys.executable, "-m", "baechi_ext", "doctor", *flags], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def test_this_installation_is_healthy() -> None:
    done = doctor("--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["schema_version"], found["kind"], found["healthy"]) == (0, 1, "baechi doctor", True), done.stderr
    checks = {(check["group"], check["name"]): check for check in found["checks"]}
    for name in ("networkx", "pulp", "highspy", "rich", "numpy", "numba", "msgspec"):
        assert (checks["versions", name]["state"], checks["versions", name]["found"]) == ("ok", version(name))
    assert checks["solvers", "LP"]["found"].startswith("HiGHS")
    assert checks["compiled parts", "numba"]["state"] == "ok"
    assert f"{len(os.sched_getaffinity(0))} usable core" in checks["devices", "CPU"]["found"]
    assert all(check["costs"] and check["remedy"] for check in found["checks"] if check["state"] != "ok")


def test_a_solver_that_crashes_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "pulp.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "numba.py").write_text("raise ImportError('libllvm is not there')\n")
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is not there')\n")
    done = doctor(before=tmp_path)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0)
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:2] == ["LP", "broken"])
    assert "signal 11" in lines[at]
    assert lines[at + 1].strip() == "without it: no --placement_method=m_sct and m_sct_reserve"
    assert lines[at + 2].strip().startswith("pip install")
    assert "broken   ImportError: libllvm is not there" in done.stdout
    assert "broken   ImportError: libtorch is not there" in done.stdout  # which placing does not need
    assert lines[-2] == "broken: numba; nothing can be placed"


def test_without_what_it_needs_doctor_works_and_names_that(tmp_path: Path) -> None:
    """All else that is installed is there by links: what is missing is really missing."""
    for installed in Path(pytest.__file__).parents[1].iterdir():
        if not installed.name.startswith(("rich", "networkx", "msgspec")):
            (tmp_path / installed.name).symlink_to(installed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "runtime")))}

    def without_them(*command: str) -> subprocess.CompletedProcess:
        argv = [sys.executable, "-S", "-m", "baechi_ext", *command]  # -S: nothing is found elsewhere
        return subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment)

    done = without_them("doctor")
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-2]) == (1, "broken: networkx, rich, msgspec; nothing can be placed"), done.stderr
    at = next(i for i, line in enumerate(lines) if line.split()[:2] == ["rich", "missing"])
    assert lines[at + 2].strip() == "pip install --force-reinstall baechi-ext"
    assert without_them("--help").returncode == 0
    (tmp_path / "g.json").write_text('{"nodes": [{"id": "a", "compute_us": 1}], "edges": []}')
    done = without_them("place", str(tmp_path / "g.json"), "--num_devices=2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("error: msgspec is not installed; pip install")


def test_with_the_core_alone_each_extra_is_missing_and_the_core_is_healthy(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = {package.name for package in packages.PACKAGES if package.extra == packages.CORE}

    def known(name: str) -> str:
        if name not in core:
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(packages, "version", known)
    code, out, _ = run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0
    for package in packages.PACKAGES:
        assert checks[package.name]["state"] == ("ok" if package.name in core else "missing")
    assert checks["torch"]["remedy"] == "pip install 'baechi-ext[torch]'"
    assert checks["torch"]["costs"].startswith("train")
    assert {"CP", "gloo"}.isdisjoint(checks)  # there is nothing to try


def test_a_version_out_of_range_is_untried_and_a_core_package_that_is_missing_is_broken(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(name: str) -> str:
        if name in ("networkx", "torch", "ortools"):
            raise PackageNotFoundError(name)
        return "9.9.9" if name == "rich" else "10.2rc1"

    monkeypatch.setattr(packages, "version", known)
    code, out, _ = run("doctor")
    assert code == 1
    assert "rich          ok       9.9.9\n" not in out
    assert "rich          untried  9.9.9, not >=13.9,<16\n" in out
    assert out.splitlines()[-2] == "broken: networkx; nothing can be placed"


@pytest.mark.parametrize(
    ("found", "wanted", "inside"),
    [
        ("2.13.0+cpu", ">=2.11,<3", True),
        ("2.11", ">=2.11.0,<3", True),
        ("2.9.1", ">=2.11,<3", False),
        ("3.0.0", ">=2.11,<3", False),
        ("3", ">=2.11,<3", False),
        ("2025.2.2", ">=2025.2", True),
        ("0.61rc1", ">=0.61,<1", True),
        ("unknown", ">=1", False),
    ],
)
def test_ranges(found: str, wanted: str, inside: bool) -> None:
    assert packages.fits(found, wanted) is inside


def test_nothing_is_healthy_without_what_it_needs() -> None:
    missing = Check("versions", "numba", "missing", "", "plans", "pip install numba", needed=True)
    extra = Check("versions", "torch", "missing", "", "training", "pip install torch")
    assert Diagnosis((extra,)).healthy
    assert not Diagnosis((extra, missing)).healthy
    assert {package.name for package in packages.PACKAGES if package.needed} == {"networkx", "rich", "numpy", "numba", "msgspec"}
