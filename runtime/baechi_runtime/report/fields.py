"""Fields of report files, checked as they are read: each is of its type, or the file is damaged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baechi_ext.errors import FileError
from baechi_ext.ir.numbers import as_number


@dataclass(frozen=True, slots=True)
class Interval:
    """A speedup, and its interval."""

    median: float
    low: float
    high: float


def steps_of(value: Any, what: str) -> tuple[float | None, tuple[float, ...]]:
    """Median and samples, the median alone being one sample; nothing where nothing was measured."""
    found = object_of({what: value}, what)
    median = number_of(found, "median")
    return median, () if median is None else numbers_of(found, "samples") or (median,)


def interval_of(value: Mapping[str, Any], key: str) -> Interval | None:
    """The speedup under that key, with its interval; None where it is not known. Raises FileError."""
    found = object_of(value, key)
    return Interval(*(as_number(found.get(part), f"{part} of {key}", FileError) for part in ("median", "low", "high"))) if found else None


def object_of(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under that key, empty where there is none. Raises FileError where it is none."""
    return _of_type(value, key, dict, "an object") or {}


def list_of(value: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list under that key, empty where there is none. Raises FileError where it is none."""
    return _of_type(value, key, list, "a list") or []


def _of_type(value: Mapping[str, Any], key: str, kind: type, name: str) -> Any:
    found = value.get(key)
    if found is not None and not isinstance(found, kind):
        raise FileError(f'"{key}" is {found!r}; expected {name}')
    return found


def number_of(value: Mapping[str, Any], key: str) -> float | None:
    """The number under that key; None where there is none. Raises FileError where it is none."""
    return None if value.get(key) is None else as_number(value[key], key, FileError)


def numbers_of(value: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """The numbers in the list under that key. Raises FileError."""
    return tuple(as_number(number, f"an entry of {key}", FileError) for number in list_of(value, key))
