"""Parity: the placed step must compute what the unplaced step computes: loss, every gradient, every buffer, every updated parameter.

Where the user allows parts of a batch to be normalised by themselves, the reference is the unplaced step over these parts, one by one.

On CUDA devices the unplaced step has other kernels than the program of a plan (cuDNN's BatchNorm, for one), which round differently. So the
placed step is compared with our program on one device, and that with the unplaced step: neither may be much farther than the other from
what the unplaced step computes in double precision. All with deterministic kernels and without TF32; what is timed has what the user set.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from baechi_ext.capture.parts import Parts
from baechi_ext.capture.torch_joint import Binding
from baechi_ext.capture.torch_private import dispatched, is_foreign
from baechi_ext.errors import ParityError
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.measure.comparator import compare, differences
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.models.training_step import EagerStep, TrainingStep
from baechi_runtime.torch.lowering.random_state import RandomState, as_it_was
from baechi_runtime.torch.processes.executor import Executor
from baechi_runtime.torch.streams.executor import StreamStep

T = TypeVar("T")
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-4}
"""Largest relative difference. 0 is expected; some CUDA kernels add in another order from run to run, whatever they are told."""
TIMES_EAGER = 4.0
"""So many times as far as the unplaced step our program on one device may be from what double precision gives."""

TOLERANCE_OF_PARTS = {"cpu": 1e-4, "cuda": 1e-3}
"""The same where a step over parts of its batch is compared with the whole one: sums over the batch are added up in another order, and
kernels for other sizes round differently. A part that is left out or counted twice differs by a share of the whole."""
SHARE_OF_PARTS = 1e-3
"""A gradient that ought to be 0, as of the bias of attention's keys, is what rounding leaves of sums of such a part of the largest one."""

SHARE_OF_NORMALISED = 1e-2
"""The same of a bias before BatchNorm over parts: a sum over all places of all pictures."""

OUTPUT, GRADIENT_OF, NEW_VALUE_OF = "output ", "gradient of ", "new value of "
_ROUNDING = 1e-3
_BERNOULLI = torch.ops.aten.bernoulli_.float
_LABELLED = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)


def check_parity(executor: Executor, timeline: Timeline, binding: Binding, step: TrainingStep) -> Parity:
    """Runs one unplaced and one placed step from the same state and seed and compares them, on CUDA devices by way of our program on one
    of them; on CPU devices two of each where the optimizer keeps state, which is made in the first and read in the second, unless the
    batch is in parts. The state is put back.

    Raises ExecutionError where the placed step fails.
    """
    per_part = binding.parts if binding.parts is not None and binding.parts.batch_norm_per_part else None
    device = executor.devices[0].torch_device
    before = 1 if step.optimizer.slots and device.type == "cpu" and binding.parts is None else 0
    with as_it_was(step) as saved, exact_kernels(device):

        def from_the_start(results: Callable[[], T]) -> T:
            step.restore(saved)
            return results()

        actual = from_the_start(lambda: placed_results(executor, timeline, binding, step, before))
        masks = None if device.type == "cpu" else Masks()
        expected = from_the_start(lambda: executor.call(0, lambda: unplaced_results(step, device, per_part, masks, before)))
        if binding.parts is not None:
            share = SHARE_OF_PARTS if per_part is None else SHARE_OF_NORMALISED
            return from_the_start(lambda: executor.call(0, lambda: parity_of_parts(step, device, expected, actual, share)))
        if masks is None:
            return compare(expected, actual, TOLERANCE["cpu"])
        alone = actual
        if len(timeline.cluster) > 1:
            single = one_device_timeline(timeline.graph)
            alone = from_the_start(lambda: placed_results(executor, single, binding, step))
        parity = compare(alone, actual, TOLERANCE["cuda"])
        exact = None
        if parity.passed and all(_is_dropout(binding.ops[v].node) for v in binding.seeded_ops):
            exact = from_the_start(lambda: executor.call(0, lambda: exact_results(step, device, masks)))
        if exact is None:
            return compare(expected, actual, TOLERANCE["cuda"]) if parity.passed else parity
        return worst_of((parity, parity_of_kernels(exact, expected, alone)))  # on one device the former is 0, whatever it computes


@contextlib.contextmanager
def exact_kernels(device: torch.device) -> Iterator[None]:
    """Within, CUDA devices add up in a fixed order where they can, and in full precision. Nothing changes for others."""
    if device.type == "cpu":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    precisions: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = [each.fp32_precision for each in precisions], cudnn.benchmark, algorithms
    try:
        for each in precisions:
            each.fp32_precision = "ieee"
        cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that know only one order
            yield
    finally:
        for each, precision in zip(precisions, before[0], strict=True):
            each.fp32_precision = precision
        cudnn.benchmark = before[1]
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])


def placed_results(executor: Executor, timeline: Timeline, binding: Binding, step: TrainingStep, before: int = 0) -> dict[str, Tensor]:
    """A placed step's loss, gradients and new values, by name; that of a step behind so many others."""
    placed = executor.load(timeline, binding, step, keep_gradients=True)
    if isinstance(placed, StreamStep):
        placed.rehearse()
    torch.manual_seed(step.seed)
    for _ in range(before):
        placed.run()
    loss, _ = placed.run()
    return named_results(loss, *placed.gather())


def exact_results(step: TrainingStep, device: torch.device, masks: "Masks") -> dict[str, Tensor] | None:
    """The results of the unplaced step in double precision, with the masks that it drew; None where it can't, or has no memory for that."""

    def run() -> dict[str, Tensor]:
        here = step.replica(device)
        doubles = tuple(i.double() if i.is_floating_point() else i for i in here.inputs)
        here = replace(here, module=here.module.double(), inputs=doubles)
        return results_of(EagerStep(here, torch.device("cpu")))  # which runs it where it is

    return in_doubles(run, masks)


def in_doubles(run: Callable[[], T], masks: "Masks") -> T | None:
    """The outcome of a run in double precision, with the masks that were noted; None where ops know no doubles, or there is no memory for
    them, or it draws other masks. Generators are left as they were."""
    masks.begin(0.0)
    generators = RandomState()
    try:
        with dispatched(masks.handed_out):
            return run()
    except (RuntimeError, IndexError):
        return None
    finally:
        generators.restore()


def judged(
    expected: Mapping[str, Tensor | None],
    actual: Mapping[str, Tensor | None],
    tolerance: float,
    share: float,
    exact: Callable[[], Mapping[str, Tensor | None] | None],
) -> Parity:
    """The parity of what a placed call comes to with the `expected`: by differences of `tolerance` or, where some are larger and there are
    `exact` results, by how far both are from these."""
    found = compare(expected, actual, tolerance, share=share)
    if found.passed or any(difference.why for _, difference in found.beyond) or (doubles := exact()) is None:
        return found
    exactly, plain, placed = ({name: v for name, v in each.items() if v is not None} for each in (doubles, expected, actual))
    return parity_of_kernels(exactly, plain, placed, min(tolerance, TOLERANCE["cuda"]))


def parity_of_kernels(
    exact: Mapping[str, Tensor], eager: Mapping[str, Tensor], ours: Mapping[str, Tensor], least: float = TOLERANCE["cuda"]
) -> Parity:
    """The parity of our program on one device with the unplaced step, both held against double precision: the largest relative error of the
    loss, of an output, of a gradient, and of a new value, may be TIMES_EAGER times the unplaced step's, or `least`, which rounding alone
    may do. All have the same names. Where double precision comes to something of another kind (a truth value that rounding decides, an
    overflow), there is no such error, and the unplaced step's result is what is compared with: it would allow all others anything."""
    eager, ours = ({name: v.double() if v.is_floating_point() else v for name, v in named.items()} for named in (eager, ours))
    exact = {**exact, **{name: eager[name] for name, found in differences(exact, eager).items() if found.why}}
    allowed, found = (differences(exact, named, share=SHARE_OF_PARTS) for named in (eager, ours))

    def parity(names: Sequence[str]) -> Parity:
        tolerance = TIMES_EAGER * max((allowed[name].relative for name in names if name in allowed), default=0.0)
        return Parity.of({name: found[name] for name in names}, len(names), max(tolerance, least))

    of_kind = [[name for name in found if name.startswith(kind)] for kind in ("loss", OUTPUT, GRADIENT_OF, NEW_VALUE_OF)]
    return worst_of(parity(names) for names in of_kind if names)


def worst_of(found: Iterable[Parity]) -> Parity:
    """The one that is to be reported: one that failed, and of equals the one with the largest difference."""
    return min(found, key=lambda each: (each.passed, -each.max_rel_diff))


def parity_of_parts(
    step: TrainingStep,
    device: torch.device,
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    share: float = SHARE_OF_PARTS,
) -> Parity:
    """The parity of a step whose sums over the batch are added up in another order with the whole one; the step's state is that before it.
    A gradient counts as at least this share of the largest one.

    New parameters are compared with what the optimizer makes of the gradients that are compared: one that divides by their size, as Adam,
    makes a step of what rounding leaves of a gradient that ought to be 0.
    """
    eager = EagerStep(step, device)
    parameters = dict(eager.step.module.named_parameters())
    for name, parameter in parameters.items():
        gradient = actual.get(f"{GRADIENT_OF}{name}")
        parameter.grad = gradient.to(parameter) if gradient is not None and gradient.shape == parameter.shape else None
    eager.optimizer.step()
    eager.optimizer.zero_grad(set_to_none=True)
    of_these = {f"{NEW_VALUE_OF}{name}": value.detach().to("cpu", copy=True) for name, value in parameters.items()}
    return compare({**expected, **of_these}, actual, TOLERANCE_OF_PARTS[device.type], share=share)


def unplaced_results(
    step: TrainingStep, device: torch.device, parts: Parts | None, masks: "Masks | None" = None, before: int = 0
) -> dict[str, Tensor]:
    """The unplaced step's loss, gradients and new values, by name, that of a step behind so many others; with `parts`, part after part, as
    the user lets it be normalised. The `masks` of its dropout are noted."""
    eager = EagerStep(step, device)
    torch.manual_seed(step.seed)
    for _ in range(before):
        eager.run()
    if masks is None:
        return results_of(eager, parts)
    with dispatched(masks.noted):
        return results_of(eager, parts)


def results_of(eager: EagerStep, parts: Parts | None = None) -> dict[str, Tensor]:
    """The loss, gradients and new values of one step, by name."""
    loss = eager.run() if parts is None else part_after_part(eager, parts)
    gradients = {n: p.grad for n, p in eager.step.module.named_parameters() if p.grad is not None}
    results = named_results(loss, gradients, eager.step.state())
    eager.optimizer.zero_grad(set_to_none=True)
    return results


def named_results(loss: Tensor, gradients: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a step's loss, gradients and new values on the host, by the names that they have where steps are compared."""
    named = {"loss": loss}
    named |= {f"{GRADIENT_OF}{name}": g for name, g in gradients.items()}
    named |= {f"{NEW_VALUE_OF}{name}": value for name, value in state.items()}
    return {name: value.detach().to("cpu", copy=True) for name, value in named.items()}


def part_after_part(eager: EagerStep, parts: Parts) -> Tensor:
    """One step whose gradients are added up over the parts of its batch; returns the loss. Buffers become what the first part makes of
    them. Dropout masks are those of the whole batch, which is run for them first.

    Raises ParityError where the loss is no mean over the examples: normalised by running values, the whole batch's is not its parts'.
    """
    module, inputs = eager.step.module, eager.step.inputs
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    masks = Masks()
    with dispatched(masks.noted), torch.no_grad():
        module(*inputs)
    _require_mean(module, inputs, parts, masks)
    _set(module, buffers)
    eager.optimizer.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for k, weight in enumerate(parts.weights):
        masks.begin(sum(parts.weights[:k]))
        with dispatched(masks.handed_out):
            loss = module(*parts.inputs_of(inputs, k)) * weight
        loss.backward()
        total = total.to(loss.device) + loss.detach()
        if k == 0:
            buffers = {name: value.clone() for name, value in module.named_buffers()}
    _set(module, buffers)
    eager.optimizer.step()
    return total


def is_mean_of_parts(step: TrainingStep, parts: Parts) -> bool:
    """True if the loss of the batch is the mean of those of its parts: not where these have different numbers of labels that count. Random
    numbers are drawn for each."""
    labels = _Labels()
    whole, total = _losses(step.module, step.inputs, parts, labels)
    return _alike(whole, total) and all(counts == labels.counts[1] for counts in labels.counts[1:])


def _require_mean(module: torch.nn.Module, inputs: Sequence[Tensor], parts: Parts, masks: "Masks") -> None:
    whole, total = _losses(module, inputs, parts, masks)
    if not _alike(whole, total):
        raise ParityError(
            f"the loss of the whole batch is {whole:.6g}, that of its parts {total:.6g}: it is no mean over the examples, so "
            "the batch can't be split; give --microbatches=1"
        )


def _alike(whole: float, total: float) -> bool:
    return not math.isfinite(whole) or math.isclose(whole, total, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _losses(module: torch.nn.Module, inputs: Sequence[Tensor], parts: Parts, calls: "Masks | _Labels") -> tuple[float, float]:
    """The loss of the whole batch, and the mean of those of its parts, normalised by running values."""
    norms = [m for m in module.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and m.training]
    for norm in norms:
        norm.eval()
    try:
        losses = []
        for values, share in [(inputs, 0.0), *((parts.inputs_of(inputs, k), sum(parts.weights[:k])) for k in range(len(parts.sizes)))]:
            calls.begin(share)
            with dispatched(calls.handed_out), torch.no_grad():
                losses.append(float(module(*values)))
    finally:
        for norm in norms:
            norm.train()
    return losses[0], sum(weight * loss for weight, loss in zip(parts.weights, losses[1:], strict=True))


def _set(module: torch.nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in module.named_buffers():
            value.copy_(buffers[name])


class _Labels:
    """The weight of the labels that each loss of the whole batch, and then of each part, is a mean over."""

    def __init__(self) -> None:
        self.counts: list[list[float]] = []

    def begin(self, share: float) -> None:
        """Begins the whole batch, or the next part."""
        self.counts.append([])

    def handed_out(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls an op, and notes what it counts."""
        result = func(*args, **kwargs)
        if func in _LABELLED:
            self.counts[-1].append(float(result[1]))
        return result


class Masks:
    """The masks that dropout draws for a whole batch, of which each part gets its rows."""

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []
        self._left: list[Tensor] = []
        self._share = 0.0
        self.are_all = True
        """False once anything else was drawn than masks."""

    def begin(self, share: float) -> None:
        """Begins a part, before which this share of the batch stands."""
        self._left, self._share = list(self._drawn), share

    def noted(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls an op, and notes its mask where it draws one: a tensor to multiply with, as on the host, or one beside the result."""
        tagged = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and func is not torch.ops.aten.native_dropout.default
        before = RandomState() if tagged else None
        result = func(*args, **kwargs)
        if is_foreign(func):
            self.are_all = False
        if func is _BERNOULLI:
            self._drawn.append(result.clone())
        elif _drops(func, args):
            self._drawn.append(result[1])
        elif before is not None and not before.is_now():  # attention without dropout has this tag, too, and draws nothing
            self.are_all = False
        return result

    def handed_out(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls an op; one that draws a mask gets the part's rows of the whole batch's."""
        if func is _BERNOULLI:
            return args[0].copy_(self._rows(args[0].shape))
        if _drops(func, args):
            mask = self._rows(args[0].shape)
            return torch.ops.aten.native_dropout_backward.default(args[0], mask, 0.0 if args[1] == 1 else 1 / (1 - args[1])), mask
        return func(*args, **kwargs)

    def _rows(self, shape: Sequence[int]) -> Tensor:
        mask = self._left.pop(0)
        if tuple(shape) == tuple(mask.shape):  # of what has no batch, such as a weight
            return mask
        dim = next((d for d, length in enumerate(shape) if length != mask.shape[d]))
        return mask.narrow(dim, round(self._share * mask.shape[dim]), shape[dim])


def _is_dropout(node: Any) -> bool:
    """True for an op whose masks `Masks` knows."""
    return node is not None and node.target is torch.ops.aten.native_dropout.default


def _drops(func: Any, args: Sequence[Any]) -> bool:
    """True for a dropout that draws its mask itself."""
    return func is torch.ops.aten.native_dropout.default and bool(args[2]) and args[1] > 0
