"""Running a module's call as it is, beside the placed one: same parameters, buffers and random state, everything compared."""

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_private import backward_again
from baechi_ext.capture.torch_tree import InputLeaf, ObjectLeaf, TensorLeaf, Tree, flatten
from baechi_ext.errors import BaechiError, CaptureError, ExecutionError, ParityError
from runtime.calls.placed_function import NO_SECOND_ORDER, Gradients, LoadedCall
from runtime.parity import TOLERANCE

LOW_PRECISION = 2e-2
"""Allowed relative difference where ops compute in 16 bits."""
FULL_PRECISION = 1e-5
_FEW = 8
_ROUNDING = 1e-5
_RETURNED = "what the module returns"
_DEPENDS = "forward depends on something that is not a tensor and changes; take that out of it, or go on unplaced with fallback"


@dataclass
class RandomState:
    """All generators a forward pass may draw from."""

    torch_cpu: Tensor = field(default_factory=torch.get_rng_state)
    torch_cuda: list[Tensor] = field(default_factory=lambda: torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])

    def restore(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda:
            torch.cuda.set_rng_state_all(self.torch_cuda)

    def require_same(self) -> None:
        """Raises ParityError where the generators are in another state now: this is how an unplaced call left them."""
        now = RandomState()
        if not (torch.equal(self.torch_cpu, now.torch_cpu) and all(map(torch.equal, self.torch_cuda, now.torch_cuda))):
            raise ParityError(f"the placed call drew other random numbers than the unplaced one; {_DEPENDS}")


class Moment:
    """A module's buffers and the random state, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self.random = RandomState()
        self._live = dict(module.named_buffers())
        self.buffers = {name: buffer.detach().clone() for name, buffer in self._live.items()}

    def restore(self) -> None:
        """Puts them back; to autograd, no buffer is changed by it."""
        self.random.restore()
        for name, value in self.buffers.items():
            self._live[name].data.copy_(value)


class PythonRandomness:
    """Notices that Python's or NumPy's own generator was drawn from."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[Any, ...]:
        numpy = sys.modules.get("numpy")
        drawn = () if numpy is None else tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in numpy.random.get_state())
        return random.getstate(), drawn

    def require_undrawn(self) -> None:
        """Raises CaptureError where it was."""
        if self._now() != self._before:
            raise CaptureError("forward draws from Python's or NumPy's random, which a captured call can't; draw with torch")


@contextmanager
def one_thread() -> Iterator[None]:
    """Ops run in one thread, so that sums are added up in the order in which a placed op adds them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def as_written() -> Iterator[None]:
    """What torch.compile was given runs uncompiled, which is what placed calls run: a compiler draws random numbers of its own."""
    with torch.compiler.set_stance("force_eager"):
        yield


@dataclass
class Verification:
    """What was compared so far."""

    max_rel_diff: float = 0.0
    compared: int = 0
    steps: int = 0
    unplaced_us: list[tuple[float, float]] = field(default_factory=list)
    """Wall times of the unplaced forward and backward passes, on one thread."""

    def to_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "compared": self.compared, "max_rel_diff": self.max_rel_diff}

    def compare(self, expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None], tolerance: float) -> None:
        """Raises ParityError, naming the tensors that differ by more than the tolerance, relative to the largest magnitude."""
        wrong = []
        for name, difference in relative_differences(expected, actual).items():
            self.max_rel_diff = max(self.max_rel_diff, difference)
            self.compared += 1
            if difference > tolerance:
                wrong.append(f"{name} ({'missing or of another shape' if difference == float('inf') else f'{difference:.2g}'})")
        if wrong:
            more = f" and {len(wrong) - _FEW} more" if len(wrong) > _FEW else ""
            raise ParityError(
                f"the placed step differs from the unplaced one, relatively (allowed {tolerance:g}): {', '.join(wrong[:_FEW])}{more}; "
                "forward may branch on values or depend on something that is not a tensor and changes from call to call. Take that out of "
                "forward, or go on unplaced with fallback"
            )


@dataclass
class Comparison:
    """Makes the gradients of an unplaced call, too (see runtime.calls.placed_function.Check)."""

    loaded: LoadedCall
    verification: Verification
    eager: tuple[float, Mapping[int, Tensor], Sequence[Tensor]]
    """The time of the unplaced call's forward pass, its outputs by number, and its inputs."""
    tolerance: float
    go_on: Callable[[BaechiError], None] | None
    """Told why the unplaced call's gradients are used; None: errors are raised."""
    second_order: bool = False
    """Gradients of the gradients were asked for."""

    def compared(self, tangents: Sequence[Tensor | None], gradients: Gradients) -> Gradients:
        """The placed gradients, or, where they differ and `go_on` is given, the unplaced ones. Raises ParityError where it is not."""
        if self.second_order:  # autograd is on its way through the unplaced call itself, and back here
            return gradients
        with one_thread():
            backward_us, expected = timed(lambda: self._unplaced(tangents, again=backward_again()))
        self.verification.unplaced_us.append((self.eager[0], backward_us))
        try:
            self._compare(expected, gradients)
        except ParityError as e:
            if self.go_on is None:
                raise
            self.go_on(e)
            return expected
        return gradients

    def recorded(self, tangents: Sequence[Tensor | None], gradients: Gradients) -> Gradients:
        """The unplaced call's gradients. Raises ExecutionError where going on unplaced is not wanted, and ParityError."""
        error = ExecutionError(f"gradients are to have gradients (create_graph=True): {NO_SECOND_ORDER}")
        if self.go_on is None:
            raise error
        self.go_on(error)
        self.second_order = True
        with one_thread():
            expected = self._unplaced(tangents, again=True, recorded=True)
        self._compare(expected, gradients)
        return expected

    def _compare(self, expected: Gradients, gradients: Gradients) -> None:
        title = {n: f"gradient of {n}" if isinstance(n, str) else f"gradient of input {n}" for n in self.loaded.captured.reached_by}
        named = ({title[n]: g for n, g in found.items()} for found in (expected, gradients))
        self.verification.compare(*named, self.tolerance)

    def _unplaced(self, tangents: Sequence[Tensor | None], *, again: bool, recorded: bool = False) -> dict[str | int, Tensor]:
        _, outputs, inputs = self.eager
        wanted = list(self.loaded.captured.reached_by)
        sources = [self.loaded.live[n] if isinstance(n, str) else inputs[n] for n in wanted]
        used = [(outputs[i], t) for i, t in enumerate(tangents) if t is not None and outputs[i].requires_grad]
        with hooks_off(sources):
            roots, given = zip(*used, strict=True)
            values = torch.autograd.grad(roots, sources, given, allow_unused=True, retain_graph=again, create_graph=recorded)
        return {n: v for n, v in zip(wanted, values, strict=True) if v is not None}


@contextmanager
def hooks_off(tensors: Sequence[Tensor]) -> Iterator[None]:
    """The caller's hooks on these tensors are for gradients that are used."""
    hooked = [(t, t._backward_hooks) for t in tensors if t._backward_hooks]
    for tensor, _ in hooked:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, hooks in hooked:
            tensor._backward_hooks = hooks


def tolerance_of(dtypes: Sequence[torch.dtype], device: torch.device) -> float:
    """What two computations of the same numbers may differ by."""
    if any(d in (torch.float16, torch.bfloat16) for d in dtypes):
        return LOW_PRECISION
    return max(FULL_PRECISION, TOLERANCE.get(device.type, FULL_PRECISION))


def _dense(a: Tensor) -> Tensor:
    return a.detach() if a.layout == torch.strided else a.detach().to_dense()


def _magnitude(a: Tensor) -> float:
    a = _dense(a)
    if a.numel() == 0 or a.dtype == torch.bool:
        return 0.0
    a = (torch.view_as_real(a) if a.is_complex() else a).double()
    return torch.where(a.isfinite(), a.abs(), 0.0).max().item()


def relative_differences(expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None]) -> dict[str, float]:
    """By name. What ought to be 0, as the gradient of a bias before BatchNorm, is rounding alone: it is seen beside the largest of all."""
    floor = _ROUNDING * max((_magnitude(t) for t in expected.values() if t is not None), default=0.0)
    names = [*expected, *(n for n in actual if n not in expected)]
    return {name: relative_difference(expected.get(name), actual.get(name), floor) for name in names}


def relative_difference(a: Tensor | None, b: Tensor | None, floor: float = 0.0) -> float:
    """Largest difference over largest magnitude, or over `floor` where that is more; infinite where only one is there, shapes differ, or
    one alone is no number."""
    difference = largest_difference(a, b)
    return difference / max(_magnitude(a), floor, 1e-30) if a is not None and 0 < difference < float("inf") else difference


def largest_difference(a: Tensor | None, b: Tensor | None) -> float:
    """Of all numbers; infinite where only one is there, shapes differ, or one alone is no number."""
    if a is None and b is None:
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = _dense(a), _dense(b).to(a.device)
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    same = (a == b) | a.isnan()
    return torch.where(same, 0.0, (a - b).abs()).max().item()


def outputs_by_number(value: Any, returned: Tree) -> tuple[dict[int, Tensor], Tree]:
    """The outputs among what an unplaced call returned, by their numbers in the captured call's tree, and the tree of what it returned.

    Raises ParityError where the captured call returns another number of tensors.
    """
    found, tree = flatten(value, _RETURNED)
    leaves = list(_tensor_leaves(returned))
    if len(leaves) != len(found):
        raise ParityError(f"the placed call returns another number of tensors than the unplaced one; {_DEPENDS}")
    pairs = reversed(list(zip(leaves, found, strict=True)))
    return {leaf.index: tensor for leaf, tensor in pairs if isinstance(leaf, TensorLeaf)}, tree


def require_same_tree(value: Any, tree: Tree) -> None:
    """Raises ParityError where what a placed call returned is not of the unplaced one's tree."""
    if flatten(value, _RETURNED)[1] != tree:
        raise ParityError(f"the placed call returns something else than the unplaced one beside its tensors; {_DEPENDS}")


def _tensor_leaves(tree: Tree) -> Iterator[TensorLeaf | InputLeaf]:
    for leaf in tree.leaves:
        if isinstance(leaf, ObjectLeaf):
            yield from _tensor_leaves(leaf.attributes)
        elif isinstance(leaf, (TensorLeaf, InputLeaf)):
            yield leaf


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time in microseconds, and the value."""
    begin = time.perf_counter_ns()
    value = function()
    return (time.perf_counter_ns() - begin) / 1000, value
