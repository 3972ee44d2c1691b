"""Checks on the numbers that come in from files and flags."""

import math
import re
from typing import Any

from baechi_ext.errors import OptionError

_LARGEST = 2**63
MOST_DEVICES = 1024
MOST_SECONDS = 1e9
"""More than anybody waits, and less than what operating systems can be told to."""
MOST_BYTES = 1e300
"""The most of an op or a tensor: those of a graph add up to a number."""
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)")


def size_in_bytes(text: str) -> int:
    """Bytes, written plainly or with a unit: KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024). Raises ValueError, for
    less than a byte, too."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write it like 16GiB, 800MB or 1000000 (bytes)")
    number = int(match[1]) if "." not in match[1] else float(match[1])
    size = int(number * _UNITS[match[2].upper()])
    if not size:
        raise ValueError(f"{text!r} is less than a byte; give a size of at least 1")
    return size


def bytes_of(value: Any, what: str) -> int:
    """`value` as a number of bytes, which may be written with a unit ("16GiB"). Raises OptionError, for less than one, too."""
    try:
        return size_in_bytes(value) if isinstance(value, str) else int(as_number(value, what, OptionError, minimum=1))
    except ValueError as e:
        raise OptionError(f"{what}: {e}") from e


def device_count(value: Any, others: str = "the names of CUDA devices as a list") -> int:
    """`value` as the number of devices that the option `devices` gives. Raises OptionError, which says what `others` it may be."""
    if type(value) is not int or not 1 <= value <= MOST_DEVICES:
        raise OptionError(f"devices={value!r} is not a number of devices; give 1 to {MOST_DEVICES}, or {others}")
    return value


def as_number(value: Any, what: str, error: type[Exception], *, minimum: float = 0.0) -> float:
    """`value` as a finite float of at least `minimum`; otherwise raises `error` with a message that opens with `what`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise error(f"{what} is {value!r}; expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise error(f"{what} is {value!r}; expected a finite number")
    if number < minimum:
        raise error(f"{what} is {value!r}; expected at least {minimum:g}")
    return number


def as_bytes(value: Any, what: str, error: type[Exception], *, most: float = math.inf) -> int | float:
    """`value` as a non-negative number of bytes, `most` at most, an int where it is whole; otherwise raises `error`.

    Fractions are allowed because published graphs are often rescaled.
    """
    number = as_number(value, what, error)
    if number > most:
        raise error(f"{what} is {value!r}; expected at most {most:g}")
    return value if isinstance(value, int) else int(number) if number.is_integer() else number


def require_finite(value: Any, what: str, error: type[Exception]) -> None:
    """Raises `error`, with a message that opens with `what`, where a parsed value of any form holds a number that JSON can't say."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, float) and not math.isfinite(found):
            raise error(f"{what} is {value!r}; expected finite numbers")
        pending += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()


def is_plain_size(value: Any) -> bool:
    """True if a value is a number of bytes as nearly all files have it, which `as_bytes` would return as it is: asked a million times."""
    return type(value) is int and 0 <= value <= _LARGEST
