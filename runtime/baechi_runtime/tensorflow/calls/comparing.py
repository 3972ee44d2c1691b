"""`baechi compare --framework=tensorflow SCRIPT`: the script runs to the first training step that `train` would place. There the step is
captured and profiled once, placed by every method, and measured in turn, as it is and placed; then the script ends. So is a step that
`baechi_ext.plan` was given, with all of the program's threads where it runs as it is.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from baechi_ext.errors import CaptureError
from baechi_ext.ir.files import make_folder
from baechi_runtime.drivers.comparing import ScriptComparison, compared
from baechi_runtime.drivers.comparison import CompareRequest, Comparison
from baechi_runtime.host.as_main import EndedError, run_as_main
from baechi_runtime.tensorflow.backend import TensorFlowBackend, costed, one_thread, open_devices, serve
from baechi_runtime.tensorflow.calls.keras_fit import LARGE_ENOUGH, PlacedModels
from baechi_runtime.tensorflow.calls.parallelize import PlannedCall
from baechi_runtime.tensorflow.calls.placed_function import Arguments, PlacedFunction, Settings, call_of, running
from baechi_runtime.tensorflow.calls.script import PlacedFunctions
from baechi_runtime.tensorflow.parity import draws_anew
from baechi_runtime.tensorflow.step import TensorFlowStep


def compare_script(request: CompareRequest, path: str, arguments: tuple[str, ...]) -> Comparison | None:
    """Every method's plan of the script's first training step, predicted and measured. What the script would do after it it does not.
    None in a process that only serves.

    Raises CaptureError where it ends before such a step, or the step can't be captured, and what
    profiling and link probing raise; what a method raises is its row's refusal.
    """
    script, train = Path(path), request.train
    if train.out is not None:
        make_folder(Path(train.out))
    if train.task_index > 0:
        serve(train)
        return None
    one_thread()
    comparison, code = ScriptComparison("a step"), None

    class Compared(PlacedFunction):
        """A step whose first call is compared, and ends the script."""

        def prepare(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            comparison.end_script(self.name, lambda: compare_call(request, PlannedCall.of(self, Arguments.of(args, kwargs)), script.name))

    def stand_in(name: str, ordinary: Callable[..., Any], owner: Any) -> PlacedFunction:
        return Compared(name, ordinary, Settings(train))

    functions = PlacedFunctions(stand_in)
    with PlacedModels(stand_in).installed(), functions.installed(), suppress(EndedError):
        code = run_as_main(script, arguments)
    if not comparison.done:
        raise _never_trained(path, code, functions.refused)
    return comparison.outcome()


def _never_trained(path: str, code: Any, refused: str) -> CaptureError:
    why = refused or (
        f"it had fitted no Keras model, and called no tf.function twice, with {LARGE_ENOUGH} parameters or more to train; train one, or "
        "give the script other arguments after --"
    )
    return CaptureError(f"{path} ended (exit code {code}) before a training step could be compared: {why}")


def compare_call(request: CompareRequest, call: PlannedCall, script: str = "") -> Comparison:
    """Every method's plan of a call, predicted and measured; variables keep their values. Raises what profiling and link probing raise."""
    name, captured = call.step.name, call.captured
    model = name + f" of {script}" * bool(script)
    ended = f"the first training step of {model} that is worth a plan, update included; there the script was ended"
    notes = [f"measured is {ended if script else f'a call of {model}, update included'}"]
    if draws_anew(captured):
        notes.append("the step draws random numbers that no second run draws again, so no results were compared with the unplaced ones")
    first, (python, ordinary) = captured.values(), (call_of(name, f, call.given) for f in (call.step.python, call.step.ordinary))
    with running(), ExitStack() as stack:
        devices = open_devices(request.train, stack)
        try:
            costs = costed(request.train, captured, TensorFlowStep(python, call.given.inputs, ordinary), devices[0])
            return compared(request, TensorFlowBackend(request.train, *devices), costs, model, notes)
        finally:
            captured.assign(first)
