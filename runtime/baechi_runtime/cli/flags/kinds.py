"""Kinds of values that flags take, and tables of flags, which are added to a parser."""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from baechi_ext.errors import MissingBackendError, OptionError
from baechi_ext.ir.cluster import Link
from baechi_ext.ir.files import make_folder
from baechi_ext.ir.hints import Pin
from baechi_ext.ir.numbers import MOST_DEVICES, MOST_SECONDS, as_number, size_in_bytes
from baechi_runtime.cli.flags.parser import meant

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class Kind(NamedTuple):
    """A kind of value that flags take: what reads its text, and the word for it in the help."""

    convert: Callable[[str], Any]
    metavar: str


SWITCH = None
"""The kind of a flag without a value."""
Flag = tuple[Kind | None, str] | tuple[Kind | None, str, Any]
"""Kind, help, and the default where that is neither None nor, of a switch, False."""


def add(group: argparse._ActionsContainer, table: Mapping[str, Flag]) -> None:
    """Adds flags by name."""
    for name, (kind, text, *default) in table.items():
        if kind is SWITCH:
            group.add_argument(f"--{name}", action="store_true", default=default[0] if default else False, help=text)
        else:
            value = default[0] if default else None
            group.add_argument(f"--{name}", type=kind.convert, default=value, metavar=kind.metavar, help=text)


def add_group(parser: argparse.ArgumentParser, title: str, table: Mapping[str, Flag]) -> argparse._ArgumentGroup:
    """Adds flags by name under a title of their own, which can take more."""
    group = parser.add_argument_group(title)
    add(group, table)
    return group


def whole_number(least: int, most: int, range_: str) -> Callable[[str], int]:
    """A flag type for whole numbers of a range, which errors call `range_`."""

    def convert(text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {range_}")
        return int(text)

    return convert


def number(is_taken: Callable[[float], bool], range_: str) -> Callable[[str], float]:
    """A flag type for finite numbers of a range, which errors call `range_`."""

    def convert(text: str) -> float:
        value = _finite(text)
        if not is_taken(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {range_}")
        return value

    return convert


def _finite(text: str) -> float:
    try:
        return as_number(float(text), "it", ValueError, minimum=float("-inf"))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number") from e


@dataclass(frozen=True)
class OneOf:
    """A flag type that takes one of `names` and lists them where it gets another."""

    names: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text not in self.names:
            raise argparse.ArgumentTypeError(f"unknown value {text!r}{meant(text, self.names)}; choose one of {', '.join(self.names)}")
        return text


def listed(text: str) -> tuple[str, ...]:
    """Flag type: names with commas, and spaces where they are wanted, between them."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them")
    return names


def scalars(folder: str) -> str:
    """Flag type: a folder for what PyTorch's writer of TensorBoard's files writes."""
    if any(find_spec(name) is None for name in ("torch", "tensorboard")):
        raise MissingBackendError("--tensorboard needs PyTorch and tensorboard; pip install 'baechi-ext[torch,plots]', or drop it")
    make_folder(Path(folder))
    return folder


def _size(text: str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def link_of_coefficients(text: str) -> Link:
    """Flag type: `a,b`, both at least 0; a transfer of n bytes takes a * n + b microseconds."""
    parts = text.split(",")
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers a,b (microseconds per byte, microseconds)")
    slope, latency = map(_finite, parts)
    if slope < 0 or latency < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a negative coefficient; expected at least 0")
    return Link(us_per_byte=slope, latency_us=latency)


def _pin(text: str) -> Pin:
    try:
        return Pin.parse(text)
    except OptionError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


whole = whole_number(0, 999_999_999, "from 0 to 999999999")
at_least_one = whole_number(1, 999_999_999, "of at least 1")
positive = number(lambda value: value > 0, "above 0")
WHOLE, COUNT, DEVICES = Kind(whole, "N"), Kind(at_least_one, "N"), Kind(whole_number(1, MOST_DEVICES, f"from 1 to {MOST_DEVICES}"), "N")
FACTOR, SECONDS = Kind(positive, "F"), Kind(positive, "SECONDS")
TIMEOUT = Kind(number(lambda value: 0 < value <= MOST_SECONDS, f"above 0 and up to {MOST_SECONDS:g}"), "SECONDS")
FRACTION = Kind(number(lambda value: 0 < value <= 1, "above 0 and up to 1"), "F")
SHARE = Kind(number(lambda value: 0 <= value <= 1, "from 0 to 1"), "F")
SIZE, LINK = Kind(_size, "SIZE"), Kind(link_of_coefficients, "A,B")
FILE, DIR, FOLDER, NAME = (Kind(str, metavar) for metavar in ("FILE", "DIR", "FOLDER", "NAME"))
JSON: Flag = (SWITCH, "print the result as JSON")


def named(kind: "type[DataclassInstance]", args: argparse.Namespace) -> dict[str, Any]:
    """The values of those fields of a dataclass that are called like a flag which was given, or has a default."""
    return {f.name: value for f in fields(kind) if (value := getattr(args, f.name, None)) is not None}


def becomes(kind: type[T]) -> Callable[[argparse.Namespace], T]:
    """A function that makes a request of flags which are called like its fields."""
    return lambda args: kind(**named(kind, args))


def choice(names: Iterable[str], metavar: str = "NAME") -> Kind:
    """The kind of a flag that takes one of these names."""
    return Kind(OneOf(tuple(names)), metavar)


def explained(table: Mapping[str, tuple[Any, ...]], default: str | None = None, otherwise: str = "the method's own") -> Flag:
    """A flag that takes one of the keys of a table, whose entries end with a line on each, which the help lists."""
    lines = "\n".join(f"{name}: {getattr(entry, 'help', entry[-1])}" for name, entry in table.items()).replace("%", "%%")
    return choice(table), f"one of these (default {default or otherwise})\n{lines}", default


def add_pin(group: argparse._ActionsContainer, text: str) -> None:
    """--pin, which may be given several times."""
    group.add_argument("--pin", type=_pin, action="append", default=[], metavar="PATTERN=DEVICE", help=text)


def add_output_flags(parser: argparse.ArgumentParser, out: str | None = None) -> None:
    """--json, and --out where the command writes a file (`out` says which)."""
    add_group(parser, "output", {"json": JSON} if out is None else {"out": (FILE, out), "json": JSON})
