"""Compares the numbers that two runs of a script printed, durations aside."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_UNIT = r"(?:ms|us|sec(?:ond)?s?|mins?|hours?|s|it/s|s/it|ms/it|batch(?:es)?/s|img/s|samples?/s|tokens?/s|h)\b"
_DURATION = re.compile(
    rf"\d+:\d\d(?::\d\d)?(?:[.,]\d+)?"  # a clock's
    rf"|\d{{4}}-\d\d-\d\d(?:\D\d\d-\d\d-\d\d)?"  # a day
    rf"|[A-Z][a-z][a-z]\d\d_\d\d-\d\d-\d\d"  # a day in a folder's name
    rf"|{_NUMBER}\s*(?:{_UNIT}|\?it/s)"
    rf"|(?:time|elapsed|took|eta|ms/batch|s/batch|dt|speed|mfu)(?:\s*per\s*\w+)?\W{{0,3}}\s*{_NUMBER}",
    re.IGNORECASE,
)
_NUMBERS = re.compile(rf"(?<![\w.]){_NUMBER}|\b(?:nan|inf)\b", re.IGNORECASE)


def numbers(text: str) -> list[str]:
    """All numbers of a text in their order, without clocks' times, days, and what has a unit of time, or a word for time before it."""
    return _NUMBERS.findall(_DURATION.sub(" ", text))


@dataclass(frozen=True)
class Comparison:
    """`different` of `compared` numbers, the largest relative difference among them, and the first of them in words."""

    different: int
    compared: int
    largest: float = 0.0
    first: str | None = None


def compare(texts: Sequence[str], other: str) -> Comparison:
    """The numbers of `other` beside those of `texts`, what runs printed that should be equal.

    A number in which these differ from each other is not compared. Where there are not equally many, all are different.
    """
    rows = [numbers(text) for text in texts]
    found, first = numbers(other), rows[0]
    if len({len(row) for row in [found, *rows]}) > 1:
        return Comparison(len(first), len(first), math.inf, f"{len(found)} numbers, not {len(first)}")
    alike = [i for i, value in enumerate(first) if all(row[i] == value for row in rows[1:])]
    wrong = [i for i in alike if found[i] != first[i]]
    if not wrong:
        return Comparison(0, len(alike))
    words = f"number {wrong[0]}: {found[wrong[0]]}, not {first[wrong[0]]}"
    return Comparison(len(wrong), len(alike), max(_relative(found[i], first[i]) for i in wrong), words)


def _relative(a: str, b: str) -> float:
    x, y = float(a), float(b)
    largest = max(abs(x), abs(y))
    return abs(x - y) / largest if math.isfinite(largest) and largest else (0.0 if x == y else math.inf)
