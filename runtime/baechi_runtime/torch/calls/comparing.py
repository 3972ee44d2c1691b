"""`baechi compare SCRIPT`: the script runs to its first training call that is large enough. There the call is captured and profiled once,
every method places it, and its forward and backward passes are measured in turn, as it is and placed; then the script ends.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from baechi_ext.capture.torch_dynamo import traced
from baechi_ext.errors import BaechiError, CaptureError
from baechi_ext.ir.files import make_folder
from baechi_runtime.drivers.comparing import ScriptComparison, compared
from baechi_runtime.drivers.comparison import CompareRequest, Comparison
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.as_main import EndedError, run_as_main
from baechi_runtime.host.generators import python_generators_kept
from baechi_runtime.torch.calls.call_backend import ComparedCall, with_call
from baechi_runtime.torch.calls.capturing import Given, TrainingCall, captured_call, leaf_of
from baechi_runtime.torch.calls.module_calls import LARGE_ENOUGH, Call, never_trained, outermost_calls, trained_size
from baechi_runtime.torch.calls.parallelize import arguments_of
from baechi_runtime.torch.calls.script import as_one_of, workers_of
from baechi_runtime.torch.calls.tracing import TraceLog, traced_for_us, watch_compiles
from baechi_runtime.torch.calls.verify import put_back
from baechi_runtime.torch.calls.workers import Workers
from baechi_runtime.torch.lowering.devices import one_thread


@dataclass
class NotedFragment:
    """A fragment that runs as it is, and what it was given and returned when it ran last."""

    graph: fx.GraphModule
    log: "list[NotedFragment]"
    args: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        values: Sequence[Tensor] = self.graph(*args)
        self.log.append(NotedFragment(self.graph, self.log, args, tuple(values)))
        return values


def compare_script(request: CompareRequest, path: str, arguments: tuple[str, ...]) -> Comparison | None:
    """Every method's plan of the script's first training call, predicted and measured; the script goes no further than that call.
    None in a worker that does not report.

    Raises CaptureError where it ends before such a call, or the call can't be captured, and what
    profiling and link probing raise; what a method raises is its row's refusal.
    """
    script = Path(path)
    if request.train.out is not None:
        make_folder(Path(request.train.out))
    workers, code = workers_of(request.train), None
    comparison = ScriptComparison("a call")
    begun = False

    def runner(module: nn.Module, ordinary: Call) -> Call:
        """Return what runs for a module's call: the first training call of one that is large enough is compared, and ends the script."""
        nonlocal begun
        if comparison.done:  # a script that takes every exception for its own went on
            raise EndedError
        if begun or trained_size(module) < LARGE_ENOUGH:
            return ordinary
        begun = True
        return partial(call, module)

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        compare = partial(_compared, request, workers, script.name, module, args, kwargs)
        comparison.end_script(type(module).__name__, compare)

    with suppress(EndedError), as_one_of(workers), outermost_calls(runner):
        code = run_as_main(script, arguments)
    try:
        if not comparison.done:
            raise never_trained(path, code)
        return comparison.outcome()
    except BaechiError:
        if workers is not None:
            workers.failed = True
        raise


def compare_call(request: CompareRequest, module: nn.Module, inputs: Any) -> Comparison | None:
    """Every method's plan of the module's training call with these inputs, predicted and measured; the module is left as it was. Raises as
    `compare_script` does."""
    with python_generators_kept():
        return _compared(request, None, "", module, *arguments_of(inputs))


def _compared(
    request: CompareRequest, workers: Workers | None, script: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Comparison | None:
    model = type(module).__name__ + f" of {script}" * bool(script)
    ended = "; there the script was ended" * bool(script)
    notes = [f"measured are the forward and backward passes of the first training call of {model}{ended}"]
    with put_back(module), one_thread():
        with put_back(module):
            log = _noted(module, args, kwargs)
        call = ComparedCall(_captured(log, module, request.train))
        notes += [call.call.note] * bool(call.call.note)
        return with_call(request.train, call, workers, lambda backend: compared(request, backend, backend.capture(), model, notes))


def _noted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[NotedFragment]:
    """The fragments of the module's call, with what they were given and returned. It is called twice: the first call may change what its
    code reads, for example by making a table on first use, and the second one is then traced anew."""
    watch_compiles()
    log: list[NotedFragment] = []
    compiled = traced(module, lambda graph, _: NotedFragment(graph, log))
    for _ in range(2):
        log.clear()
        with traced_for_us(TraceLog()):
            compiled(*args, **kwargs)
    return list(log)


def _captured(log: Sequence[NotedFragment], module: nn.Module, request: TrainRequest) -> TrainingCall:
    """The call in which these fragments ran. Raises CaptureError if none of them trains, or one can't be captured."""
    trained = [n for n in log if any(isinstance(v, Tensor) and v.requires_grad for v in n.values)]
    if not trained:
        raise CaptureError(f"a call of {type(module).__name__} can't be traced: TorchDynamo found no graph of ops in it")
    made: dict[int, tuple[int, int]] = {}
    given: list[Given] = []
    for number, noted in enumerate(trained):
        links = {i: made[id(a)] for i, a in enumerate(noted.args) if id(a) in made}
        given.append((noted.graph, tuple(leaf_of(a) if i not in links else a for i, a in enumerate(noted.args)), links, ()))
        made |= {id(v): (number, i) for i, v in enumerate(noted.values)}
    return captured_call(request, given, type(module).__name__, module)
