"""The modules of a framework, which commands load when they need one."""

from importlib import import_module
from typing import Any

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.collector import importing
from baechi_ext.errors import MissingBackendError
from baechi_runtime.cli.flags.train import TENSORFLOW
from baechi_runtime.report.progress import progress


def stage_of(framework: str, module: str) -> Any:
    """A module of baechi_runtime that loads the framework. Raises MissingBackendError where that is not installed."""
    try:
        with progress(f"loading {framework}"), importing():
            if framework == TENSORFLOW:
                tensorflow()
            return import_module(f"baechi_runtime.{module}")
    except ModuleNotFoundError as e:
        if e.name not in (framework, "keras"):
            raise
        extra = "tensorflow-cpu" if framework == TENSORFLOW else framework
        message = f"--framework={framework} needs {e.name}, which is not installed; pip install 'baechi-ext[{extra}]'"
        raise MissingBackendError(message) from e
