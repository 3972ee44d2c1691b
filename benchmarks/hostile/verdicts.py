"""Verdicts on two runs of a case, plain and wrapped."""

from benchmarks.hostile.observed import TOLERANCE, difference
from benchmarks.hostile.processes import Outcome, Raised

VERDICTS = ("equal", "rounding", "same exception", "refused", "WRONG", "crash", "hang")
"""From good to bad. A refusal is an error that says so: one of the project, or TorchDynamo's own."""
_REFUSALS = ("baechi_ext.errors.", "torch._dynamo.exc.")
_NO_REFUSAL = ("torch._dynamo.exc.BackendCompilerFailed", "torch._dynamo.exc.InternalTorchDynamoError")


def verdict(plain: Outcome, wrapped: Outcome) -> tuple[str, str]:
    """Return one of VERDICTS and what it is founded on."""
    if plain.ended or wrapped.ended:
        return (wrapped.ended, wrapped.detail) if wrapped.ended else ("crash", f"the plain run: {plain.ended}, {plain.detail}")
    if plain.raised is None and wrapped.raised is not None:
        return "refused" if _is_refusal(wrapped.raised) else "WRONG", _line(wrapped.raised)
    if plain.raised is not None:
        if wrapped.raised is None:
            return "WRONG", f"no exception; plainly it is {_line(plain.raised)}"
        if (plain.raised.types, plain.raised.text) != (wrapped.raised.types, wrapped.raised.text):
            return "WRONG", f"{_line(plain.raised)} became {_line(wrapped.raised)}"
    return _compared(plain, wrapped, "equal" if plain.raised is None else "same exception")


def _compared(plain: Outcome, wrapped: Outcome, same: str) -> tuple[str, str]:
    rounded = ""
    other, tolerance = dict(wrapped.leaves), max(TOLERANCE, wrapped.stats.get("tolerance", 0.0))
    for path, leaf in plain.leaves:
        if path not in other:
            return "WRONG", f"{path} is missing"
        differs, how = difference(path, leaf, other.pop(path), tolerance)
        if differs:
            return "WRONG", how
        rounded = rounded or how
    if other:
        return "WRONG", f"{next(iter(other))} is new"
    return ("rounding", rounded) if rounded else (same, "")


def _is_refusal(raised: Raised) -> bool:
    if any(name in _NO_REFUSAL for name in raised.types):
        return "baechi_ext.errors." in raised.trace
    return any(name.startswith(_REFUSALS) for name in raised.types) or "torch.compile" in raised.text


def _line(raised: Raised) -> str:
    return f"{raised.types[0].removeprefix('builtins.')}: {' '.join(raised.text.split())[:300]}"
