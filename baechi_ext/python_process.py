"""Python processes of the project's own: they import what this one does of it, and nothing from the folder that they are started in, where
a person's queue.py would be taken for Python's."""

import os
import site
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def command_of(module: str, *arguments: str) -> list[str]:
    """The command of `python -m MODULE ARGUMENTS`, to be started in `surroundings`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def surroundings() -> dict[str, str]:
    """This process's environment variables, with the folders that have the project where Python does not look into them by itself. No
    folder of a script's is among them, whose modules may have the names of others."""
    found = [find_spec(package) for package in ("baechi_ext", "baechi_runtime")]
    own = [str(Path(spec.origin).parents[1]) for spec in found if spec is not None and spec.origin is not None]
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages(), *site.getsitepackages()}
    path = [*dict.fromkeys(folder for folder in own if folder not in installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)} if path else dict(os.environ)
