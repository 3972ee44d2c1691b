"""`baechi compare SCRIPT`: the script runs to its first training call that is large enough. There the call is captured and profiled once,
every method places it, and its forward and backward passes are measured in turn, as it is and placed; then the script ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.cost import attach_costs, scale_links
from baechi_ext.errors import BaechiError, CaptureError
from baechi_ext.ir.files import make_folder
from baechi_ext.simulate import Timeline
from runtime.accounting import how_measured, measured_peak_bytes, require_room
from runtime.as_main import require_script, run_as_main
from runtime.calls.capturing import TrainingCall, capture_training_call, plain_arguments
from runtime.calls.module_calls import LARGE_ENOUGH, Call, never_trained, outermost_calls, trained_size
from runtime.calls.module_watch import SETTLING, ModuleWatch, keeps_changing
from runtime.calls.parallelize import executor_of
from runtime.calls.phases import PhasedStep
from runtime.calls.placed_function import LoadedCall
from runtime.calls.placing import costs_of_call
from runtime.calls.verify import (
    Moment,
    PythonRandomness,
    as_written,
    hooks_off,
    largest_difference,
    one_thread,
    outputs_by_number,
    relative_differences,
    require_same_tree,
    timed,
)
from runtime.compare.comparison import UNPLACED, Comparison
from runtime.compare.contender import SINGLE, CompareRequest, Contender, planned
from runtime.compare.files import keep
from runtime.measure import WARMUP, measure_in_turn
from runtime.parity_result import Parity, require_parity
from runtime.program import one_device_timeline
from runtime.progress import progress, rounds
from runtime.run_folder import begin_run
from runtime.thread_executor import StepTimes, ThreadExecutor
from runtime.training import devices_of, find_cluster, kind_of_executor, versions


class _EndedError(BaseException):
    """Ends the script where its module is called. No script's `except Exception` takes it for a failure of its own."""


def compare_script(request: CompareRequest, path: str, arguments: tuple[str, ...]) -> Comparison:
    """Every method's plan of the script's first training call, predicted and measured. What the script would do after it it does not.

    Raises FileError where there is no script, CaptureError where it ends before such a call, or the call can't be captured, and what
    profiling and link probing raise; what a method raises is its row's refusal.
    """
    script = require_script(path)
    if request.train.out is not None:
        make_folder(Path(request.train.out))
    comparing, code = _Comparing(request, script), None
    try:
        with outermost_calls(comparing.runner):
            code = run_as_main(script, arguments)
    except _EndedError:
        pass
    if comparing.error is not None:
        raise comparing.error
    if comparing.comparison is None:
        raise never_trained(path, code)
    return comparing.comparison


class _Comparing:
    """Calls of modules while the script runs."""

    def __init__(self, request: CompareRequest, script: Path) -> None:
        self._request, self._script = request, script
        self._begun = False
        self.comparison: Comparison | None = None
        self.error: BaechiError | None = None

    def runner(self, module: nn.Module, ordinary: Call) -> Call:
        """What the module is called by: the first training call of one that is large enough is compared, and ends the script."""
        if self.comparison is not None or self.error is not None:  # a script that takes every exception for its own went on
            raise _EndedError
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
                steps = _Steps(call, module, partial(ordinary, *args, **kwargs), inputs)
                self.comparison = _measured(self._request, steps, f"{name} of {self._script.name}")
        except BaechiError as e:
            self.error = e
        except Exception as e:  # noqa: BLE001 - what nobody has thought of, and what the script's own forward raises
            reason = (str(e).splitlines() or [""])[0]
            self.error = CaptureError(f"a call of {name} can't be compared: {type(e).__name__}: {reason}")
        finally:
            before.restore()
        raise _EndedError


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


Results = tuple[dict[int, Tensor], Mapping[str | int, Tensor]]
"""Outputs by number, and gradients by parameter's name or input's number."""


class _Steps:
    """The script's call and its backward pass, as it is and placed, from gradients of its outputs that are the same for all. The gradients
    that come out are handed over, not added to those of the parameters, and none of the script's hooks on these sees them.
    """

    def __init__(self, call: TrainingCall, module: nn.Module, plain: Call, inputs: Sequence[Tensor]) -> None:
        self.call, self._module, self._plain, self._inputs = call, module, plain, inputs
        self._before = Moment(module)
        outputs, tree = outputs_by_number(plain(), call.captured.returned)
        require_same_tree(call.captured.returned.fill([outputs[i] for i in range(len(outputs))], inputs), tree)
        self._tangents = _tangents(outputs, call.captured.differentiable)
        self._expected = self._named(self._with_gradients(outputs))
        self._after = Moment(module)

    def plain(self) -> Results:
        """As it is."""
        return self._with_gradients(outputs_by_number(self._plain(), self.call.captured.returned)[0])

    def placed(self, loaded: LoadedCall) -> Results:
        return self._with_gradients(dict(enumerate(loaded.run(self._inputs))))

    def _with_gradients(self, outputs: dict[int, Tensor]) -> Results:
        wanted, step = list(self.call.captured.reached_by), self.call.step
        sources = [step.live[n] if isinstance(n, str) else self._inputs[n] for n in wanted]
        used = [i for i in self._tangents if outputs[i].requires_grad]
        with hooks_off(sources):
            roots, given = [outputs[i] for i in used], [self._tangents[i] for i in used]
            values = torch.autograd.grad(roots, sources, given, allow_unused=True)
        return outputs, {n: value for n, value in zip(wanted, values, strict=True) if value is not None}

    def parity(self, loaded: LoadedCall, *, relaxed: bool) -> Parity:
        """Of outputs, gradients and buffers with those of the call as it is, from the same state; and unless random numbers are `relaxed`,
        raises ParityError where these or the random state differ."""
        self._before.restore()
        expected, actual = self._expected, self._named(self.placed(loaded))
        found = relative_differences(expected, actual)
        worst = max(found, key=found.__getitem__)
        most = max(largest_difference(expected.get(name), actual.get(name)) for name in found)
        parity = Parity(found[worst] <= self.call.tolerance, most, found[worst], worst, len(expected), self.call.tolerance)
        if not relaxed:
            require_parity(parity)
            self._after.random.require_same()
        return parity

    def _named(self, results: Results) -> dict[str, Tensor]:
        outputs, gradients = results
        named = {f"output {i}": value.detach() for i, value in outputs.items()}
        named |= {f"gradient of {n}" if isinstance(n, str) else f"gradient of input {n}": g for n, g in gradients.items()}
        return named | {f"new value of {n}": buffer.detach().clone() for n, buffer in self._module.named_buffers()}


def _tangents(outputs: Mapping[int, Tensor], differentiable: Sequence[bool]) -> dict[int, Tensor]:
    """Gradients to begin with: of a number, as a loss is, 1; of other outputs random ones, as many ops' gradients of ones are 0."""
    generator = torch.Generator().manual_seed(0)

    def tangent(output: Tensor) -> Tensor:
        if output.dim() == 0:
            return torch.ones_like(output)
        return torch.randn(output.shape, generator=generator, dtype=output.dtype).to(output.device)

    return {i: tangent(outputs[i].detach()) for i, counts in enumerate(differentiable) if counts}


@dataclass(frozen=True)
class _Loading:
    """What makes contenders of plans."""

    steps: _Steps
    executor: ThreadExecutor
    single: Timeline
    relaxed: bool

    def load(self, contender: Contender) -> None:
        """Loads the contender's plan and checks it. Of `single` it is the one-device program."""
        call, executor = self.steps.call, self.executor
        timeline = self.single if contender.method == SINGLE or contender.result is None else contender.result.timeline
        contender.peak_bytes = measured_peak_bytes(executor, timeline, call.captured.binding, call.step)  # type: ignore[arg-type]
        require_room(executor.devices, timeline.cluster, contender.peak_bytes)
        phases = PhasedStep(executor, timeline, call.captured, replace(call.step, inputs=()))
        loaded = LoadedCall(call.captured, phases, call.step.live, call.home)
        contender.parity = self.steps.parity(loaded, relaxed=self.relaxed)
        contender.loaded = partial(self.steps.placed, loaded)


def _measured(request: CompareRequest, steps: _Steps, model: str) -> Comparison:
    train, captured = request.train, steps.call.captured
    executor = executor_of(devices_of(train), train.timeout_seconds)
    profile = costs_of_call(train, executor, captured, steps.call.step)
    graph = attach_costs(captured.graph, profile, contended=len(executor.devices) > 1)
    single = one_device_timeline(attach_costs(captured.graph, profile))
    cluster, probe = find_cluster(train, executor)
    loading = _Loading(steps, executor, single, train.relaxed_random)
    contenders = tuple(planned(graph, scale_links(cluster, train.comm_cost_factor), request.plans, single, loading.load))
    runs = {UNPLACED: steps.plain, **{c.method: c.loaded for c in contenders if c.loaded is not None}}
    with progress(f"measuring {train.num_steps} steps of each of {len(runs)} variants") as show:
        variants = {name: partial(_times, run) for name, run in runs.items()}
        told = rounds(show, WARMUP + train.num_steps)
        measurement = measure_in_turn(executor, variants, num_steps=train.num_steps, on_step=told)
    comparison = Comparison(
        model=model,
        executor=kind_of_executor(train),
        contenders=contenders,
        measurement=measurement,
        single=single,
        peaks_measured_by=how_measured(executor),
        notes=(
            f"these are the forward and backward passes of the first training call of {model}; there the script was ended",
            *([steps.call.note] if steps.call.note else []),
            *([] if probe is None else [f"probed link: {probe}"]),
        ),
        command=request.command,
        versions=versions(),
        unplaced="eager, one thread",
    )
    if train.out is not None:
        begin_run(Path(train.out))
        keep(Path(train.out), graph, profile, comparison)
    return comparison


def _times(run: Callable[[], Results]) -> StepTimes:
    us, _ = timed(run)
    return StepTimes(us, ())
