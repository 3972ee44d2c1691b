"""Running a user's own TensorFlow script, unmodified, with its training steps placed.

The script runs as `python SCRIPT ARGUMENTS` would run it. While it does, every fit of a Keras model is placed
(runtime.tensorflow.keras_fit), and every tf.function that trains variables and is called from Python.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from baechi_ext.capture.tensorflow_source import Source
from baechi_ext.errors import CaptureError
from baechi_ext.ir.files import make_folder, write_json
from baechi_ext.ir.made_by import versions
from runtime.as_main import require_script, run_as_main
from runtime.run_folder import begin_run
from runtime.tensorflow.function_report import FunctionReport
from runtime.tensorflow.keras_fit import LARGE_ENOUGH, Place, PlacedModels
from runtime.tensorflow.placed_function import PlacedFunction, is_running
from runtime.tensorflow.running import settings_of
from runtime.tensorflow.training import serve
from runtime.train_request import ScriptRequest

_UPDATES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")
"""What the kinds of ops begin with that change a variable."""


@dataclass
class ScriptRun:
    """What became of a script: its exit code, and its placed steps."""

    code: Any = 0
    """As sys.exit takes it."""
    placed: list[PlacedFunction] = field(default_factory=list)
    too_small: int = 0
    """The most parameters of a step that trained and was too small."""
    refused: str = ""
    """Why a tf.function was left as it is, where one had what no placed step can."""
    reports: bool = True
    """Whether this process ran the script; another host only serves."""
    command: tuple[str, ...] = ()
    """What was called, word by word."""

    def lines(self) -> list[str]:
        """What was placed and what it gained, one line a step; or why nothing was."""
        if self.placed:
            return [FunctionReport.of(function).line() for function in self.placed]
        if self.refused:
            return [f"nothing was placed: {self.refused}"]
        if self.too_small:
            return [f"nothing was placed: the largest model that trained has {self.too_small} parameters, fewer than {LARGE_ENOUGH}"]
        return ["nothing was placed: no Keras model was fitted, and no tf.function that trains variables was called twice"]

    def say(self) -> None:
        """Writes the lines to stderr, behind all that the script has printed."""
        sys.stdout.flush()
        sys.stderr.write("".join(f"baechi: {line}\n" for line in self.lines()))

    def to_json(self) -> dict[str, Any]:
        steps = [FunctionReport.of(function).to_json() for function in self.placed]
        return {"steps": steps, "summary": self.lines(), "versions": versions(), "command": list(self.command)}


def run_script(asked: ScriptRequest) -> ScriptRun:
    """Runs the script to its end; an exception of its own is shown as Python shows it, and its exit code is 1.

    Raises FileError where there is no such script, what placing its steps raises, and KeyboardInterrupt.
    """
    path = require_script(asked.path)
    if asked.request.task_index > 0:
        serve(asked.request)
        return ScriptRun(reports=False)
    if asked.request.out is not None:
        make_folder(Path(asked.request.out))
    run = ScriptRun(command=asked.request.command)

    def place(name: str, python: Callable[..., Any], ordinary: Callable[..., Any]) -> PlacedFunction:
        request = replace(asked.request, model=name, out=None)
        settings = settings_of(request, verify_steps=asked.verify_steps, fallback=asked.fallback)
        return PlacedFunction(name, python, ordinary, settings)

    models, functions = PlacedModels(place), PlacedFunctions(place)
    with ExitStack() as stack:
        stack.enter_context(models.installed())
        stack.enter_context(functions.installed())
        try:
            run.code = run_as_main(path, asked.arguments)
        finally:
            run.placed = models.functions + functions.functions
            run.too_small = max(models.too_small, functions.too_small)
            run.refused = functions.refused
            if isinstance(sys.exception(), (KeyboardInterrupt, type(None))):
                run.say()
    if asked.request.out is not None:
        _keep(Path(asked.request.out), run)
    return run


class PlacedFunctions:
    """The tf.functions of a script that train variables, each placed from its second call on: the first one may make variables."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: weakref.WeakKeyDictionary[Any, PlacedFunction | None] = weakref.WeakKeyDictionary()
        self.functions: list[PlacedFunction] = []
        self.too_small = 0
        self.refused = ""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, calls of tf.functions are looked at."""
        kind = type(tf.function(lambda: None))
        ordinary, placing = kind.__call__, self

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if is_running() or not tf.executing_eagerly() or threading.current_thread() is not threading.main_thread():
                return ordinary(function, *args, **kwargs)
            if function not in placing._known:
                returned = ordinary(function, *args, **kwargs)
                placing._known[function] = placing._placed(function, partial(ordinary, function), args, kwargs)
                return returned
            return (placing._known[function] or partial(ordinary, function))(*args, **kwargs)

        kind.__call__ = call
        try:
            yield
        finally:
            kind.__call__ = ordinary

    def _placed(self, function: Any, ordinary: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlacedFunction | None:
        python = function.python_function
        if (getattr(python, "__module__", None) or "").partition(".")[0] == "keras":
            return None
        name = getattr(python, "__name__", "step")
        try:
            size = sum(int(tf.size(v)) for v in trained(function.get_concrete_function(*args, **kwargs), name))
        except CaptureError as e:
            self.refused = str(e)
            return None
        if size < LARGE_ENOUGH:
            self.too_small = max(size, self.too_small)
            return None
        self.functions.append(self._place(name, python, ordinary))
        return self.functions[-1]


def trained(concrete: Any, name: str) -> list[tf.Variable]:
    """The trainable variables that a concrete function changes. Raises CaptureError where it takes an iterator or a table, or writes a
    summary, which no placed step can."""
    source = Source.of(concrete, f"the tf.function {name}")
    changed = {i.partition(":")[0] for node in source.nodes.values() if node.op.startswith(_UPDATES) for i in node.input}
    return [v.variable for v in source.variables if v.trainable and v.placeholder in changed]


def _keep(folder: Path, run: ScriptRun) -> None:
    """Writes graph.json, profile.json and plan.json of every placed step, the first without a number, and report.json."""
    begin_run(folder)
    for number, placement in enumerate(f.placement for f in run.placed if f.placement is not None):
        end = f"_{number + 1}" if number else ""
        placement.graph.save(folder / f"graph{end}.json")
        placement.profile.save(folder / f"profile{end}.json")
        placement.result.plan.save(folder / f"plan{end}.json")
    write_json(folder / "report.json", run.to_json())
