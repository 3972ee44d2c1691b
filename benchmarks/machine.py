"""What a result was measured on."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import baechi_ext


def machine() -> dict[str, Any]:
    """Date, hardware and versions, for the head of a result file."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {"processor": _processor(), "cores": os.cpu_count()},
        "versions": {"baechi": baechi_ext.__version__, "python": platform.python_version(), "torch": torch.__version__},
    }


def _processor() -> str:
    """The CPU's name as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
