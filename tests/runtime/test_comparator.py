"""The comparator beside plain Python: exact fractions, one number after the other."""

import json
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert, to_builtins
from torch import Tensor, nn

from baechi_ext.errors import ParityError
from baechi_runtime.measure import comparator
from baechi_runtime.measure.comparator import SHARE, SMALLEST, compare, differences, magnitude
from baechi_runtime.measure.parity_result import Difference, Parity, require_parity
from baechi_runtime.models.training_step import OptimizerSpec, TrainingStep, optimizer_spec
from baechi_runtime.report.report import ParityCheck
from baechi_runtime.sharding import execute as sharding
from baechi_runtime.sharding.layout import make_mesh
from baechi_runtime.torch.calls.verify import Verification
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.parity import check_parity
from baechi_runtime.torch.threads.executor import ThreadExecutor
from tests.torch_steps import capture, make_step, scattered

INF, NAN = math.inf, math.nan
LARGEST = sys.float_info.max
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
EXACT = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
SPECIAL = (0.0, -0.0, 1.0, -2.0, 1e-30, 1e-45, 5e-324, 1e30, LARGEST, -LARGEST, INF, -INF, NAN)


# The oracle


def real_parts(values: Sequence[Any]) -> Iterator[float]:
    for value in values:
        yield from (value.real, value.imag) if isinstance(value, complex) else (value,)


def as_float(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return INF


def largest_of(values: Sequence[Any]) -> Fraction:
    return max((abs(Fraction(x)) for x in real_parts(values) if math.isfinite(x)), default=Fraction(0))


def by_hand(expected: Sequence[Any], actual: Sequence[Any], floor: Fraction = Fraction(0)) -> tuple[float, float]:
    """The absolute and the relative difference of as many real or complex numbers."""
    gap = Fraction(0)
    for x, y in zip(real_parts(expected), real_parts(actual), strict=True):
        if x == y or (x != x and y != y):
            continue
        if not (math.isfinite(x) and math.isfinite(y)):
            return INF, INF
        gap = max(gap, abs(Fraction(x) - Fraction(y)))
    if as_float(gap) == INF:
        return INF, INF
    return as_float(gap), as_float(gap / max(largest_of(expected), floor, Fraction(SMALLEST)))


def close(numbers: tuple[float, float]) -> Any:
    return pytest.approx(numbers, rel=1e-12, abs=0)


def found(expected: Any, actual: Any, name: str = "x") -> tuple[float, float]:
    difference = differences({name: expected}, {name: actual})[name]
    return difference.absolute, difference.relative


# Tensors


def transposed(t: Tensor) -> Tensor:
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 1 else t


def every_other(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, dim=t.dim() - 1)[..., ::2] if t.dim() else t


def conjugated(t: Tensor) -> Tensor:
    return t.conj().resolve_conj().conj() if t.is_complex() else t


def trained(t: Tensor) -> Tensor:
    return t.clone().requires_grad_(t.is_floating_point() or t.is_complex())


STRIDES: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, transposed, every_other, conjugated, trained)


def twice(t: Tensor) -> Tensor:
    """As COO, each number in two halves, and with zeros that are written down."""
    at = torch.ones(t.shape).nonzero().T
    values = t.reshape(-1)
    halves, rest = (values, values) if t.dtype == torch.bool else (values // 2, values - values // 2)
    return torch.sparse_coo_tensor(torch.cat([at, at], dim=1), torch.cat([halves, rest]), t.shape, check_invariants=True)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": torch.clone,
    "coo": lambda t: t.to_sparse(),
    "coo of rows": lambda t: t.to_sparse(1),
    "coo of halves": lambda t: twice(t) if not t.is_complex() else t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((1, 1)),
}


@st.composite
def pairs(draw: st.DrawFn, dtypes: Sequence[torch.dtype] = (*REAL, *COMPLEX)) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape and dtype: some numbers equal, some nearby, some others, some none."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.sampled_from([(), (0,), (1,), (5,), (2, 3), (3, 0, 2), (2, 1, 3)]))
    number = st.sampled_from(SPECIAL) | st.floats(width=32) | st.floats(-4, 4)
    count = math.prod(shape) * (2 if dtype.is_complex else 1)
    old = draw(st.lists(number, min_size=count, max_size=count))
    new = [draw(st.sampled_from([x, x, x, x * (1 + 1e-3), x + 1e-5]) | number) for x in old]

    def tensor(values: list[float]) -> Tensor:
        doubles = torch.tensor(values, dtype=torch.float64)
        return (torch.view_as_complex(doubles.view(-1, 2)) if dtype.is_complex else doubles).to(dtype).reshape(shape)

    return tensor(old), tensor(new)


@given(pairs(), st.sampled_from(STRIDES), st.sampled_from(STRIDES))
def test_real_and_complex_numbers_differ_as_their_fractions_do(pair: tuple[Tensor, Tensor], first: Any, second: Any) -> None:
    a, b = pair
    expected = by_hand(a.flatten().tolist(), b.flatten().tolist())
    assert found(first(a), second(b)) == close(expected)
    assert magnitude(first(a)) == as_float(largest_of(a.flatten().tolist()))
    assert found(a, first(a)) == found(second(b), b) == (0.0, 0.0)
    assert found(b, a)[0] == found(a, b)[0]


@given(pairs([torch.float16, torch.float32, torch.float64, *COMPLEX]))
def test_arrays_of_numpy_differ_as_tensors_do(pair: tuple[Tensor, Tensor]) -> None:
    a, b = pair
    x, y = a.numpy(), b.numpy()
    expected = found(a, b)
    backward = np.ascontiguousarray(y[::-1])[::-1] if y.ndim else y
    assert found(x, y) == found(x.copy(order="F"), backward) == expected
    assert magnitude(x) == magnitude(a)


def test_small_floats_of_numpy_differ_as_tensors_do() -> None:
    small = pytest.importorskip("ml_dtypes")
    a, b = torch.tensor([1.0, NAN, 3.0]).bfloat16(), torch.tensor([1.0, NAN, 3.25]).bfloat16()
    x, y = (t.float().numpy().astype(small.bfloat16) for t in (a, b))
    assert found(x, y) == found(a, b) == (0.25, 0.25 / 3)


def test_floats_of_eight_bits_differ_as_numbers() -> None:
    a, b = (torch.tensor(x).to(torch.float8_e4m3fn) for x in ([1.0, NAN, 4.0], [1.0, NAN, 5.0]))
    assert found(a, b) == (1.0, 0.25)
    assert found(a, a.clone()) == (0.0, 0.0)


@st.composite
def sparse_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.int64, torch.bool]))
    shape = draw(st.sampled_from([(1, 1), (2, 3), (4, 2), (3, 1)]))
    numbers = [0, 0, 0, 1, 2, -6] if not dtype.is_floating_point else [0, 0, 0, 0, 1, 2, -6, 1e30, INF, NAN]
    some = st.lists(st.sampled_from(numbers), min_size=math.prod(shape), max_size=math.prod(shape))
    old = draw(some)
    new = draw(st.just(old) | some)
    return torch.tensor(old).to(dtype).reshape(shape), torch.tensor(new).to(dtype).reshape(shape)


@given(sparse_pairs(), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS)))
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch 2.11's, which are given
def test_sparse_tensors_differ_as_dense_ones_do(pair: tuple[Tensor, Tensor], first: str, second: str) -> None:
    a, b = pair
    old, new = a.flatten().tolist(), b.flatten().tolist()
    if a.is_floating_point() or a.is_complex():
        if "coo of halves" in (first, second):  # half of infinity and the rest of it are no infinity
            a, b = (t.nan_to_num(0.0, 0.0) for t in (a, b))
            old, new = a.flatten().tolist(), b.flatten().tolist()
        expected = by_hand(old, new)
        assert magnitude(LAYOUTS[first](a)) == as_float(largest_of(old))
    else:
        expected = (0.0, 0.0) if old == new else (INF, INF)
    assert found(LAYOUTS[first](a), LAYOUTS[second](b)) == close(expected)


def test_a_sparse_tensor_is_never_written_out() -> None:
    def rows(*at: int) -> Tensor:
        values = torch.tensor([[1.0, 2.0]] * len(at))
        return torch.sparse_coo_tensor(torch.tensor([at]), values, (1 << 50, 2), check_invariants=True)

    assert found(rows(7, 1 << 49), rows(1 << 49, 7)) == (0.0, 0.0)
    assert found(rows(7, 9), rows(7, 8)) == (2.0, 1.0)
    assert found(rows(7), rows(7, 7)) == found(rows(7, 9), rows(7)) == (2.0, 1.0)


def test_places_of_sparse_tensors_are_told_apart() -> None:
    a = torch.tensor([[0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])
    b = torch.tensor([[0.0, 0.0, 1.5], [5.0, 0.25, 0.0]])
    assert found(a.to_sparse(), b.to_sparse()) == found(b.to_sparse(), a.to_sparse()) == (0.5, 0.1)
    assert found(a.to_sparse(), a.flip(0).to_sparse()) == (5.0, 1.0)


@given(st.data())
def test_bools_and_integers_are_equal_or_infinitely_apart(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(EXACT))
    number = st.booleans() if dtype == torch.bool else st.integers(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    old = data.draw(st.lists(number, max_size=6))
    new = data.draw(st.just(old) | st.just([not x if dtype == torch.bool else x ^ 1 for x in old]))
    a, b = torch.tensor(old, dtype=dtype), torch.tensor(new, dtype=dtype)
    expected = (0.0, 0.0) if old == new else (INF, INF)
    assert found(a, b) == found(every_other(a), b) == found(a.numpy(), b.numpy()) == expected
    assert magnitude(a) == 0


def test_a_count_beyond_what_doubles_hold_is_still_off_by_one() -> None:
    assert found(torch.tensor(2**53), torch.tensor(2**53 + 1)) == found(np.int64(2**53), np.int64(2**53 + 1)) == (INF, INF)
    assert found(np.array(["a", "b"]), np.array(["a", "c"])) == (INF, INF)


def test_a_difference_of_doubles_that_overflows_is_infinite() -> None:
    assert found(torch.tensor([LARGEST, 1.0], dtype=torch.float64), torch.tensor([-LARGEST, 1.0], dtype=torch.float64)) == (INF, INF)
    assert found(np.array([LARGEST / 4, LARGEST]), np.array([LARGEST / 4, -LARGEST / 2])) == (INF, INF)
    assert not compare({"x": np.float64(LARGEST)}, {"x": np.float64(-LARGEST)}, 1.99).passed


@pytest.mark.parametrize("piece", [1, 4, 7, 1 << 18])
@pytest.mark.parametrize("shape", [(), (13,), (3, 8), (9, 2), (2, 5, 3)])
def test_every_number_is_looked_at_whatever_the_pieces(shape: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparator, "_PIECE", piece)
    a = torch.ones(shape)
    for at in range(a.numel()):
        b = a.clone()
        b.view(-1)[at] = 1.5
        assert found(a, b) == found(a.numpy(), b.numpy()) == (0.5, 0.5)
        assert found(b, a) == (0.5, 0.5 / 1.5)
        assert magnitude(b) == 1.5
        b.view(-1)[at] = NAN
        assert found(a, b) == found(b, a) == (INF, INF)


@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 11, 1 << 11), (2, 1 << 21)])
def test_large_tensors_take_no_more_memory(shape: tuple[int, ...]) -> None:
    a, b = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    tracemalloc.start()
    assert found(a.T, b.T) == (1.0, 1 / SMALLEST)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < a.nbytes


# What is there, and of which kind


@pytest.mark.parametrize(
    ("expected", "actual", "why"),
    [
        (torch.zeros(2), None, "missing"),
        (None, torch.zeros(0), "not expected"),
        (torch.zeros(2, 1), torch.zeros(2), "(2,) instead of (2, 1)"),
        (torch.zeros(0, 2), torch.zeros(2, 0), "(2, 0) instead of (0, 2)"),
        (torch.zeros(2), torch.zeros(2).double(), "float64 instead of float32"),
        (np.zeros(2), torch.zeros(2), "float32 instead of float64"),
        (torch.zeros(2), torch.zeros(2).bfloat16(), "bfloat16 instead of float32"),
        (torch.zeros(2).bool(), torch.zeros(2).to(torch.uint8), "uint8 instead of bool"),
        (torch.zeros(0), torch.zeros(0).int(), "int32 instead of float32"),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), "not finite on one side"),
        (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0]), "not finite on one side"),
        (torch.tensor([INF]), torch.tensor([NAN]), "not finite on one side"),
        (torch.tensor(complex(1, NAN)), torch.tensor(complex(NAN, 1)), "not finite on one side"),
        (torch.tensor([True]), torch.tensor([False]), "bool that is not equal"),
    ],
)
def test_what_cannot_be_compared_differs_infinitely(expected: Any, actual: Any, why: str) -> None:
    assert differences({"x": expected}, {"x": actual}) == {"x": Difference(INF, INF, why)}
    assert found(actual, expected) == (INF, INF)
    parity = compare({"x": expected}, {"x": actual}, 1e300)
    assert (parity.passed, parity.max_abs_diff, parity.max_rel_diff, parity.worst) == (False, INF, INF, "x")


def test_what_neither_side_has_is_no_difference() -> None:
    assert differences({"x": None}, {}) == differences({}, {"x": None}) == {"x": Difference()}
    assert compare({}, {}, 0.0) == Parity(True, 0.0, 0.0, "", 0, 0.0)
    assert differences({}, {"y": torch.ones(1)})["y"].why == "not expected"


# Gradients that ought to be 0


@given(st.lists(pairs([torch.float32, torch.float64, torch.complex64]), min_size=1, max_size=4), st.sampled_from([0.0, SHARE, 0.5]))
def test_a_gradient_counts_as_a_share_of_the_largest_one_and_nothing_else_does(some: list[tuple[Tensor, Tensor]], share: float) -> None:
    kinds = ("gradient of", "new value of")
    expected = {f"{kind} {i}": a for kind in kinds for i, (a, _) in enumerate(some)}
    actual = {f"{kind} {i}": b for kind in kinds for i, (_, b) in enumerate(some)}
    values = {name: (a.flatten().tolist(), actual[name].flatten().tolist()) for name, a in expected.items()}
    floor = Fraction(share) * max(largest_of(old) for old, _ in values.values())
    by_name = {name: by_hand(*v, floor if name.startswith("gradient") else Fraction(0)) for name, v in values.items()}
    result = differences(expected, actual, share=share)
    assert {name: (d.absolute, d.relative) for name, d in result.items()} == {name: close(v) for name, v in by_name.items()}
    parity = compare(expected, actual, 1e-4, share=share)
    worst = max(relative for _, relative in by_name.values())
    assert (parity.passed, parity.compared, parity.tolerance) == (not worst > 1e-4, len(expected), 1e-4)
    assert parity.max_rel_diff == pytest.approx(worst, rel=1e-12, abs=0)
    assert by_name[parity.worst][1] == pytest.approx(worst, rel=1e-12, abs=0)
    assert {name for name, _ in parity.beyond} == {name for name, (_, relative) in by_name.items() if relative > 1e-4}


def test_what_is_rounding_beside_the_largest_gradient_is_no_difference() -> None:
    expected = {"gradient of w": torch.tensor([8.0]), "gradient of bias": torch.tensor([1e-9]), "loss": torch.tensor(1e-9)}
    actual = {**expected, "gradient of bias": torch.tensor([-1e-9]), "loss": torch.tensor(2e-9)}
    result = differences(expected, actual)
    assert result["gradient of bias"].relative == pytest.approx(2e-9 / 8e-5)
    assert result["loss"].relative == pytest.approx(1.0)
    assert differences(expected, actual, share=0.0)["gradient of bias"].relative == pytest.approx(2.0)
    assert not compare(expected, {**actual, "gradient of w": torch.tensor([8.1])}, 1e-4).passed


def test_a_mask_among_the_buffers_hides_nothing() -> None:
    mask = torch.tensor([-3.4e38])
    expected = {"gradient of w": torch.tensor([1e-3]), "new value of mask": mask, "new value of w": torch.tensor([0.1])}
    off = {**expected, "gradient of w": torch.tensor([2e-3]), "new value of w": torch.tensor([0.2])}
    assert [name for name, _ in compare(expected, off, 1e-2).beyond] == ["gradient of w", "new value of w"]


# What is said


def test_the_error_names_the_worst_few_by_how_much_and_what_to_do() -> None:
    expected: dict[str, Any] = {f"x{i}": torch.tensor([1.0]) for i in range(12)}
    actual = {f"x{i}": torch.tensor([1.0 + i / 8]) for i in range(11)}
    parity = compare(expected, actual, 0.2)
    with pytest.raises(ParityError) as error:
        require_parity(parity, advice="look again")
    worst = "x11 (missing), x10 (1.2 relative), x9 (1.1 relative), x8 (1 relative)"
    said = str(error.value)
    assert said.startswith(f"the placed step differs from the unplaced one (allowed 0.2): {worst}")
    assert said.endswith("x4 (0.5 relative) and 2 more; look again")
    require_parity(compare(expected, expected, 0.0))


def test_an_infinite_difference_is_null_in_json_and_infinite_on_a_page() -> None:
    parity = compare({"x": torch.tensor(1.0)}, {"x": torch.tensor(NAN)}, 1e-6)
    said = to_builtins(ParityCheck.of(parity))
    assert said == {"passed": False, "max_abs_diff": None, "max_rel_diff": None, "worst": "x", "compared": 1, "tolerance": 1e-6}
    assert str(convert(said, ParityCheck)) == "1 tensors, largest relative difference infinite"
    near = ParityCheck.of(compare({"x": torch.tensor(1.0)}, {"x": torch.tensor(1.5)}, 1e-6))
    assert (near.max_abs_diff, near.max_rel_diff) == (0.5, 0.5)
    assert str(near) == "1 tensors, largest difference 0.5"


def test_a_verification_that_failed_is_json() -> None:
    verification = Verification(tolerance=1e-2)
    for odd in (NAN, INF, -INF):
        with pytest.raises(ParityError, match="output 0 .not finite on one side"):
            verification.require({"output 0": torch.tensor([1.0])}, {"output 0": torch.tensor([odd])})
    said = json.loads(json.dumps(verification.to_json(), allow_nan=False))
    assert said == {"steps": 0, "compared": 3, "max_rel_diff": None, "last": 0, "tolerance": 1e-2}


def test_no_framework_is_loaded() -> None:
    code = (
        "import sys, numpy as np\nfrom baechi_runtime.measure.comparator import compare\n"
        "assert compare({'x': np.ones(3)}, {'x': np.full(3, 1.5)}, 1e-6).max_rel_diff == 0.5\n"
        "sys.exit(', '.join({'torch', 'tensorflow'} & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


# The checks that use it refuse what is no number on one side


class OddWhenRun(nn.Module):
    """A loss to which something is added where no one captures it."""

    def __init__(self, odd: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).square().mean()
        return loss if torch.compiler.is_compiling() else loss + self.odd


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("odd", [0.0, NAN, INF, -INF, 1e-3])
def test_a_sharded_step_has_to_be_a_number_where_the_whole_one_is(odd: float) -> None:
    step = TrainingStep("odd", OddWhenRun(odd), (torch.ones(4, 3),), optimizer_spec("sgd", 0.1))
    parity = sharding.check_parity(step, {}, make_mesh("cpu", (1,)))
    assert (parity.passed, parity.worst) == (odd == 0, "loss" if odd else "gradient of linear.bias")
    assert math.isinf(parity.max_rel_diff) == (not math.isfinite(odd))


@pytest.mark.parametrize("odd", [0.0, NAN, INF, -INF])
def test_a_placed_step_has_to_be_a_number_where_the_unplaced_one_is(odd: float) -> None:
    step = make_step("tied")
    graph, binding = capture(step)
    step.module.register_forward_hook(lambda module, inputs, loss: loss + odd)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        parity = check_parity(executor, scattered(graph, 2, 0), binding, step)
    assert parity.passed == (odd == 0), parity
    assert [(name, d.why) for name, d in parity.beyond] == ([("loss", "not finite on one side")] if odd else [])


class Forgetful(torch.optim.SGD):
    """Begins anew at each step."""

    def step(self, closure: None = None) -> None:
        super().step(closure)
        self.state.clear()


@pytest.mark.parametrize("forgets", [False, True])
def test_what_an_optimizer_keeps_is_read_by_a_second_step(forgets: bool) -> None:
    """Placed ones are told foreach=False, the unplaced one is not."""

    def make(parameters: Sequence[Tensor], foreach: bool = True, **options: float) -> torch.optim.Optimizer:
        return (Forgetful if forgets and not foreach else torch.optim.SGD)(parameters, momentum=0.9, foreach=foreach, **options)

    step = replace(make_step("tied"), optimizer=OptimizerSpec("momentum", 0.05, 1, make))
    graph, binding = capture(step)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        parity = check_parity(executor, scattered(graph, 2, 0), binding, step)
    assert parity.passed != forgets, parity
    assert forgets or parity.max_abs_diff == 0
