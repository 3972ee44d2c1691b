"""The verdicts of earlier runs of the same module: where placing did not pay, it is not tried again."""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import ValidationError, convert
from torch import Tensor, nn

from baechi_ext.capture.torch_private import tree_flatten
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.cache_folder import find_entry, keep_entry
from baechi_runtime.measure.samples import Number
from baechi_runtime.report.tables import as_time
from baechi_runtime.torch.calls.keys import verdict_key
from baechi_runtime.torch.lowering.devices import TorchDevice

ANEW = "--no_cache, or cache=False, asks again"
_MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of an earlier run."""

    placed: bool
    """True if the run went on placed."""
    reason: str
    """Why, as a sentence for people."""
    plain_us: Number | None = None
    """A step as the script runs it; None where that was not measured."""
    placed_us: Number | None = None
    setup_seconds: Number = 0.0
    """Seconds spent capturing and loading, and profiling and placing where a later run has to do that again."""
    steps: int = 0
    """Steps that the script ran in all."""


class Experience:
    """The verdict on one module's calls, in a cache's folder."""

    def __init__(self, request: TrainRequest, devices: Sequence[TorchDevice], module: nn.Module, arguments: tuple[Any, Any]) -> None:
        self._folder = request.cache
        self._key = "" if request.cache is None else verdict_key(request.choices(), devices, _parts(module, arguments))

    def why_not(self) -> str:
        """Why placing would not pay, by an earlier run; empty where that is not known."""
        found = None if self._folder is None else load_verdict(self._folder, self._key)
        if found is None:
            return ""
        if not found.placed:
            return f"{found.reason} (in an earlier run; {ANEW})"
        if found.plain_us is None or found.placed_us is None or not found.steps:
            return ""
        saved_us = (found.plain_us - found.placed_us) * found.steps
        if saved_us >= found.setup_seconds * 1e6:
            return ""
        return (
            f"placing saved {as_time(saved_us)} in the {found.steps} steps of an earlier run, and set-up takes {found.setup_seconds:.1f} s "
            f"({ANEW})"
        )

    def keep(self, verdict: Verdict) -> None:
        """Keep this run's verdict; if that is not possible, the next run asks again."""
        if self._folder is not None:
            keep_verdict(self._folder, self._key, verdict)


def load_verdict(folder: Path, key: str) -> Verdict | None:
    """The verdict of this key in a cache's folder; None where there is none, it is old, or not as it was written."""
    try:
        return convert(find_entry(_file(folder, key), key), Verdict)
    except ValidationError:
        return None


def keep_verdict(folder: Path, key: str, verdict: Verdict) -> str:
    """Writes it, in place of the one before; the reason where that was not possible, else nothing."""
    return keep_entry(_file(folder, key), key, asdict(verdict), _MOST_BYTES)


def _file(folder: Path, key: str) -> Path:
    return folder / "verdicts" / f"{key}.json"


def _parts(module: nn.Module, arguments: tuple[Any, Any]) -> list[Any]:
    """The parts of a key for a module's calls: class, source code, structure, tensors, arguments, and torch's number of threads."""
    kind = type(module)
    leaves = [_seen(leaf) for leaf in tree_flatten(arguments)[0]]
    state = [(name, _seen(value)) for name, value in (dict(module.named_parameters()) | dict(module.named_buffers())).items()]
    written = hashlib.sha256("".join(sorted({_source(type(m)) for m in module.modules()})).encode()).hexdigest()
    return [f"{kind.__module__}.{kind.__qualname__}", written, repr(module), state, leaves, torch.get_num_threads()]


def _seen(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device} {value.requires_grad}"
    return type(value).__name__


def _source(kind: type) -> str:
    """The text of the file that defines a user's class; empty for torch's own classes, and if there is no such file."""
    if kind.__module__.startswith("torch."):
        return ""
    try:
        return Path(inspect.getfile(kind)).read_text(encoding="utf-8", errors="replace")
    except (OSError, TypeError):
        return ""
