"""Why a model's forward can't be captured: the line of the model's own code that is to blame, and what to change there."""

import linecache
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from baechi_ext.errors import CaptureError

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
_FRAMEWORKS = ("torch", "tensorflow", "keras", "tensorboard")
_OTHERWISE = "take what is no computation on tensors out of forward"


def not_capturable(what: str, error: BaseException) -> CaptureError:
    """The error for `what`, whose forward raised `error` while it was traced: the reason, the line, and what to change."""
    reason = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return CaptureError(f"{what} cannot be captured as one graph: {text}{_place_of(error)}; {_advice_for(text)}")


def users_line(error: BaseException) -> tuple[str, int, str] | None:
    """(file, line, function) of the innermost code that is neither a framework's, Python's nor this package's; None where there is none."""
    found = [frame for frame in _frames(error.__traceback__) if not is_foreign(frame[0])]
    return found[-1] if found else None


def _place_of(error: BaseException) -> str:
    line = users_line(error)
    return "" if line is None else said_place(line)


def said_place(line: tuple[str, int, str]) -> str:
    """(file, line, function) as part of a message, with the source."""
    file, number, function = line
    source = linecache.getline(file, number).strip()
    return f", at {_short(file)}:{number} in {function}" + (f": `{source}`" if source else "")


def _advice_for(text: str) -> str:
    return next((advice for words, advice in _ADVICE if any(word in text for word in words)), _OTHERWISE)


def _frames(traceback: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    while traceback is not None:
        code = traceback.tb_frame.f_code
        yield code.co_filename, traceback.tb_lineno, code.co_name
        traceback = traceback.tb_next


def is_foreign(file: str) -> bool:
    """True if a file is a framework's, Python's or this package's own."""
    path = Path(file)
    frameworks = [Path(m.__file__).parent for name in _FRAMEWORKS if (m := sys.modules.get(name)) is not None and m.__file__]
    if file.startswith("<") or any(path.is_relative_to(folder) for folder in (Path(__file__).parent.parent, *frameworks)):
        return True
    installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return path.is_relative_to(sysconfig.get_path("stdlib")) and not any(path.is_relative_to(folder) for folder in installed)


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
