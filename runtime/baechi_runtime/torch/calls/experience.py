"""The experience of earlier runs: the keys that plans and verdicts are kept under, of the machine, its devices, what runs there, and what
it is that runs; and the verdicts, since where placing did not pay it is not tried again."""

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from msgspec import ValidationError, convert
from torch import Tensor, fx, nn

from baechi_ext.capture.torch_autocast import autocast_now
from baechi_ext.capture.torch_joint import Binding, BoundOp
from baechi_ext.capture.torch_private import tree_flatten
from baechi_ext.ir.made_by import versions
from baechi_ext.ir.op_graph import OpGraph
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.cache_folder import find_entry, keep_entry, key_of
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.host.interrupts import raise_if_asked_for
from baechi_runtime.host.processor import processor
from baechi_runtime.measure.samples import Number
from baechi_runtime.report.tables import as_time
from baechi_runtime.torch.lowering.devices import TorchDevice

ANEW = "--no_cache, or cache=False, asks again"
_FILE = "verdicts/{}.json"
_MOST_BYTES = 16 * 1024 * 1024
_PLAIN = (bool, int, float, str)


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
        self._folder, self._key = request.cache, ""
        if request.cache is None:
            return
        try:
            self._key = verdict_key(request.choices(), devices, _parts(module, arguments))
        except Exception as e:  # noqa: BLE001 - a user's own code is asked, such as extra_repr, and may raise anything
            raise_if_asked_for(e)
            self._folder = None

    def why_not(self) -> tuple[str, int]:
        """Why placing would not pay, by an earlier run, and for so many steps; 0: for any number. Empty where that is not known: of more
        steps than the earlier run had, where placed ones were faster, set-up may well pay."""
        found = None if self._folder is None else load_verdict(self._folder, self._key)
        if found is None:
            return "", 0
        if not found.placed:
            return f"{found.reason} (in an earlier run; {ANEW})", 0
        if found.plain_us is None or found.placed_us is None or not found.steps:
            return "", 0
        saved_us = (found.plain_us - found.placed_us) * found.steps
        if saved_us >= found.setup_seconds * 1e6:
            return "", 0
        gain = f"saved {as_time(saved_us)}" if saved_us > 0 else f"lost {as_time(-saved_us)}"
        why = f"placing {gain} in the {found.steps} steps of an earlier run, and set-up takes {found.setup_seconds:.1f} s ({ANEW})"
        return why, found.steps if saved_us > 0 else 0

    def keep(self, verdict: Verdict) -> None:
        """Keep this run's verdict; if that is not possible, the next run asks again."""
        if self._folder is not None:
            keep_verdict(self._folder, self._key, verdict)


def load_verdict(folder: Path, key: str) -> Verdict | None:
    """The verdict of this key in a cache's folder; None where there is none, it is old, or not as it was written."""
    try:
        return convert(find_entry(folder, _FILE, key), Verdict)
    except ValidationError:
        return None


def keep_verdict(folder: Path, key: str, verdict: Verdict) -> str:
    """Writes it, in place of the one before; the reason where that was not possible, else nothing."""
    return keep_entry(folder, _FILE, key, asdict(verdict), _MOST_BYTES)


def _parts(module: nn.Module, arguments: tuple[Any, Any]) -> list[Any]:
    """The parts of a key for a module's calls: class, source code, structure, settings, tensors, arguments, torch's number of threads."""
    kind = type(module)
    leaves = [_seen(leaf) for leaf in tree_flatten(arguments)[0]]
    state = [(name, _seen(value)) for name, value in (dict(module.named_parameters()) | dict(module.named_buffers())).items()]
    written = hashlib.sha256("".join(sorted({_source(type(m)) for m in module.modules()})).encode()).hexdigest()
    settings = sorted(set(_settings(module)))
    return [f"{kind.__module__}.{kind.__qualname__}", written, repr(module), settings, state, leaves, torch.get_num_threads()]


def _settings(module: nn.Module) -> Iterator[str]:
    """The plain values and functions that its code may read, and autocast, so that a flag, a number of rounds or an activation function,
    which no structure shows, has a verdict of its own."""
    yield f"autocast {autocast_now()}"
    for path, part in module.named_modules():
        yield from (f"{path}.{name}={told}" for name, value in vars(part).items() if (told := _told(value)))
        forward = type(part).forward
        names, values = getattr(getattr(forward, "__code__", None), "co_names", ()), getattr(forward, "__globals__", {})
        yield from (f"{forward.__module__}.{name}={values[name]!r}" for name in names if isinstance(values.get(name), _PLAIN))


def _told(value: Any) -> str:
    """A plain value as it is written, a function's name; empty for all else."""
    return repr(value) if isinstance(value, _PLAIN) else str(getattr(value, "__qualname__", ""))


def _seen(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device} {value.requires_grad}"
    return repr(value) if value is None or isinstance(value, _PLAIN) else type(value).__name__


def _source(kind: type) -> str:
    """The text of the file that defines a user's class; empty for torch's own classes, and if there is no such file."""
    if kind.__module__.startswith("torch."):
        return ""
    try:
        return Path(inspect.getfile(kind)).read_text(encoding="utf-8", errors="replace")
    except (OSError, TypeError):
        return ""


def plan_key(choices: Mapping[str, Any], devices: Sequence[TorchDevice], graph: OpGraph, binding: Binding) -> str:
    """The key of a captured graph's plan; `choices` say how it is placed (`TrainRequest.choices`)."""
    held = [(op.persistent_bytes, op.output_bytes, op.expert) for op in graph.ops]  # what an optimizer holds is in no fingerprint
    parts = {"graph": graph.fingerprint, "ops": op_signatures(graph, binding), "held": held}
    return key_of({"kind": "plan", **parts, **_surroundings(choices, devices)})


def verdict_key(choices: Mapping[str, Any], devices: Sequence[TorchDevice], parts: Sequence[Any]) -> str:
    """The key of what `parts` say it is of (a script's path and content, a module's class, shapes: values of JSON, or what str tells
    apart), on this machine, placed by these choices."""
    return key_of({"kind": "verdict", "of": list(parts), **_surroundings(choices, devices)})


def _surroundings(choices: Mapping[str, Any], devices: Sequence[TorchDevice]) -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(d.torch_device) for d in devices if d.torch_device.type == "cuda"]
    return {
        "machine": {"processor": processor(), "cores": len(devices[0].cores), "memory": usable_bytes(), "gpus": gpus},
        "devices": [(d.name, str(d.torch_device), d.clock_name, d.share, d.node) for d in devices],
        "versions": versions(),
        "numbers": (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        "cudnn": (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark),
        "choices": dict(choices),
    }


def op_signatures(graph: OpGraph, binding: Binding) -> list[str]:
    """A text for each op, in the graph's order: its target, the types, shapes and strides of the tensors it reads and makes, and its
    constants. Ops with the same text do the same work.

    A graph's fingerprint has the bytes of tensors alone, which are the same for a matrix and its transpose.
    """
    return [" ".join((op.op, *_op_parts(bound))) for op, bound in zip(graph.ops, binding.ops, strict=True)]


def _op_parts(bound: BoundOp) -> Iterator[str]:
    if bound.node is not None:
        target = bound.node.target
        yield target.__name__ if isinstance(target, FunctionType) else str(target)
        yield from map(_described, bound.node.args)
        yield from (f"{name}={_described(value)}" for name, value in bound.node.kwargs.items())
        yield f"-> {_described(bound.node)}"
    for kind, nodes in (("g", bound.gradients), ("o", bound.outputs), ("t", bound.tangents)):
        yield from (f"{kind}:{_described(node)}" for node in nodes)
    yield f"{len(bound.views)} views"


def _described(value: Any) -> str:
    """An argument: of a node what it is a tensor of; a constant as it is written."""
    if isinstance(value, fx.Node):
        return _described(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        strided = value.layout == torch.strided
        return f"{value.dtype}{list(value.shape)}{list(value.stride()) if strided else value.layout}@{value.device}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, slice):
        return f"{_described(value.start)}:{_described(value.stop)}:{_described(value.step)}"
    return repr(value)
