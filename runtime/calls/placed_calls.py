"""A module's calls, placed: which calls run placed, which as they are, and what is captured, placed and verified when.

A call runs placed where the module trains and gradients are recorded. The first such call is captured, profiled and placed. Another
shape of the arguments, or another state of the module, is captured when it comes the second time, and runs as it is the first time.
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_private import is_traced
from baechi_ext.capture.torch_tree import Tree, flatten
from baechi_ext.errors import BaechiError, CaptureError
from runtime.calls.blocks.placed_blocks import BlockSettings, PlacedBlocks
from runtime.calls.capturing import arguments_of, capture_training_call, plain_arguments
from runtime.calls.ladder import Runner, next_rung
from runtime.calls.module_watch import SETTLING, ModuleWatch, keeps_changing
from runtime.calls.phases import PhasedStep
from runtime.calls.placed_function import LoadedCall
from runtime.calls.placing import Placement, place_alike, place_call
from runtime.calls.recording_workers import recorder_on
from runtime.calls.verify import (
    Comparison,
    Moment,
    PythonRandomness,
    Verification,
    as_written,
    one_thread,
    outputs_by_number,
    require_same_tree,
    timed,
)
from runtime.calls.workers import Workers
from runtime.thread_executor import ThreadExecutor
from runtime.train_request import TrainRequest

MOST_CALLS = 8
"""So many shapes and states of a module are captured; further ones run as they are."""
_WAITING = 64


@dataclass(frozen=True)
class Settings:
    """How a module's calls are to be placed."""

    request: TrainRequest
    executor: ThreadExecutor | Workers
    verify_steps: int = 2
    fallback: bool = False
    record: bool = False
    """Whether some calls of the first shape are recorded; see runtime.calls.recording."""


@dataclass
class PlacedCall:
    """Calls of one shape."""

    key: object
    watch: ModuleWatch
    loaded: LoadedCall
    placement: Placement
    tolerance: float
    verification: Verification = field(default_factory=Verification)
    count: int = 0


class PlacedCalls:
    """Stands in for `module.__call__`; `ordinary` is what it stands in for."""

    def __init__(self, module: nn.Module, ordinary: Runner, settings: Settings) -> None:
        self.given = module
        self.module = getattr(module, "_orig_mod", module)
        """What is captured: of a compiled module, what was compiled."""
        self.settings = settings
        self.calls: list[PlacedCall] = []
        self.refusal = ""
        """Why training calls run as they are; empty while they run placed."""
        self.unplaced = 0
        """Training calls that ran as they are: of another shape, or before a refusal."""
        self._ordinary = ordinary
        self.other_way: PlacedBlocks | None = None
        """What runs training calls that can't be captured."""
        self.interrupted: Placement | None = None
        """What the first call's search had found when it was interrupted; None once a call is placed."""
        self._waiting: dict[object, ModuleWatch] = {}
        """Shapes that came once, and the module as it was then."""
        self._said: set[str] = set()
        self._settling = 0
        self._inside = threading.local()
        self._process = os.getpid()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._inside, "now", False) or not self._trains():
            return self.run_unplaced(*args, **kwargs)
        if self.other_way is not None:
            return self.other_way(*args, **kwargs)
        try:
            return self._train(args, kwargs)
        except CaptureError as e:
            return self._refuse(e, args, kwargs)

    def run_unplaced(self, *args: Any, **kwargs: Any) -> Any:
        """What the module itself returns. Where its parameters are on several devices, they are brought together for the call."""
        with self._within():
            if not self._spread:
                return self._ordinary(*args, **kwargs)
            home = self.calls[0].loaded.home
            together = {name: value.to(home) for name, value in self._state().items()}
            found = torch.func.functional_call(self.module, together, args, kwargs, tie_weights=True)
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    if together[name] is not buffer:
                        buffer.copy_(together[name])
            return found

    def _run_as_written(self, *args: Any, **kwargs: Any) -> Any:
        with as_written():
            return self.run_unplaced(*args, **kwargs)

    def prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Captures and places the call with these arguments, without running it. Raises what the stages raise."""
        inputs, given = flatten((tuple(args), dict(kwargs)), arguments_of(self.module))
        key = _key(inputs, given)
        if self._find(key) is None:
            with torch.enable_grad(), as_written():
                self._add(key, inputs, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module has calls of its own."""

    def __reduce__(self) -> tuple[type, tuple]:
        """A saved module has none."""
        return type(None), ()

    def drop(self) -> None:
        """From now on all calls run as they are."""
        self.refusal = self.refusal or "it was unplaced"

    @property
    def _spread(self) -> bool:
        """Whether the parameters are on several devices by now."""
        return bool(self.calls) and self.settings.executor.devices[0].torch_device.type != "cpu"

    def _state(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def _trains(self) -> bool:
        return (
            self.module.training
            and not self.refusal
            and torch.is_grad_enabled()
            and os.getpid() == self._process  # threads do not live on in a fork
            and not is_traced()
        )

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Calls of the module in here are its own affair."""
        before = getattr(self._inside, "now", False)
        self._inside.now = True
        try:
            yield
        finally:
            self._inside.now = before

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs, given = plain_arguments(self.module, args, kwargs)
        if not any(t.requires_grad for t in (*self._state().values(), *inputs)):
            return self.run_unplaced(*args, **kwargs)
        key = _key(inputs, given)
        call = self._find(key)
        if call is None and self.calls and not self._is_worth_it(key):
            self.unplaced += 1
            return self.run_unplaced(*args, **kwargs)
        if call is None or call.count < self.settings.verify_steps:
            with as_written():
                return self._verified(call, key, (inputs, given), (args, kwargs))
        outputs = call.loaded.run(inputs)
        call.count += 1
        return self._returned(call, outputs, inputs)

    def _find(self, key: object) -> PlacedCall | None:
        return next((c for c in self.calls if c.key == key and c.watch.holds()), None)

    def _is_worth_it(self, key: object) -> bool:
        """Whether to capture another shape: not before it comes the second time, and not where too many came already."""
        if key not in self._waiting or not self._waiting[key].holds():
            if len(self._waiting) == _WAITING:
                self._waiting.clear()
            self._waiting[key] = ModuleWatch(self.module)
            return False
        if self._spread:
            return False
        if len(self.calls) == MOST_CALLS:
            self._say_once(
                f"{MOST_CALLS} shapes of the arguments of {type(self.module).__name__}, or states of its attributes, are placed; others "
                "run unplaced: pad batches to few shapes, and pass numbers that change as tensors"
            )
            return False
        return True

    def _add(self, key: object, inputs: list[Tensor], given: Tree) -> PlacedCall:
        """Captures, places and loads the call. The module's attributes are as they were."""
        try:
            return self._added(key, inputs, given)
        except BaechiError:
            raise
        except Exception as e:  # noqa: BLE001 - what nobody has thought of is no reason to stop where `fallback` is wanted
            reason = (str(e).splitlines() or [""])[0]
            raise CaptureError(f"a call of {type(self.module).__name__} can't be placed: {type(e).__name__}: {reason}") from e

    def _added(self, key: object, inputs: list[Tensor], given: Tree) -> PlacedCall:
        request, executor = self.settings.request, self.settings.executor
        watch = ModuleWatch(self.module)
        with self._within():
            call = capture_training_call(self.module, inputs, given, request)
        captured, step = call.captured, call.step
        alike = place_alike(self.calls[0].placement, captured) if self.calls else None
        if alike is None:
            place = executor.place if isinstance(executor, Workers) else partial(place_call, executor=executor)
            placement = place(replace(request, model=step.name), captured=captured, step=step)
            placement = replace(placement, note=call.note)
            if placement.result.interrupted:
                self.interrupted = None if self.calls else placement
                raise KeyboardInterrupt
            timeline = placement.result.timeline
        else:
            placement, timeline = self.calls[0].placement, alike
        step.inputs = ()
        load = executor.load if isinstance(executor, Workers) else partial(PhasedStep, executor)
        phases = load(timeline, captured, step)
        records = self.settings.record and not self.calls
        recorder = recorder_on(executor, phases, timeline, captured, step) if records else None
        loaded = LoadedCall(captured, phases, step.live, call.home, recorder=recorder)
        self.calls.append(PlacedCall(key, watch, loaded, placement, call.tolerance))
        self.interrupted = None
        return self.calls[-1]

    def _returned(self, call: PlacedCall, outputs: list[Tensor], inputs: Sequence[Tensor]) -> Any:
        return call.loaded.captured.returned.fill(outputs, inputs)

    def _verified(self, call: PlacedCall | None, key: object, taken: tuple[list[Tensor], Tree], given: tuple[tuple, dict]) -> Any:
        """The call, run as it is and placed; captured first where it has to be."""
        inputs, tree = taken
        if self.settings.verify_steps == 0:
            call = self._add(key, inputs, tree)
            outputs = call.loaded.run(inputs)
            call.count += 1
            return self._returned(call, outputs, inputs)
        args, kwargs = given
        watch, randomness = ModuleWatch(self.module), PythonRandomness()
        before = Moment(self.module)
        with one_thread():
            forward_us, expected = timed(lambda: self.run_unplaced(*args, **kwargs))
        after = Moment(self.module)
        try:
            randomness.require_undrawn()
            if changed := watch.changes():
                self._settling += 1
                if self._settling <= SETTLING:
                    return expected
                raise keeps_changing(changed)
            before.restore()
            if call is None:
                call = self._add(key, inputs, tree)
                if self._spread:  # what autograd keeps of the call above was moved away from under it
                    before.restore()
                    forward_us, expected = timed(lambda: self.run_unplaced(*args, **kwargs))
                    after = Moment(self.module)
            before.restore()
            return self._compared(call, inputs, expected, (forward_us, after))
        except BaechiError as e:
            after.restore()
            if isinstance(e, CaptureError):
                self.other_way = self._next_rung(e)
            if self.other_way is None and not self.settings.fallback:
                raise
            if self.other_way is None:
                self._go_on_unplaced(e)
            return expected

    def _compared(self, call: PlacedCall, inputs: list[Tensor], expected: Any, eager: tuple[float, Moment]) -> Any:
        forward_us, after = eager
        own, tree = outputs_by_number(expected, call.loaded.captured.returned)
        go_on = self._go_on_unplaced if self.settings.fallback else None
        outputs = call.loaded.run(inputs, Comparison(call.loaded, call.verification, (forward_us, own, inputs), call.tolerance, go_on))
        value = self._returned(call, outputs, inputs)
        require_same_tree(value, tree)
        names = {n: f"new value of {n}" for n in after.buffers}
        call.verification.compare(
            {f"output {i}": t for i, t in own.items()} | {names[n]: t for n, t in after.buffers.items()},
            {f"output {i}": outputs[i] for i in own} | {names[n]: b for n, b in self.module.named_buffers()},
            call.tolerance,
        )
        after.random.require_same()
        call.count += 1
        call.verification.steps += 1
        return value

    def _next_rung(self, error: CaptureError) -> PlacedBlocks | None:
        asked = self.settings
        if isinstance(asked.executor, Workers):  # blocks run on threads
            return None
        settings = BlockSettings(asked.request, asked.executor, asked.verify_steps, asked.fallback)
        return next_rung(self.module, self._run_as_written, settings, error)

    def _refuse(self, error: CaptureError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.settings.fallback:
            raise error
        self._go_on_unplaced(error)
        return self.run_unplaced(*args, **kwargs)

    def _go_on_unplaced(self, error: BaechiError) -> None:
        self.refusal = str(error)
        self._say_once(f"{type(self.module).__name__} runs unplaced: {error}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            sys.stderr.write(f"baechi: {text}\n")
            sys.stderr.flush()


def _key(inputs: Sequence[Tensor], given: Tree) -> object:
    """What calls must have in common to be run by one captured graph, apart from the module's state."""
    tensors = tuple((x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in inputs)
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return given, tensors, autocast
