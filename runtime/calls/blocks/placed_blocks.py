"""Training calls of a module in blocks, for a module whose call can't be captured as one graph: to autograd each is one function, from
parameters and arguments to what the module returns. The first calls are run as they are, too, and compared."""

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_private import backward_may_come_again, nest_of, parts_of
from baechi_ext.errors import BaechiError, CaptureError, ExecutionError, ParityError
from runtime.calls.blocks.backward import BlockBackward
from runtime.calls.blocks.placement import BlockPlan, plan_blocks
from runtime.calls.blocks.tape import Tape
from runtime.calls.blocks.threads import BlockThreads, inside_a_block
from runtime.calls.module_watch import Attributes
from runtime.calls.placed_function import NO_SECOND_ORDER
from runtime.calls.verify import one_thread, relative_difference, tolerance_of
from runtime.script_report import INTERRUPTED
from runtime.tables import as_time
from runtime.thread_executor import ThreadExecutor
from runtime.train_request import TrainRequest

_SHARE = 0.01
"""A gradient is compared with at least this part of the largest of all gradients."""
_TIMES = 200
_THREADS: dict[tuple[str, ...], BlockThreads] = {}
_making = threading.Lock()


@dataclass(frozen=True)
class BlockSettings:
    """How a module's blocks are to be placed."""

    request: TrainRequest
    executor: ThreadExecutor
    verify_steps: int = 2
    fallback: bool = False
    """Where the module has no blocks, or they compute something else: go on with the module as it is, and say so on stderr."""


class PlacedBlocks:
    """Stands in for a module's training calls. `ordinary` runs the module as it is; `reason` says why it isn't captured."""

    def __init__(self, module: nn.Module, ordinary: Callable[..., Any], settings: BlockSettings, reason: str) -> None:
        self.module = module
        self.ordinary = ordinary
        self.settings = settings
        self.reason = reason
        self.plan: BlockPlan | None = None
        self.interrupted: BlockPlan | None = None
        """What the search for the plan had found when it was interrupted; None once there is a plan."""
        self.refusal = ""
        """Why calls run as they are; empty while they run in blocks."""
        self.verified = 0
        self.times: tuple[deque[float], deque[float]] = (deque(maxlen=_TIMES), deque(maxlen=_TIMES))
        """Microseconds of forward and backward passes that were not verified."""
        self.threads = _threads_of(settings.executor)
        self._lazy = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.refusal or inside_a_block() or not torch.is_grad_enabled():
            return self.ordinary(*args, **kwargs)
        with self.threads.lock:
            try:
                if self.plan is None:
                    self._prepare(args, kwargs)
                if self.refusal:
                    return self.ordinary(*args, **kwargs)
                if self.verified < self.settings.verify_steps:
                    return self._verified(args, kwargs)
            except (CaptureError, ParityError) as e:
                if not self.settings.fallback:
                    raise
                self._refuse(str(e))
                return self.ordinary(*args, **kwargs)
            begin = time.perf_counter_ns()
            value = self._run(args, kwargs, None)
            self.times[0].append((time.perf_counter_ns() - begin) / 1000)
            return value

    def line(self) -> str:
        """One line: what was placed where, what that gains, and why it is not more."""
        name = type(self.module).__name__
        if self.plan is None:
            why = self.refusal or (INTERRUPTED if self.interrupted else "no training call of it came")
            return f"{name}: no blocks are placed; {why}"
        placed, names = self.plan, [d.name for d in self.threads.devices]
        counts = [sum(block.device == d for block in placed.blocks) for d in range(len(names))]
        what = ", ".join(f"{count} on {device}" for count, device in zip(counts, names, strict=True))
        predicted = f"predicted {as_time(placed.single.makespan_us)} on one device, {as_time(placed.result.predicted_step_us)} placed"
        outside = f"{1 - placed.found.covered:.0%} of the forward pass is outside of blocks"
        left_out = f" ({'; '.join(placed.found.left_out[:3])})" if placed.found.left_out else ""
        refused = f"; it runs unplaced: {self.refusal}" if self.refusal else ""
        return (
            f"{name}: {len(placed.blocks)} blocks, {what} ({placed.result.plan.method}); {predicted}; {outside}{left_out}; "
            f"not op by op, since {self.reason}{refused}"
        )

    def _refuse(self, why: str) -> None:
        self.refusal = why
        _say(f"{type(self.module).__name__} runs unplaced: {why}")

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        moment = Moment(self.module)
        try:
            with one_thread(), torch.enable_grad():
                given = _without_graph((args, kwargs))
                found = plan_blocks(self.module, (self.ordinary, *given), self.settings.request, self.settings.executor, self.threads)
        except CaptureError as e:
            raise CaptureError(f"{self.reason}; and it can't be placed in blocks: {e}") from e
        finally:
            moment.restore()
        if found.result.interrupted:
            self.interrupted = found
            raise KeyboardInterrupt
        self.plan, self.interrupted = found, None
        devices = self.threads.devices
        if not self.plan.result.splits:
            self.refusal = self.plan.result.why_whole
        elif devices[0].torch_device.type != "cpu":
            for block in self.plan.blocks:
                block.module.to(devices[block.device].torch_device)
        _say(self.line())

    def _tape(self) -> Tape:
        home = None
        if self.threads.devices[0].torch_device.type != "cpu":
            home = self.threads.devices[0].torch_device
        return Tape(self.threads, self.plan.blocks, home, lazy=self._lazy and not self.plan.found.code_draws)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], check: "_Check | None") -> Any:
        tape = self._tape()
        with one_thread():
            value = tape.run(self.ordinary, args, kwargs)
        if any(call.rewritten for call in tape.calls):
            self._lazy = False  # the code between the blocks changes in place what a block may still be reading
        leaves, kind = parts_of(value)
        roots = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}.values())
        if not roots:
            return value
        known = tape.leaves(roots)
        arguments = {id(own): argument for argument, own in tape.inputs}
        done = _Pass(self, tape, roots, [id(leaf) for leaf in known], check)
        found = _InBlocks.apply(done, *(arguments.get(id(leaf), leaf) for leaf in known))
        by_root = dict(zip(map(id, roots), found, strict=True))
        return nest_of(kind, [by_root.get(id(leaf), leaf) for leaf in leaves])

    def _verified(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as it is and in blocks, compared. Where blocks whose results come later don't do, each is waited for."""
        before = Moment(self.module)
        with one_thread(), _buffers_apart(self.module):
            expected = self.ordinary(*args, **kwargs)
            after = Moment(self.module)
        while True:
            before.restore()
            try:
                check = _Check(self, expected)
                value = self._run(args, kwargs, check)
                check.outputs(value, after)
                self.verified += 1
                return value
            except Exception as e:  # noqa: BLE001 - whatever the module's code makes of blocks
                if self._lazy:
                    self._lazy = False
                    continue
                after.restore()
                if isinstance(e, BaechiError):
                    raise
                reason = (str(e).splitlines() or [""])[0]
                name = type(self.module).__name__
                raise CaptureError(f"{name} can't run in blocks: {type(e).__name__}: {reason}; nor as one graph: {self.reason}") from e


class _Check:
    """What the module as it is computed, to compare with."""

    def __init__(self, owner: PlacedBlocks, expected: Any) -> None:
        self.owner = owner
        self.lazy = owner._lazy
        leaves, self._kind = parts_of(expected)
        self._expected = leaves
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        low = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        some = next(owner.module.parameters(), torch.empty(0))
        self._tolerance = tolerance_of([*low, some.dtype, *(t.dtype for t in tensors)], some.device)

    def outputs(self, value: Any, after: "Moment") -> None:
        """Raises ParityError, naming the tensor that differs most."""
        leaves, kind = parts_of(value)
        if kind != self._kind:
            raise ParityError(f"{type(self.owner.module).__name__} in blocks returns another nest of tensors than as it is")
        module = self.owner.module
        tensors = [{f"output {i}": t for i, t in enumerate(some) if isinstance(t, Tensor)} for some in (self._expected, leaves)]
        tensors[0] |= {f"new value of {name}": b for name, b in after.buffers.items()}
        tensors[1] |= {f"new value of {name}": b for name, b in module.named_buffers()}
        _require_same(*tensors, tolerance=self._tolerance)
        if not torch.equal(torch.get_rng_state(), after.torch_random):
            raise ParityError("blocks drew other random numbers than the module as it is; it draws them in an order that is not fixed")

    def gradients(
        self, done: "_Pass", tangents: Sequence[Tensor | None], found: dict[int, Tensor], leaves: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """The gradients to use; raises ParityError where those of blocks that are waited for differ."""
        outputs = list({id(t): t for t in self._expected if isinstance(t, Tensor) and t.requires_grad}.values())
        pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if t is not None]
        with one_thread():
            roots, given = zip(*pairs, strict=True)
            values = torch.autograd.grad(roots, leaves, given, retain_graph=True, allow_unused=True)
        expected = {key: v for key, v in zip(done.keys, values, strict=True) if v is not None}
        names = {id(p): f"gradient of {name}" for name, p in self.owner.module.named_parameters()}
        names = {key: names.get(key, f"gradient of input {i}") for i, key in enumerate(done.keys)}
        try:
            named = [{names[key]: gradient for key, gradient in some.items()} for some in (expected, found)]
            _require_same(*named, tolerance=self._tolerance, share=_SHARE)
        except ParityError:
            if not self.lazy:
                raise
            self.owner._lazy, self.owner.verified = False, 0
            return expected
        return found


@dataclass
class _Pass:
    """One call under way."""

    owner: PlacedBlocks
    tape: Tape | None
    roots: list[Tensor]
    keys: list[int]
    """Of the leaves."""
    check: _Check | None

    def backward(self, tangents: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor | None]:
        if self.tape is None:
            raise RuntimeError(
                "backward was called a second time for one call of a placed module, whose values are freed; "
                "give retain_graph=True to the first"
            )
        tape, keep = self.tape, backward_may_come_again() or self.check is not None
        pairs = [(root, t) for root, t in zip(self.roots, tangents, strict=True) if t is not None]
        with self.owner.threads.lock, one_thread():
            begin = time.perf_counter_ns()
            roots, given = zip(*pairs, strict=True)
            found = BlockBackward(tape, roots, given, keep=keep).run()
            took_us = (time.perf_counter_ns() - begin) / 1000
        if self.check is None:
            self.owner.times[1].append(took_us)
        else:
            found = self.check.gradients(self, tangents, found, leaves)
        if not backward_may_come_again():
            self.tape = None
        return [found.get(key) for key in self.keys]


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, done: _Pass, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.done = done
        ctx.leaves = leaves if done.check is not None else ()
        return tuple(root.detach() for root in done.roots)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # which once_differentiable would take for constants
            raise ExecutionError(f"gradients are to have gradients (create_graph=True): {NO_SECOND_ORDER}")
        return (None, *ctx.done.backward(tangents, ctx.leaves))


class Moment:
    """What a call of a module may change, as it is now: buffers, attributes, random states."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        self._attributes = Attributes(module)
        self.torch_random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._random = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy_random = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        self._attributes.restore()
        for name, buffer in self._module.named_buffers():
            buffer.data.copy_(self.buffers[name])  # by way of .data: no graph minds
        torch.set_rng_state(self.torch_random)
        if self._cuda_random:
            torch.cuda.set_rng_state_all(self._cuda_random)
        random.setstate(self._random)
        if self._numpy_random is not None:
            sys.modules["numpy"].random.set_state(self._numpy_random)


@contextmanager
def _buffers_apart(module: nn.Module) -> Iterator[None]:
    """While it is entered, the module has copies of its buffers: what changes them in place leaves another call's graph as it is."""
    copies: dict[int, Tensor] = {}
    before = []
    for part in module.modules():
        buffers = vars(part)["_buffers"]
        for name, buffer in buffers.items():
            if buffer is not None:
                before.append((buffers, name, buffer))
                buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
    try:
        yield
    finally:
        for buffers, name, buffer in before:
            buffers[name] = buffer


def _require_same(expected: dict[str, Tensor], actual: dict[str, Tensor], *, tolerance: float, share: float = 0.0) -> None:
    """Raises ParityError, naming the tensor that differs most, relative to its largest magnitude, or to that `share` of the largest of all
    tensors, if that is more: a gradient that is nearly 0 is what rounding left of larger ones."""
    floor = share * max((_magnitude(tensor) for tensor in expected.values()), default=0.0)
    worst, most = "", 0.0
    for name in [*expected, *(name for name in actual if name not in expected)]:
        a, b = expected.get(name), actual.get(name)
        difference = relative_difference(a, b)
        if difference != float("inf") and difference > 0:
            own = _magnitude(a)
            difference = difference * max(own, 1e-30) / max(own, floor, 1e-30)
        if difference > most:
            worst, most = name, difference
    if most > tolerance:
        raise ParityError(
            f"the module in blocks differs from the module as it is: {worst} by {most:.3g} relative (allowed {tolerance:g}); "
            "its code may change tensors in a way that blocks don't see. Go on unplaced with fallback"
        )


def _magnitude(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _without_graph(value: Any) -> Any:
    """The same nest, its tensors cut off from what made them."""
    leaves, kind = parts_of(value)
    cut = [leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return nest_of(kind, cut)


def _threads_of(executor: ThreadExecutor) -> BlockThreads:
    """The process's threads for these devices; all modules share them."""
    key = (*(device.name for device in executor.devices), str(executor.timeout_seconds))
    with _making:
        if key not in _THREADS:
            _THREADS[key] = BlockThreads(executor.devices, executor.timeout_seconds)
        return _THREADS[key]


def _say(text: str) -> None:
    sys.stderr.write(f"baechi: {text}\n")
    sys.stderr.flush()
