"""Fields of report files, checked as they are read: each is of its type, or the file is damaged (FileError). What is missing or null is
empty, or None."""

from collections.abc import Mapping, Sequence
from typing import Any

from baechi_ext.errors import FileError
from baechi_ext.ir.numbers import as_number
from baechi_runtime.measure.samples import Ratio, Samples


def samples_of(value: Mapping[str, Any], key: str) -> Samples | None:
    """The measured steps under that key; where they are not all kept, their median is one."""
    found = object_of(value, key)
    median = number_of(found, "median")
    return None if median is None else Samples(numbers_of(found, "samples") or (median,))


def ratio_of(value: Mapping[str, Any], key: str) -> Ratio | None:
    """The speedup under that key, with its interval."""
    found = object_of(value, key)
    return Ratio(*(as_number(found.get(part), f"{part} of {key}", FileError) for part in ("median", "low", "high"))) if found else None


def object_of(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under that key."""
    return _of_type(value, key, dict, "an object") or {}


def list_of(value: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list under that key."""
    return _of_type(value, key, list, "a list") or []


def objects_of(value: Mapping[str, Any], key: str, what: str) -> list[Mapping[str, Any]]:
    """The objects in the list under that key, each of which errors call `what`."""
    return [object_of({what: entry}, what) for entry in list_of(value, key)]


def text_of(value: Mapping[str, Any], key: str) -> str:
    """The value under that key as text."""
    return str(value.get(key) or "")


def number_of(value: Mapping[str, Any], key: str, *, minimum: float = 0.0) -> float | None:
    """The number under that key."""
    return None if value.get(key) is None else as_number(value[key], key, FileError, minimum=minimum)


def numbers_of(value: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """The numbers in the list under that key."""
    return tuple(as_number(number, f"an entry of {key}", FileError) for number in list_of(value, key))


def _of_type(value: Mapping[str, Any], key: str, kind: type, name: str) -> Any:
    found = value.get(key)
    if found is not None and not isinstance(found, kind):
        raise FileError(f'"{key}" is {found!r}; expected {name}')
    return found
