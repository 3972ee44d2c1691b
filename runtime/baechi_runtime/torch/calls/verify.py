"""A placed fragment's call beside the same call as the user's code runs it: same arguments and random state, everything compared.

The unplaced call works on the same tensors, but for those that it changes, of which it gets copies. What hooks a user has put on parameters
and activations does not see it.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from baechi_ext.capture.torch_private import backward_again, dispatched
from baechi_ext.errors import BaechiError, ParityError
from baechi_runtime.host.generators import python_generators_kept
from baechi_runtime.measure.comparator import SHARE as SHARE_OF_LARGEST
from baechi_runtime.measure.parity_result import UNPLACED_RANDOMNESS, in_json, require_parity
from baechi_runtime.torch.calls.capturing import FULL_PRECISION
from baechi_runtime.torch.calls.placed_function import Gradients, LoadedFragment
from baechi_runtime.torch.lowering.devices import one_thread
from baechi_runtime.torch.lowering.random_state import RandomState
from baechi_runtime.torch.parity import GRADIENT_OF, NEW_VALUE_OF, OUTPUT, Masks, in_doubles, judged

ALWAYS = 16
"""Up to this call the powers of two are verified whatever it takes; later ones, and one at random of a thousand, within SHARE of the
time."""
SHARE = 0.01
MORE = 4
"""The most calls that are verified in place of those that had no backward pass to compare; a loop may have none at all."""
_RANDOM = 1000


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Leave the module's buffers, the mode of each module in it, and the generators, as they were."""
    random, kept = RandomState(), [(m, m.training, dict(m._buffers.items())) for m in module.modules()]
    values = [(b, b.detach().clone()) for b in module.buffers() if not isinstance(b, nn.UninitializedBuffer)]
    try:
        yield
    finally:
        random.restore()
        for owner, training, buffers in kept:
            owner.training = training
            for name, buffer in buffers.items():
                owner._buffers[name] = buffer
        for buffer, value in values:
            buffer.data.copy_(value)


@dataclass
class Verification:
    """The record of what was compared so far of one fragment's calls, and of which call is compared next."""

    always: int = 2
    """Number of first calls that are all compared; 0: none is ever compared."""
    timed: bool = True
    """Keep later calls within SHARE of the time. False with several workers: all must verify the same calls, whatever their clocks say."""
    tolerance: float = 0.0
    """The allowed relative difference."""
    share: float = SHARE_OF_LARGEST
    """The part of the largest gradient that a gradient's magnitude counts as at least."""
    advice: str = UNPLACED_RANDOMNESS
    """Advice about a larger one."""
    widest: float = 0.0
    """The largest difference that was allowed, also from exact results; that is of one comparison, and widens no other."""
    max_rel_diff: float = 0.0
    compared: int = 0
    differed: bool = False
    """True once something differed by more than it may."""
    steps: int = 0
    """Verified calls: everything was compared, gradients as well."""
    last: int = 0
    """The number of the last verified call, from 1."""
    seconds: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    _begun: int = 0
    _open: set[int] = field(default_factory=set)
    """Calls whose gradients are still to be compared."""
    _next: int = 4
    _random: int = _RANDOM

    def is_due(self, number: int) -> bool:
        """True if call `number`, from 1, is to be verified."""
        if self.always == 0:
            return False
        if number <= self.always or (self.steps < min(self.always, self._begun) and self._begun < self.always + MORE):
            return True
        if number < min(self._next, self._random):
            return False
        return number <= ALWAYS or not self.timed or self.seconds <= SHARE * (time.monotonic() - self.begun)

    def gone_forward(self, number: int, seconds: float, *, is_all: bool) -> None:
        """Note that call `number` was compared up to its gradients, which took `seconds` beyond the call itself; `is_all`: it has none."""
        self._begun += 1
        self._open.add(number)
        self.seconds += seconds
        while self._next <= number:
            self._next *= 2
        while self._random <= number:
            # Anywhere in the next thousand, by a number that every worker process comes to as well.
            self._random += 1 + (self._random * 48271 + 11) % (2 * _RANDOM - 1)
        if is_all:
            self.done(number)

    def done(self, number: int) -> None:
        """Note that call `number` was verified, its gradients as well; once, however many backward passes it has."""
        if number in self._open:
            self._open.remove(number)
            self.steps += 1
            self.last = max(self.last, number)

    @property
    def allowed(self) -> float:
        """The largest relative difference that was allowed in any comparison."""
        return max(self.tolerance, self.widest)

    def to_json(self) -> dict[str, Any]:
        done = {"steps": self.steps, "last": self.last, "tolerance": self.allowed}
        return {**done, "compared": self.compared, "max_rel_diff": in_json(self.max_rel_diff)}

    def require(
        self,
        expected: Mapping[str, Tensor | None],
        actual: Mapping[str, Tensor | None],
        exact: Callable[[], Mapping[str, Tensor | None] | None] = lambda: None,
    ) -> None:
        """Raise ParityError, naming the tensors that differ by more than the tolerance; where there are `exact` ones, and if these are much
        farther from them than the expected ones."""
        found = judged(expected, actual, self.tolerance, self.share, exact)
        self.widest = max(self.widest, found.tolerance)
        self.max_rel_diff = max(self.max_rel_diff, found.max_rel_diff)
        self.compared += found.compared
        try:
            require_parity(found, advice=self.advice)
        except ParityError:
            self.differed = True
            raise

    def require_same_draws(self, after: RandomState | None) -> None:
        """Raise ParityError where the generators are not as the unplaced call left them, `after` it."""
        if after is not None and not after.is_now():
            self.differed = True
            raise ParityError("the placed call drew other random numbers than the unplaced one")


def verified_run(
    loaded: LoadedFragment,
    args: Sequence[Tensor],
    number: int,
    verification: Verification,
    go_on: Callable[[BaechiError], None],
) -> Sequence[Tensor]:
    """Run the fragment as it is and placed, and compare; returns its results. `verification` are the comparisons so far.

    Where they differ, or the placed call fails, `go_on` is told, which raises where going on unplaced is not wanted; then arguments and
    generators are as before the call, and it is run as it is. Where gradients differ, those of the unplaced call are used.
    """
    begun, part = time.monotonic(), loaded.part
    before = RandomState() if part.draws_on is not None or part.calls_others else None  # another thread, that makes batches, may draw now
    kept = {i: args[i].detach().clone() for i in part.written}
    shadows = [kept[i].clone() if i in kept else a.detach().requires_grad_(a.requires_grad) for i, a in enumerate(args)]
    exact = _Doubles(loaded, args, kept, is_wanted=goes_by_doubles(args, verification.tolerance))
    try:
        with one_thread(), torch.enable_grad(), exact.noting_masks(), python_generators_kept():
            expected = loaded.graph(*shadows)
    except Exception:  # noqa: BLE001 - whatever it is, the user's own call raises it, behind the changes that were made before
        restore(args, {}, before)
        return loaded.graph(*args)
    after, outputs = None if before is None else RandomState(), part.outputs_among(expected)
    if before is not None:
        before.restore()
    spent = time.monotonic() - begun
    wanted = [i for i in part.reached_by if shadows[i].requires_grad]

    def compared(tangents: Sequence[Tensor | None], gradients: Gradients) -> Gradients:
        """Makes the gradients of the unplaced call, too; see Check."""
        begun = time.monotonic()
        used = {i: t for i, t in enumerate(tangents) if t is not None}
        if not used or not used.keys() <= outputs.keys():
            return gradients
        roots, given = [outputs[i] for i in used], list(used.values())
        with one_thread():
            values = torch.autograd.grad(roots, [shadows[i] for i in wanted], given, allow_unused=True, retain_graph=backward_again())
        unplaced = {i: v for i, v in zip(wanted, values, strict=True) if v is not None}
        verification.seconds += time.monotonic() - begun
        names = {i: f"{GRADIENT_OF}{part.state.get(i, f'argument {i}')}" for i in wanted}
        try:
            verification.require(_named(names, unplaced), _named(names, gradients), lambda: exact.gradients(names, used))
        except ParityError as e:
            go_on(e)
            return unplaced
        verification.done(number)
        return gradients

    try:
        values = loaded.run(args, compared)
        begun = time.monotonic()
        written = {i: f"{NEW_VALUE_OF}{part.state.get(i, f'argument {i}')}" for i in part.written}

        def named(outputs: Sequence[Any], new: Sequence[Tensor]) -> dict[str, Any]:
            return {f"{OUTPUT}{i}": v for i, v in enumerate(outputs)} | _named(written, dict(enumerate(new)))

        verification.require(named(expected, shadows), named(values, args), lambda: exact.results(named))
        verification.require_same_draws(after)
    except BaechiError as e:
        restore(args, kept, before)
        go_on(e)
        return loaded.graph(*args)
    verification.gone_forward(number, spent + time.monotonic() - begun, is_all=not wanted)
    return values


def goes_by_doubles(args: Sequence[Tensor], tolerance: float) -> bool:
    """True if rounding may be all that calls with these arguments differ by, where they differ by more than the tolerance: where sums of
    parts, or in 16 bits, differ by more than is allowed for these, a placed call is another computation."""
    return any(a.is_cuda for a in args) or tolerance <= FULL_PRECISION


def in_double(value: Tensor) -> Tensor:
    """A copy in double precision, or of the same type where it has no fractions, that needs a gradient where the value does."""
    copy = value.detach().to(torch.float64, copy=True) if value.is_floating_point() else value.detach().clone()
    return copy.requires_grad_(value.requires_grad)


class _Doubles:
    """A call in double precision, with the masks of its dropout, once somebody asks for it: a placed call has other kernels than an
    unplaced one, on CUDA devices cuDNN's BatchNorm or others in TF32, on CPUs interpolation, and deep networks make much of what these
    round. None where that can't be had, or is not wanted."""

    def __init__(self, loaded: LoadedFragment, args: Sequence[Tensor], kept: Mapping[int, Tensor], *, is_wanted: bool) -> None:
        self._loaded, self._masks, self._is_wanted = loaded, Masks(), is_wanted
        self._args = [kept.get(i, a.detach()) for i, a in enumerate(args)]
        self._trained = [a.requires_grad for a in args]
        self._found: tuple[Sequence[Any], list[Tensor]] | None = None

    def noting_masks(self) -> AbstractContextManager[None]:
        """A context for the unplaced call, whose masks are drawn in it."""
        return dispatched(self._masks.noted) if self._is_wanted else nullcontext()

    def results(self, named: Callable[[Sequence[Any], Sequence[Tensor]], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Its results and the arguments as they are afterwards, `named`."""
        found = self._run()
        return None if found is None else named(*found)

    def _run(self) -> tuple[Sequence[Any], list[Tensor]] | None:
        if self._found is None and self._is_wanted and self._masks.are_all:
            doubles = [in_double(a).requires_grad_(is_trained) for a, is_trained in zip(self._args, self._trained, strict=True)]
            with torch.enable_grad():
                values = in_doubles(lambda: self._loaded.graph(*doubles), self._masks)
            self._found, self._is_wanted = None if values is None else (values, doubles), values is not None
        return self._found

    def gradients(self, names: Mapping[int, str], tangents: Mapping[int, Tensor]) -> dict[str, Any] | None:
        """Those of the arguments that have names, from these of its outputs."""
        if (found := self._run()) is None:
            return None
        values, doubles = found
        outputs = self._loaded.part.outputs_among(values)
        try:
            gradients = torch.autograd.grad(
                [outputs[i] for i in tangents],
                [doubles[i] for i in names],
                [t.to(outputs[i].dtype) for i, t in tangents.items()],
                allow_unused=True,
                retain_graph=True,
            )
        except RuntimeError:
            return None
        return dict(zip(names.values(), gradients, strict=True))


def normalised_by_part(graph: fx.GraphModule, sizes: Sequence[int]) -> Callable[..., Sequence[Tensor]]:
    """The fragment as the user's code runs it, but that BatchNorm normalises over each part of the batch by itself: what such a placed call
    computes. Running values are those of the first part. No sizes: it is as it is."""
    return graph if not sizes else lambda *args: _ByPart(graph, sizes).run(*args)


class _ByPart(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, sizes: Sequence[int]) -> None:
        super().__init__(graph)
        self._sizes = sizes

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not functional.batch_norm:
            return super().call_function(target, args, kwargs)
        given = inspect.signature(target).bind(*args, **kwargs).arguments
        x = given.pop("input")
        if not given.get("training") or x.shape[0] % sum(self._sizes):
            return target(x, **given)
        parts = x.split([size * x.shape[0] // sum(self._sizes) for size in self._sizes])
        others = {**given, "running_mean": None, "running_var": None}
        return torch.cat([target(part, **(others if k else given)) for k, part in enumerate(parts)])


def restore(args: Sequence[Tensor], kept: Mapping[int, Tensor], generators: RandomState | None) -> None:
    """Put changed arguments and the generators back; autograd does not count that as a change."""
    for i, value in kept.items():
        args[i].data.copy_(value)
    if generators is not None:
        generators.restore()


def _named(names: Mapping[int, str], values: Mapping[int, Any]) -> dict[str, Any]:
    return {name: values.get(i) for i, name in names.items()}
