"""`baechi compare SCRIPT`: the script runs to its first training call that is large enough. There the call is captured and profiled once,
every method places it, and its forward and backward passes are measured in turn, as it is and placed; then the script ends.
"""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from baechi_ext.errors import BaechiError, CaptureError
from baechi_ext.ir.files import make_folder
from runtime.as_main import EndedError, require_script, run_as_main
from runtime.calls.capturing import capture_training_call, plain_arguments
from runtime.calls.compared_call import ComparedCall
from runtime.calls.measuring import Measured, on_threads, on_workers
from runtime.calls.module_calls import LARGE_ENOUGH, Call, never_trained, outermost_calls, trained_size
from runtime.calls.module_watch import SETTLING, ModuleWatch, keeps_changing
from runtime.calls.script import as_one_of, workers_of
from runtime.calls.verify import Moment, PythonRandomness, as_written, one_thread
from runtime.calls.workers import Workers
from runtime.compare.comparison import Comparison
from runtime.compare.contender import CompareRequest
from runtime.compare.files import keep
from runtime.run_folder import MEASURED, begin_run
from runtime.training import kind_of_executor


def compare_script(request: CompareRequest, path: str, arguments: tuple[str, ...]) -> Comparison | None:
    """Every method's plan of the script's first training call, predicted and measured. What the script would do after it it does not.
    None in a worker that does not report.

    Raises FileError where there is no script, CaptureError where it ends before such a call, or the call can't be captured, and what
    profiling and link probing raise; what a method raises is its row's refusal.
    """
    script = require_script(path)
    if request.train.out is not None:
        make_folder(Path(request.train.out))
    workers = workers_of(request.train)
    comparing, code = _Comparing(request, script, workers), None
    with suppress(EndedError), as_one_of(workers), outermost_calls(comparing.runner):
        code = run_as_main(script, arguments)
    if comparing.done and comparing.error is None:
        return comparing.comparison
    if workers is not None:
        workers.failed = True
    raise comparing.error or never_trained(path, code)


class _Comparing:
    """Calls of modules while the script runs."""

    def __init__(self, request: CompareRequest, script: Path, workers: Workers | None) -> None:
        self._request, self._script, self._workers = request, script, workers
        self._begun = self.done = False
        self.comparison: Comparison | None = None
        self.error: BaechiError | None = None

    def runner(self, module: nn.Module, ordinary: Call) -> Call:
        """What the module is called by: the first training call of one that is large enough is compared, and ends the script."""
        if self.done:  # a script that takes every exception for its own went on
            raise EndedError
        if self._begun or trained_size(module) < LARGE_ENOUGH:
            return ordinary
        self._begun = True
        return partial(self._compare, module, ordinary)

    def _compare(self, module: nn.Module, ordinary: Call, *args: Any, **kwargs: Any) -> None:
        module = getattr(module, "_orig_mod", module)
        name, before = type(module).__name__, Moment(module)
        try:
            with as_written(), one_thread():
                inputs, given = plain_arguments(module, args, kwargs)
                _settle(module, partial(ordinary, *args, **kwargs))
                before.restore()
                call = capture_training_call(module, inputs, given, self._request.train)
                compared = ComparedCall(call, module, partial(ordinary, *args, **kwargs), inputs)
                self.comparison = self._measured(compared, f"{name} of {self._script.name}")
        except BaechiError as e:
            self.error = e
        except Exception as e:  # noqa: BLE001 - what nobody has thought of, and what the script's own forward raises
            reason = (str(e).splitlines() or [""])[0]
            self.error = CaptureError(f"a call of {name} can't be compared: {type(e).__name__}: {reason}")
        finally:
            self.done = True
            before.restore()
        raise EndedError

    def _measured(self, compared: ComparedCall, model: str) -> Comparison | None:
        """None in a worker that does not report."""
        request, workers, call = self._request, self._workers, compared.call

        def comparison_of(measured: Measured) -> Comparison:
            return Comparison(
                model=model,
                executor=kind_of_executor(request.train),
                contenders=measured.placed.contenders,
                measurement=measured.measurement,
                single=measured.placed.single,
                peaks_measured_by=measured.peaks_measured_by,
                notes=(
                    f"measured are the forward and backward passes of the first training call of {model}; there the script was ended",
                    *measured.notes,
                    *([call.note] if call.note else []),
                    *([] if measured.placed.probe is None else [f"probed link: {measured.placed.probe}"]),
                ),
            )

        def recommended(measured: Measured) -> str | None:
            return comparison_of(measured).recommended

        measured = on_threads(request, compared, recommended) if workers is None else on_workers(request, compared, workers, recommended)
        if measured is None:
            return None
        comparison = comparison_of(measured)
        if request.train.out is not None:
            folder = Path(request.train.out)
            begin_run(folder)
            keep(folder, measured.placed.graph, measured.placed.profile, comparison, request.train.made_by)
            if measured.recorded is not None:
                measured.recorded.save(folder / MEASURED, request.train.made_by)
        return comparison


def _settle(module: nn.Module, plain: Call) -> None:
    """Runs the call until it leaves the module's attributes as they are. Raises CaptureError where it never does, or can't be captured."""
    changed: list[str] = []
    for _ in range(1 + SETTLING):
        watch, randomness = ModuleWatch(module), PythonRandomness()
        plain()
        randomness.require_undrawn()
        changed = watch.changes()
        if not changed:
            return
    raise keeps_changing(changed)
