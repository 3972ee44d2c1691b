"""Why a model's forward can't be captured: the line of the model's own code that is to blame, and what to change there."""

import ast
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

from baechi_ext.errors import CaptureError, MissingBackendError, first_line

if TYPE_CHECKING:
    from torch import fx

_ADVICE = (
    (("numpy",), "a NumPy array is outside of what can be captured: compute with torch functions, or move this out of forward"),
    (
        ("_local_scalar_dense", "is_nonzero", "data-dependent", "GuardOnDataDependent"),
        "a number is taken out of a tensor (.item(), float(), bool(), .tolist(), `if` or `while` on a tensor): keep it a tensor "
        "(torch.where, a mask, clamp), or move this out of forward",
    ),
    (
        ("nonzero", "masked_select", "unique", "DynamicOutputShape", "repeat_interleave", "bincount"),
        "the shape of the result depends on values: use torch.where, or multiply by the mask, so that shapes are fixed",
    ),
    (("use_reentrant",), "checkpoint with use_reentrant=False"),
)
_FRAMEWORKS = ("torch", "tensorflow", "keras", "tensorboard", "baechi_runtime")
_RAISED = frozenset(("BaseException", "Exception", "RuntimeError", "IndexError", "ValueError", "LinAlgError", "OutOfMemoryError"))
"""The names of exceptions by which code may take what an op raises for the values that it is given."""
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_OTHERWISE = "take what is no computation on tensors out of forward"


def not_capturable(what: str, error: BaseException) -> CaptureError:
    """The error for `what`, whose forward raised `error` while it was traced: the reason, the line, and what to change."""
    reason = first_line(error)
    text = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    frames = ((f.f_code.co_filename, line, f.f_code.co_name) for f, line in walk_tb(error.__traceback__))
    advice = next((advice for words, advice in _ADVICE if any(word in text for word in words)), _OTHERWISE)
    return CaptureError(f"{what} cannot be captured as one graph: {text}{place_of(frames)}; {advice}")


@contextmanager
def tracing(what: str) -> Iterator[None]:
    """While it is entered, a user's code is traced: torch's generator is put back, and what the code raises is a CaptureError about `what`
    that names the line."""
    import torch

    try:
        with torch.random.fork_rng(devices=()):
            yield
    except (CaptureError, MissingBackendError):
        raise
    except Exception as e:  # noqa: BLE001 - whatever the user's code raises
        raise not_capturable(what, e) from e


def frames_of(node: "fx.Node") -> list[tuple[str, int, str]]:
    """(file, line, function) of the code that a traced node is from, the innermost last."""
    return [(file, int(line), name) for file, line, name in _FRAME.findall(node.meta.get("stack_trace") or "")]


def require_uncaught(graph: "fx.GraphModule") -> None:
    """Raise CaptureError for a traced graph with an op whose error user's code takes around it: a graph runs its ops
    at once, and what one raises comes up behind that."""
    for frame in dict.fromkeys(frame for node in graph.graph.nodes for frame in frames_of(node) if not is_foreign(frame[0])):
        if frame[1] in _taken_lines("".join(linecache.getlines(frame[0]))):
            raise CaptureError(f"it takes what an op raises within forward (try, suppress){place_of([frame])}")


@cache
def _taken_lines(source: str) -> frozenset[int]:
    """The lines of blocks whose `except`, or `with suppress(...)`, takes what an op may raise."""
    lines: set[int] = set()
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return frozenset()
    for node in nodes:
        if isinstance(node, (ast.Try, ast.TryStar)):
            taken = [_names(h.type) if h.type else _RAISED for h in node.handlers]
        elif isinstance(node, ast.With):
            taken = [names for names in (_names(item.context_expr) for item in node.items) if "suppress" in names]
        else:
            continue
        if not _RAISED.isdisjoint(frozenset().union(*taken)):
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return frozenset(lines)


def _names(expression: ast.expr) -> frozenset[str]:
    """The names in an expression; of a dotted one, each part."""
    return frozenset(getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(expression))


def place_of(frames: Iterable[tuple[str, int, str]]) -> str:
    """The innermost of these (file, line, function) that is the user's own, as part of a message; empty where none is."""
    own = [frame for frame in frames if not is_foreign(frame[0])]
    return said_place(own[-1]) if own else ""


def said_place(line: tuple[str, int, str]) -> str:
    """(file, line, function) as part of a message, with the source."""
    file, number, function = line
    source = linecache.getline(file, number).strip()
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f", at {shown}:{number} in {function}" + (f": `{source}`" if source else "")


def is_foreign(file: str) -> bool:
    """True if a file is a framework's, Python's or this package's own."""
    path = Path(file)
    frameworks = [Path(m.__file__).parent for name in _FRAMEWORKS if (m := sys.modules.get(name)) is not None and m.__file__]
    if file.startswith("<") or any(path.is_relative_to(folder) for folder in (Path(__file__).parent.parent, *frameworks)):
        return True
    installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return path.is_relative_to(sysconfig.get_path("stdlib")) and not any(path.is_relative_to(folder) for folder in installed)
