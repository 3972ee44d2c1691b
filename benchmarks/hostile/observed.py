"""The result of a loop, as leaves that can be sent to another process and compared there."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

TOLERANCE = 1e-5
"""Differences up to this many parts of a tensor's largest number are rounding, where nothing is added up in another order."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a nested structure: text, a number, None, or an array; kinds of containers and of tensors are leaves, too.

    Raises TypeError for what has no digits.
    """
    if isinstance(value, torch.Tensor):
        yield from _leaves_of_tensor(value, path)
    elif isinstance(value, Mapping):
        yield f"{path}.keys", repr(list(value))
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{path}.kind", f"{type(value).__name__} of {len(value)}"
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    elif isinstance(value, (set, frozenset)):
        yield path, repr(sorted(value, key=repr))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{path}.kind", type(value).__name__
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif value is None or isinstance(value, (str, bool, int, float, np.ndarray, np.generic)):
        yield path, np.asarray(value) if isinstance(value, np.generic) else value
    elif isinstance(value, (complex, torch.dtype, torch.Size, type)):
        yield path, repr(value)
    else:
        raise TypeError(f"{path}: a {type(value).__name__} has no digits")


def _leaves_of_tensor(tensor: torch.Tensor, path: str) -> Iterator[tuple[str, Any]]:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):  # as a tensor of a tracer, which has no digits
        yield f"{path}.kind", type(tensor).__name__
        return
    tensor = tensor.detach()
    yield f"{path}.kind", f"{tensor.dtype} {list(tensor.shape)} {tensor.layout}"
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        yield f"{path}.indices", tensor.indices().numpy().copy()
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    yield path, tensor.numpy().copy()


def difference(path: str, plain: Any, wrapped: Any, tolerance: float = TOLERANCE) -> tuple[bool, str]:
    """Return whether two leaves differ by more than the tolerance, and how they differ; no text where they don't."""
    numbers = [isinstance(leaf, (int, float, np.ndarray)) and not isinstance(leaf, bool) for leaf in (plain, wrapped)]
    if not all(numbers) or type(plain) is not type(wrapped):
        same = type(plain) is type(wrapped) and plain == wrapped
        return not same, "" if same else f"{path}: {_short(plain)} became {_short(wrapped)}"
    a, b = np.asarray(plain), np.asarray(wrapped)
    if a.shape != b.shape:
        return True, f"{path}: shape {a.shape} became {b.shape}"
    if a.dtype.kind != "f":
        differ = np.asarray(a != b)
        return bool(differ.any()), f"{path}: {_example(a, b, differ)}" if differ.any() else ""
    differ = ~((a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b))
    if not differ.any():
        return False, ""
    finite = np.isfinite(a)
    scale = float(np.abs(a[finite]).max()) if finite.any() else 0.0
    close = np.isfinite(b) & finite & (np.abs(np.where(finite & np.isfinite(b), a - b, np.inf)) <= tolerance * scale)
    return bool((differ & ~close).any()), f"{path}: {_example(a, b, differ)}"


def _example(a: np.ndarray, b: np.ndarray, differ: np.ndarray) -> str:
    count = int(differ.sum())
    worst = np.unravel_index(int(np.argmax(differ)), differ.shape) if differ.shape else ()
    more = f" ({count} of {differ.size} differ)" if differ.size > 1 else ""
    return f"{a[worst]!s} became {b[worst]!s}{more}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
