"""Differences of tensors from those that they should equal: one rule set for every executor and framework.

Tensors are torch's on both sides, dense or sparse and on any device, or on both whatever NumPy makes an array of, as TensorFlow's. No
framework is imported for it. The rules, by name:

- A tensor that only one side has differs infinitely; None is a tensor that is not there, on both sides no difference. So do tensors of
  different shapes or dtypes: a placed step that computes in another precision computes something else.
- Layouts, strides and devices don't count, as they change no number; where a sparse tensor has no value, it has a 0.
- NaN equals NaN at the same place, and infinity infinity of the same sign: a step that overflows does so placed as well. Any other
  difference from NaN or infinity is infinite, since no comparison with a number would notice a NaN.
- Bools, integers and whatever is neither real nor complex differ infinitely or not at all: they are counts, indices and masks, which no
  rounding changes, and a count that is off by one is a mistake however large it is.
- Complex numbers are two real ones each, because a modulus overflows earlier than its parts.
- The relative difference is the largest difference over the largest finite magnitude of the expected tensor: rounding in a sum is a part of
  its terms, so single numbers that nearly cancel out may differ by more than a part of themselves.
- A gradient's magnitude counts as at least a share of the largest gradient's: one that ought to be 0, as of a bias before a normalisation,
  is rounding alone, and what that is a part of are the other gradients. Nothing else has such a floor; a mask of -1e9 among the buffers
  would hide mistakes in all of them.
- No magnitude counts as less than 1e-30: what GPUs flush to 0, numbers below 1.2e-38, is within any tolerance of it.

Numbers are subtracted in double precision, some at a time, so a comparison takes no more memory for larger tensors; equal tensors
are not converted at all. A difference of doubles that overflows is infinite.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from baechi_runtime.measure.parity_result import Difference, Parity

SHARE = 1e-5
"""The part of the largest gradient that a gradient's magnitude counts as at least."""
GRADIENT = "gradient "
"""The beginning of a gradient's name."""
SMALLEST = 1e-30
_PIECE = 1 << 18
"""The number of numbers that are in double precision at a time."""
_NUMPY_HAS = ("float16", "float32", "float64")


def compare(expected: Mapping[str, Any], actual: Mapping[str, Any], tolerance: float, *, share: float = SHARE) -> Parity:
    """The parity of all tensors, by name: passed where none differs relatively by more than the tolerance."""
    return Parity.of(differences(expected, actual, share=share), len(expected), tolerance)


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any], *, share: float = SHARE) -> dict[str, Difference]:
    """The difference of each tensor that one side has, by name."""
    gaps = {name: _gap(expected.get(name), actual.get(name)) for name in sorted(expected.keys() | actual.keys())}
    floor = 0.0
    if any(gap.absolute and not gap.why for name, gap in gaps.items() if name.startswith(GRADIENT)):
        floor = share * max(magnitude(value) for name, value in expected.items() if name.startswith(GRADIENT))
    return {name: gap.difference(floor if name.startswith(GRADIENT) else 0.0) for name, gap in gaps.items()}


def magnitude(value: Any) -> float:
    """The largest of a tensor's finite numbers, without its sign; 0 for None, and for what is neither real nor complex."""
    if value is None or not _has_fractions(_dtype(value)):
        return 0.0
    parts = _parts(_values(value.detach()) if _is_torch(value) else np.asarray(value))
    return max((_largest(_doubles(part[where])) for part in parts for where in _pieces(part.shape)), default=0.0)


@dataclass(slots=True)
class _Gap:
    """The difference of two tensors, before it is known what it is relative to."""

    absolute: float = 0.0
    magnitude: float = 0.0
    """The expected tensor's; not looked for where there is no difference."""
    why: str = ""

    @classmethod
    def infinite(cls, why: str) -> "_Gap":
        return cls(absolute=math.inf, why=why)

    def difference(self, floor: float) -> Difference:
        relative = math.inf if self.why else self.absolute / max(self.magnitude, floor, SMALLEST)
        return Difference(self.absolute, relative, self.why)


def _gap(expected: Any, actual: Any) -> _Gap:
    if expected is None or actual is None:
        return _Gap() if expected is actual else _Gap.infinite("missing" if actual is None else "not expected")
    shapes, dtypes = [tuple(np.shape(x)) for x in (expected, actual)], [_dtype(x) for x in (expected, actual)]
    for old, new in (shapes, dtypes):
        if old != new:
            return _Gap.infinite(f"{new} instead of {old}")
    a, b = _dense(expected, actual)
    if _has_fractions(dtypes[0]):
        return _gap_of_numbers(a, b)
    return _Gap() if _equal(a, b) else _Gap.infinite(f"{dtypes[0]} that is not equal")


def _gap_of_numbers(a: Any, b: Any) -> _Gap:
    pairs, gap = list(zip(_parts(a), _parts(b), strict=True)), _Gap()
    if all(_equal(x, y) for x, y in pairs):
        return gap
    for x, y in pairs:
        for where in _pieces(x.shape):
            old, new = _doubles(x[where]), _doubles(y[where])
            same = (old == new) | (np.isnan(old) & np.isnan(new))
            if not (same | (np.isfinite(old) & np.isfinite(new))).all():
                return _Gap.infinite("not finite on one side")
            gap.magnitude = max(gap.magnitude, _largest(old))
            old, new = np.where(same, 0.0, old), np.where(same, 0.0, new)
            with np.errstate(over="ignore"):
                gap.absolute = max(gap.absolute, float(np.abs(old - new).max()))
    return gap


def _largest(doubles: np.ndarray) -> float:
    return float(np.abs(doubles).max(initial=0.0, where=np.isfinite(doubles)))


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Indices of the parts of a tensor that are looked at one after the other: slices along its longest dimension, since to flatten it may
    be to copy it."""
    size = math.prod(shape)
    if not shape:
        yield (...,)
    elif size:
        along = max(range(len(shape)), key=shape.__getitem__)
        rows = max(1, _PIECE * shape[along] // size)
        yield from ((*[slice(None)] * along, slice(i, i + rows), ...) for i in range(0, shape[along], rows))


def _parts(array: Any) -> tuple[Any, ...]:
    return (array.real, array.imag) if _dtype(array).startswith("complex") else (array,)


def _doubles(piece: Any) -> np.ndarray:
    """The piece as NumPy's doubles, wherever it is: NumPy's one thread is not held up by other programs, as those of torch are, which wait
    for each other after every op."""
    if _is_torch(piece):
        piece = piece.cpu().resolve_neg()
        piece = (piece if _dtype(piece) in _NUMPY_HAS else piece.double()).numpy()
    doubles: np.ndarray = piece.astype(np.float64)
    return doubles


def _equal(a: Any, b: Any) -> bool:
    """True where all numbers are equal, and none is NaN."""
    return sys.modules["torch"].equal(a, b) if _is_torch(a) else np.array_equal(a, b)


def _is_torch(value: Any) -> bool:
    """True for torch's tensors; where torch is not imported, nothing is one."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def _dtype(value: Any) -> str:
    """The dtype's name, which torch and NumPy share."""
    return str(value.dtype).removeprefix("torch.") if _is_torch(value) else np.asarray(value).dtype.name


def _has_fractions(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _dense(a: Any, b: Any) -> tuple[Any, Any]:
    """The numbers of both, place by place: arrays, or dense tensors, two of which are on one device."""
    if not _is_torch(a):
        return np.asarray(a), np.asarray(b)
    a, b = a.detach(), b.detach().to(a.device)
    return (a, b) if a.layout == b.layout == _strided() else _side_by_side(a, b)


# Sparse tensors of torch


def _strided() -> Any:
    return sys.modules["torch"].strided


def _values(tensor: Any) -> Any:
    """The numbers of a tensor; of a sparse one without its zeros."""
    return tensor if tensor.layout == _strided() else _coalesced(tensor).values()


def _coalesced(tensor: Any) -> Any:
    return (tensor if tensor.is_sparse else tensor.to_sparse()).coalesce()


def _side_by_side(a: Any, b: Any) -> tuple[Any, Any]:
    """Two tensors, one of which is sparse at least, as dense ones: where both are sparse, of the values at the places that either has, so
    that the gradient of a large embedding needs no room for all its zeros."""
    torch = sys.modules["torch"]
    if torch.strided in (a.layout, b.layout):
        return a.to_dense(), b.to_dense()
    a, b = _coalesced(a), _coalesced(b)
    if a.sparse_dim() != b.sparse_dim() or not a.sparse_dim():
        return a.to_dense(), b.to_dense()
    if torch.equal(a.indices(), b.indices()):
        return a.values(), b.values()
    zero_a, zero_b = torch.zeros_like(a.values()), torch.zeros_like(b.values())
    pairs = torch.cat([torch.stack([a.values(), zero_a], -1), torch.stack([zero_b, b.values()], -1)])
    places = torch.cat([a.indices(), b.indices()], 1)
    both = torch.sparse_coo_tensor(places, pairs, (*a.shape, 2), check_invariants=False).coalesce().values()
    return both[..., 0], both[..., 1]
