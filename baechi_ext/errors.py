"""One exception per cause. The message names the thing, the numbers, and what to do next; the CLI prints it as one `error:` line.

Values that a message repeats may come from anybody's file: what is too long of them, and what a terminal would obey, is taken out here.
"""

import re
from collections.abc import Iterator
from typing import Any

_MOST_OF_A_VALUE, _MOST_OF_A_WORD, _MOST = 200, 250, 1800
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def printable(text: str) -> str:
    """The text without what a terminal would obey: what can't be printed is escaped; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def first_line(error: BaseException, otherwise: str = "") -> str:
    """The first line of an error's message; `otherwise` where it has none."""
    return next(iter(str(error).strip().splitlines()), otherwise)


def legible(message: str) -> str:
    """A message for people: values in quotes or brackets are cut at 200 characters, what can't be printed is escaped (line ends stay), and
    of a very long message the middle is left out."""
    text = printable(_without_middle(message, 4 * _MOST))
    if len(text) <= _MOST_OF_A_VALUE:
        return text
    parts, done = [], 0
    for begin, end in _values(text):
        parts += [text[done:begin], _cut(text[begin:end], _MOST_OF_A_VALUE)]
        done = end
    text = "".join([*parts, text[done:]])
    return _without_middle(re.sub(rf"[^\s;,:]{{{_MOST_OF_A_WORD},}}", lambda word: _cut(word[0], _MOST_OF_A_WORD), text), _MOST)


def _values(text: str) -> Iterator[tuple[int, int]]:
    """Where each value that is not part of another one begins and ends. An apostrophe in a word opens none."""
    opened: list[int] = []
    at = 0
    while at < len(text):
        quoted = _QUOTED.match(text, at) if text[at] in "'\"" and not text[at - 1 : at].isalnum() else None
        if quoted is not None:
            if not opened:
                yield quoted.span()
            at = quoted.end()
            continue
        if text[at] in "[{":
            opened.append(at)
        elif text[at] in "]}" and opened:
            begin = opened.pop()
            if not opened:
                yield begin, at + 1
        at += 1


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _without_middle(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 3 // 4 - 5]} ... {text[-most // 4 :]}"


class BaechiError(Exception):
    """Base of every error a user can cause or mend; anything else that escapes is a defect of this project. Its message is legible."""

    def __str__(self) -> str:  # not in __init__: TensorFlow makes an exception of a class anew only where that is Python's own
        return legible(super().__str__())


class FileError(BaechiError):
    """A file cannot be read or written, or its content is not the JSON it should be."""


class GraphError(BaechiError):
    """An operator graph breaks a rule: a cycle, an unknown node, a duplicate id, a bad cost."""


class ClusterError(BaechiError):
    """A device or link description breaks a rule."""


class PlanError(BaechiError):
    """A plan breaks a rule: an op without a device, a split colocation group, too little memory."""


class MismatchError(BaechiError):
    """A profile or plan belongs to another graph; names the first op that differs."""


class ProfileError(BaechiError):
    """A profile breaks a rule or lacks a cost."""


class MeasurementError(BaechiError):
    """A measured step breaks a rule: ops that overlap on a device, a time that is none."""


class OptionError(BaechiError):
    """An option has a value nothing can be done with; says what to give instead."""


class InfeasibleError(BaechiError):
    """No valid plan: `status` is "infeasible" where that is proven, "unknown" where the search found none.

    `conflict` names ops and colocation groups that provably do not fit together, where such were found; `minimal` says that any of
    them left out lets the others fit.
    """

    def __init__(self, message: str, status: str = "infeasible", conflict: tuple[str, ...] = (), *, minimal: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.conflict = conflict
        self.minimal = minimal

    def to_json(self) -> dict[str, Any]:
        """The output of `--json`."""
        found = {"conflict": list(self.conflict), "minimal": self.minimal} if self.conflict else {}
        return {"status": self.status, "error": str(self), **found}


class SolverError(BaechiError):
    """A solver failed or stopped without an answer."""


class SolverTimeoutError(SolverError):
    """A solver was not done by the time limit."""


class PolicyError(BaechiError):
    """A learned policy can't be used: its file is damaged, or it was trained on other features."""


class CaptureError(BaechiError):
    """A training step could not be turned into an operator graph."""


class MissingBackendError(BaechiError):
    """A package or device that the request needs is not there; says how to get it or what to use instead."""


class ExecutionError(BaechiError):
    """A placed step failed while it ran: an op raised, or a device did not answer in time."""


class CheckpointError(BaechiError):
    """A checkpoint is damaged, or of another training."""


class ParityError(BaechiError):
    """The placed step does not compute what the unplaced step computes."""


class ShardError(BaechiError):
    """A sharding problem breaks a rule, or its tables would not fit the memory they may take."""
