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
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from baechi_ext.capture.tensorflow_source import Source
from baechi_ext.errors import CaptureError
from baechi_ext.ir.files import SCHEMA_VERSION, make_folder
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.ir.measured import MeasuredStep
from runtime.as_main import require_script, run_as_main
from runtime.run_folder import MEASURED, folder_of
from runtime.samples import LoadOfOthers, Noise
from runtime.script_folder import KeptStep, keep, said_of_interrupt
from runtime.script_report import INTERRUPTED, ScriptStep
from runtime.tensorflow.function_report import FunctionReport
from runtime.tensorflow.keras_fit import LARGE_ENOUGH, Place, PlacedModels
from runtime.tensorflow.measure import load_of_others, oversubscribed
from runtime.tensorflow.placed_function import PlacedFunction, PlacedShape, is_running
from runtime.tensorflow.placing import Placement
from runtime.tensorflow.recording import WARM_UP
from runtime.tensorflow.running import devices_of, opened, settings_of
from runtime.tensorflow.step_recorder import SEVERAL_HOSTS, of_traces
from runtime.tensorflow.training import kind_of_executor, serve
from runtime.train_request import ScriptRequest, TrainRequest

UNPLACED = "tf.function as it is"
"""What verified steps as they are are called."""
_UPDATES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")
"""What the kinds of ops begin with that change a variable."""


@dataclass
class ScriptRun:
    """What became of a script: its exit code, and its placed steps."""

    name: str = ""
    """Of its file."""
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
    request: TrainRequest | None = None
    load: LoadOfOthers | None = None
    """From the first placed step on."""

    @cached_property
    def kept(self) -> list[KeptStep | None]:
        """What is kept of each step; asked for when the script has ended."""
        noise = Noise(None if self.load is None else self.load.share(), oversubscribed(opened()))
        return [None if self.request is None else kept_step(f, self.name, self.request, noise) for f in self.placed]

    @property
    def kept_steps(self) -> list[KeptStep]:
        """Of the steps of which something is kept."""
        return [step for step in self.kept if step is not None]

    def lines(self) -> list[str]:
        """What was placed and what it gained, one line a step; or why nothing was."""
        if self.placed:
            return [self._line(function, step) for function, step in zip(self.placed, self.kept, strict=True)]
        if self.refused:
            return [f"nothing was placed: {self.refused}"]
        if self.too_small:
            return [f"nothing was placed: the largest model that trained has {self.too_small} parameters, fewer than {LARGE_ENOUGH}"]
        return ["nothing was placed: no Keras model was fitted, and no tf.function that trains variables was called twice"]

    def _line(self, function: PlacedFunction, step: KeptStep | None) -> str:
        line = FunctionReport.of(function).line()
        return line if step is None or function.refusal else step.with_doubts(line)

    def say(self) -> None:
        """Writes the lines to stderr, behind all that the script has printed."""
        sys.stdout.flush()
        sys.stderr.write("".join(f"baechi: {line}\n" for line in self.lines()))

    def to_json(self) -> dict[str, Any]:
        """What stands in report.json: of the first placed step as of a built-in model, and of all steps in short."""
        kept = self.kept_steps
        steps = []
        for function, step in zip(self.placed, self.kept, strict=True):
            where = None if step is None else folder_of(kept.index(step))
            steps.append({**FunctionReport.of(function).to_json(), "folder": where})
        said = {"steps": steps, "summary": self.lines(), **MadeBy(self.command).to_json()}
        return {"schema_version": SCHEMA_VERSION, **(kept[0].report if kept else {"model": self.name}), **said}

    def keep(self, folder: Path) -> None:
        """Writes the files of a run."""
        keep(folder, self.kept_steps, self.to_json())


def run_script(asked: ScriptRequest) -> ScriptRun:
    """Runs the script to its end; an exception of its own is shown as Python shows it, and its exit code is 1.

    Raises FileError where there is no such script, what placing its steps raises, and KeyboardInterrupt.
    """
    path = require_script(asked.path)
    if asked.request.task_index > 0:
        serve(asked.request)
        return ScriptRun(reports=False)
    folder = None if asked.request.out is None else Path(asked.request.out)
    if folder is not None:
        make_folder(folder)
    run = ScriptRun(name=path.name, command=asked.request.command, request=asked.request)

    def place(name: str, python: Callable[..., Any], ordinary: Callable[..., Any]) -> PlacedFunction:
        request = replace(asked.request, model=name, out=None)
        if run.load is None:
            run.load = load_of_others(opened, one_machine=request.cluster_hosts is None)
        settings = settings_of(request, verify_steps=asked.verify_steps, fallback=asked.fallback, record=folder is not None)
        return PlacedFunction(name, python, ordinary, settings)

    models, functions = PlacedModels(place), PlacedFunctions(place)
    with ExitStack() as stack:
        stack.enter_context(models.installed())
        stack.enter_context(functions.installed())
        interrupt = None
        try:
            run.code = run_as_main(path, asked.arguments)
        except KeyboardInterrupt as e:
            interrupt = e
        run.placed = models.functions + functions.functions
        run.too_small = max(models.too_small, functions.too_small)
        run.refused = functions.refused
        run.say()
        if folder is not None:
            run.keep(folder)
        if interrupt is not None:
            said = "" if folder is None else said_of_interrupt(folder, run.kept_steps)
            raise KeyboardInterrupt(said or str(interrupt)) from interrupt
    return run


def kept_step(function: PlacedFunction, script: str, request: TrainRequest, noise: Noise) -> KeptStep | None:
    """Of the step's first placed shape, or what an interrupted search had found of it; None where there is no plan. `script` is the
    script's name."""
    placement, report = function.placement or function.interrupted, FunctionReport.of(function)
    if placement is None:
        return None
    shape = next(iter(function.shapes.values()), None)
    measured = None if shape is None else _measured(shape, placement, request)
    why = INTERRUPTED if function.interrupted else f"no step ran behind the {WARM_UP} that follow the verified ones"
    missing = [] if measured is not None else [f"no {MEASURED}: {why}"]
    refused = [f"it runs unplaced: {function.refusal}"] if function.refusal else []
    peaks = () if measured is None or measured.memory is None else measured.memory
    step = ScriptStep(
        model=f"{function.name} of {script}",
        executor=kind_of_executor(request),
        result=placement.result,
        single=placement.single,
        unplaced=report.unplaced,
        unplaced_name=UNPLACED,
        placed=report.placed,
        busy_us=(),
        peak_bytes=tuple(int(max((held.bytes for held in device), default=0)) for device in peaks),
        parity=None if shape is None or not shape.verification.steps else {**shape.verification.to_json(), "passed": not function.refusal},
        probe=placement.probe,
        noise=noise,
        notes=(*report.notes, *refused, *missing),
        peaks_measured_by="accounting" if _share_memory(request) else "allocator",
    )
    interrupted = function.interrupted is not None
    return KeptStep(placement.graph, placement.profile, placement.result.plan, measured, step.to_json(), interrupted)


def _measured(shape: PlacedShape, placement: Placement, request: TrainRequest) -> MeasuredStep | None:
    if shape.traced is None or not shape.traced.traces:
        return None
    placed, kind = shape.step.session.placed, kind_of_executor(request)
    notes = () if request.cluster_hosts is None else (SEVERAL_HOSTS,)
    traces, timeline = shape.traced.traces, placement.result.timeline
    return of_traces(traces, placed, timeline, kind, shared_memory=_share_memory(request), notes=notes)


def _share_memory(request: TrainRequest) -> bool:
    return devices_of(request)[1].shared_memory


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
