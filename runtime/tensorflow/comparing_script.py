"""`baechi compare --framework=tensorflow SCRIPT`: the script runs to the first training step that `train` would place. There the step is
captured and profiled once, placed by every method, and measured in turn, as it is and placed; then the script ends.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from baechi_ext.errors import BaechiError, CaptureError
from baechi_ext.ir.files import make_folder
from runtime.as_main import EndedError, require_script, run_as_main
from runtime.compare.comparison import Comparison
from runtime.compare.contender import CompareRequest
from runtime.tensorflow.arguments import Arguments
from runtime.tensorflow.comparing import compared
from runtime.tensorflow.keras_fit import LARGE_ENOUGH, PlacedModels
from runtime.tensorflow.placed_function import call_of, captured_call, draws_anew, running
from runtime.tensorflow.running import costed_step
from runtime.tensorflow.script import PlacedFunctions
from runtime.tensorflow.step import TensorFlowStep
from runtime.tensorflow.training import one_thread, open_devices, require_taken, serve


def compare_script(request: CompareRequest, path: str, arguments: tuple[str, ...]) -> Comparison | None:
    """Every method's plan of the script's first training step, predicted and measured. What the script would do after it it does not.
    None in a process that only serves.

    Raises FileError where there is no script, CaptureError where it ends before such a step, or the step can't be captured, and what
    profiling and link probing raise; what a method raises is its row's refusal.
    """
    script, train = require_script(path), request.train
    require_taken(train)
    if train.out is not None:
        make_folder(Path(train.out))
    if train.task_index > 0:
        return serve(train)
    one_thread()
    comparing, code = _Comparing(request, script.name), None
    functions = PlacedFunctions(comparing.stand_in)
    with PlacedModels(comparing.stand_in).installed(), functions.installed(), suppress(EndedError):
        code = run_as_main(script, arguments)
    if comparing.error is not None:
        raise comparing.error
    if comparing.comparison is None:
        raise _never_trained(path, code, functions.refused)
    return comparing.comparison


def _never_trained(path: str, code: Any, refused: str) -> CaptureError:
    why = refused or (
        f"it had fitted no Keras model, and called no tf.function twice, with {LARGE_ENOUGH} parameters or more to train; train one, or "
        "give the script other arguments behind --"
    )
    return CaptureError(f"{path} ended (exit code {code}) before a training step could be compared: {why}")


class _Comparing:
    """The training steps of the script, the first of which is compared, and ends it."""

    def __init__(self, request: CompareRequest, script: str) -> None:
        self._request, self._script = request, script
        self.comparison: Comparison | None = None
        self.error: BaechiError | None = None

    def stand_in(self, name: str, python: Callable[..., Any], ordinary: Callable[..., Any]) -> Callable[..., None]:
        """What is called instead of a training step (see Place)."""
        return partial(self._compare, name, python)

    def _compare(self, name: str, python: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.comparison is None and self.error is None:  # else the script took the exception for its own, and went on
            try:
                with running():
                    self.comparison = _compared(self._request, name, python, Arguments.of(args, kwargs), self._script)
            except BaechiError as e:
                self.error = e
            except Exception as e:  # noqa: BLE001 - what nobody has thought of, and what the script's own step raises
                reason = (str(e).splitlines() or [""])[0]
                self.error = CaptureError(f"a step of {name} can't be compared: {type(e).__name__}: {reason}")
        raise EndedError


def _compared(request: CompareRequest, name: str, python: Callable[..., Any], given: Arguments, script: str) -> Comparison:
    captured = captured_call(name, python, given)
    variables = {v.shared_name: v.variable for v in captured.variables}
    first = {n: v.numpy() for n, v in variables.items()}
    step = TensorFlowStep(name, call_of(name, python, given), given.inputs, tuple(variables.values()), None)
    model = f"{name} of {script}"
    notes = [f"measured is the first training step of {model} that is worth a plan, update included; there the script was ended"]
    notes += captured.notes
    if draws_anew(captured):
        notes.append("the step draws random numbers that no second run draws again, so no results were compared with the unplaced ones")
    with ExitStack() as stack:
        devices = open_devices(request.train, stack)
        costed = replace(costed_step(request.train, captured, step, devices[0]), first=first)
        try:
            return compared(request, costed, devices, model, notes)
        finally:
            for n, variable in variables.items():
                variable.assign(first[n])
