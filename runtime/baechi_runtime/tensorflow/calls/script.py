"""Running a user's own TensorFlow script, unmodified, with its training steps placed.

The script runs as `python SCRIPT ARGUMENTS` would run it. While it does, every fit of a Keras model is placed
(baechi_runtime.tensorflow.calls.keras_fit), and every tf.function that trains variables and is called from Python.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tensorflow as tf

from baechi_ext.capture.tensorflow_source import Source
from baechi_ext.errors import CaptureError
from baechi_runtime.drivers.script_run import ScriptRun
from baechi_runtime.drivers.train_request import ScriptRequest
from baechi_runtime.files.run_folder import KeptStep
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.tensorflow.backend import serve
from baechi_runtime.tensorflow.calls.call_report import kept_step, report_of
from baechi_runtime.tensorflow.calls.keras_fit import LARGE_ENOUGH, Place, PlacedModels
from baechi_runtime.tensorflow.calls.placed_function import PlacedFunction, Settings, is_running, when_gone
from baechi_runtime.tensorflow.lowering.live_variables import watch_data_sets

_UPDATES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")
"""Prefixes of the kinds of ops that change a variable."""


@dataclass
class StepsRun(ScriptRun[PlacedFunction]):
    """The outcome of a script of TensorFlow."""

    kind = "steps"
    refused: str = ""
    """Why a model, or a tf.function that had what no placed step can, was left as it is."""
    ended: dict[PlacedFunction, tuple[CallReport, KeptStep | None]] = field(default_factory=dict)
    """The findings on steps that nobody can call any more."""

    def end(self, placed: PlacedFunction) -> None:
        """Lets go of a step that nobody can call any more, but for what is said of it."""
        self.ended[placed] = self.found(placed)
        placed.end()

    def found(self, placed: PlacedFunction) -> tuple[CallReport, KeptStep | None]:
        if placed in self.ended:
            return self.ended[placed]
        report = report_of(placed)
        return report, kept_step(placed, self.name, report)

    def why_nothing(self) -> str:
        if self.refused:
            return self.refused
        if self.too_small:
            return f"the largest model that trained has {self.too_small} parameters, fewer than {LARGE_ENOUGH}"
        return "no Keras model was fitted, and no tf.function that trains variables was called twice"


def run_script(asked: ScriptRequest) -> StepsRun:
    """Runs the script to its end; an exception of its own is shown as Python shows it, and its exit code is 1.

    Raises what placing its steps raises, and KeyboardInterrupt.
    """
    if asked.request.task_index > 0:
        serve(asked.request)
        return StepsRun(reports=False)
    run = StepsRun()

    def place(name: str, ordinary: Callable[..., Any], owner: Any) -> PlacedFunction:
        settings = Settings(replace(asked.request, model=name), asked.verify_steps, not asked.strict, asked.keep_placed)
        placed = PlacedFunction(name, ordinary, settings)
        when_gone(owner, placed.steps, partial(run.end, placed))
        return placed

    models, functions = PlacedModels(place), PlacedFunctions(place)

    def conclude() -> None:
        run.placed = models.functions + functions.functions
        run.too_small = max(models.too_small, functions.too_small)
        run.refused = functions.refused or models.left_alone

    with models.installed(), functions.installed():
        run.main(asked, conclude)
    return run


class PlacedFunctions:
    """The tf.functions of a script that train variables, each placed from its second call on: the first one may make variables."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: weakref.WeakKeyDictionary[Any, PlacedFunction | None] = weakref.WeakKeyDictionary()
        self._called_once: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that train: one that is made anew for each step is never called again."""
        self.functions: list[PlacedFunction] = []
        self.too_small = 0
        self.refused = ""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, calls of tf.functions are looked at."""
        kind = type(tf.function(lambda: None))
        ordinary, placing = kind.__call__, self
        watch_data_sets()

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            runs_as_it_is = is_running() or not tf.executing_eagerly() or tf.config.functions_run_eagerly()
            if runs_as_it_is or threading.current_thread() is not threading.main_thread():
                return ordinary(function, *args, **kwargs)
            if function not in placing._known:
                returned = ordinary(function, *args, **kwargs)
                placing._known[function] = None
                if placing._trains(function, args, kwargs):
                    placing._called_once.add(function)
                return returned
            if function in placing._called_once:
                placing._called_once.remove(function)
                placing._known[function] = placing._placed(function)
            return (placing._known[function] or partial(ordinary, function))(*args, **kwargs)

        kind.__call__ = call
        try:
            yield
        finally:
            kind.__call__ = ordinary

    def _trains(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a call with these arguments trains enough."""
        if (getattr(function.python_function, "__module__", None) or "").partition(".")[0] == "keras":
            return False
        concrete = function.get_concrete_function(*args, **kwargs)
        size = sum(int(tf.size(v)) for v in trained(concrete))
        if size < LARGE_ENOUGH:
            self.too_small = max(size, self.too_small)
            return False
        try:
            Source.of(concrete, f"the tf.function {_name(function)}")
        except CaptureError as e:  # to be said if it is not called again
            self.refused = str(e)
        return True

    def _placed(self, function: Any) -> PlacedFunction:
        # It runs as it is where a placed step calls it.
        self.functions.append(self._place(_name(function), weakref.proxy(function), function))
        return self.functions[-1]


def _name(function: Any) -> str:
    return getattr(function.python_function, "__name__", "step")


def trained(concrete: Any) -> list[tf.Variable]:
    """The trainable variables that a concrete function changes, in what it calls, in branches and loops, too."""
    definition = concrete.graph.as_graph_def()
    changed = _changed(definition.node, {f.signature.name: f for f in definition.library.function})
    known = {id(v.handle): v for v in concrete.graph.variables}
    found = [known.get(id(outer)) for outer, inner in concrete.graph.captures if inner.op.name in changed]
    return [v for v in found if v is not None and v.trainable]


def _changed(nodes: Iterable[Any], functions: Mapping[str, Any]) -> set[str]:
    """The names of what nodes, or the functions that they call, take to change it."""
    found: set[str] = set()
    for node in nodes:
        inputs = [i.partition(":")[0] for i in node.input if not i.startswith("^")]
        if node.op.startswith(_UPDATES):
            found.update(inputs)
        for attribute in node.attr.values():
            for called in (attribute.func, *attribute.list.func):
                if called.name in functions:
                    function = functions[called.name]
                    inside, taken = _changed(function.node_def, functions), [a.name for a in function.signature.input_arg]
                    # From the end: what a condition goes by, or a data set, comes before what is handed on.
                    found.update(i for i, name in zip(inputs[::-1], taken[::-1], strict=False) if name in inside)
    return found
