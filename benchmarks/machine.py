"""The machine, the versions and the commit that a result was measured with."""

import os
import platform
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import baechi_ext
from baechi_runtime.host.processor import processor

PACKAGES = ("torch", "numpy", "numba", "highspy", "ortools", "pymetis")


def machine() -> dict[str, Any]:
    """Date, commit, hardware and versions, for the head of a result file."""
    versions = {"baechi": baechi_ext.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "versions": versions,
    }


def commit() -> str | None:
    """The commit of this checkout, "-dirty" where files differ from it; None outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
