"""Blocks of a module whose forward can't be captured as one graph: which of its submodules can run, and be placed, on their own.

One call of the module is watched as it is, submodule by submodule. A submodule can be a block where all that it takes and gives are
tensors in plain nests, and where it changes none of its arguments in place. The code between the blocks stays where it is.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baechi_ext.capture.torch_private import parts_of

if TYPE_CHECKING:
    import torch

MOST_BLOCKS = 64
_FEWEST_US = 300.0
"""A block that takes less is not worth a message to another thread."""
_PARTS = 4
"""A block is taken apart until it takes no more than this part of a device's share."""
_COVERED = 0.8
"""A block is taken apart where its submodules take at least this share of its time."""


@dataclass
class WatchedModule:
    """What calls of one module were seen to do."""

    name: str
    module: "torch.nn.Module"
    us: float = 0.0
    """All calls together, submodules included."""
    calls: int = 0
    inside: dict[str, None] = field(default_factory=dict)
    """The modules that its own code calls."""
    unfit: str = ""
    """Why it can't be a block."""
    draws: bool = False
    """It draws random numbers."""


@dataclass(frozen=True)
class Blocks:
    """The submodules that are placed, in the order of their first calls."""

    watched: tuple[WatchedModule, ...]
    covered: float
    """Their share of the forward pass's time."""
    left_out: tuple[str, ...]
    """Why others run in the caller's thread."""
    code_draws: bool
    """The code between the blocks draws random numbers."""


@contextlib.contextmanager
def forwards_replaced(replacements: "Mapping[torch.nn.Module, Callable[..., Any]]") -> Iterator[None]:
    """While it is entered, these modules run other functions in place of their forward; hooks run as ever."""
    before = {module: module.__dict__.get("forward") for module in replacements}
    try:
        for module, function in replacements.items():
            module.__dict__["forward"] = function
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def find_blocks(module: "torch.nn.Module", run: Callable[[], Any], num_devices: int) -> Blocks:
    """The blocks of `module`, from one call of it, which `run` makes."""
    watch = _Watch(module)
    with forwards_replaced(watch.replacements()):
        run()
    return _chosen(watch, num_devices)


class _Watch:
    """All modules while one call runs."""

    def __init__(self, module: "torch.nn.Module") -> None:
        import torch

        self.root = module
        self.found = {m: WatchedModule(name, m) for name, m in module.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
        self._stack: list[WatchedModule] = []
        self.code_draws = False

    def replacements(self) -> "dict[torch.nn.Module, Callable[..., Any]]":
        return {module: self._watching(entry, module.forward) for module, entry in self.found.items()}

    def _watching(self, entry: WatchedModule, forward: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._stack:
                self._stack[-1].inside[entry.name] = None
            if entry in self._stack:
                entry.unfit = "it calls itself"
            given = _tensors(entry, (args, kwargs), "takes")
            versions = [t._version for t in given]
            numbers, grad = torch.get_rng_state(), torch.is_grad_enabled()
            self._stack.append(entry)
            begin = time.perf_counter_ns()
            try:
                value = forward(*args, **kwargs)
            finally:
                entry.us += (time.perf_counter_ns() - begin) / 1000
                self._stack.pop()
            entry.calls += 1
            entry.draws |= not torch.equal(numbers, torch.get_rng_state())
            if versions != [t._version for t in given]:
                entry.unfit = "it changes an argument in place"
            if not grad:
                entry.unfit = "it is called under no_grad"
            _tensors(entry, value, "returns")
            return value

        return watched


def _tensors(entry: WatchedModule, value: Any, does: str) -> "list[torch.Tensor]":
    import torch

    plain = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, slice)
    leaves, _ = parts_of(value)
    for leaf in leaves:
        if not isinstance(leaf, plain) and type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            entry.unfit = f"it {does} a {type(leaf).__name__}"
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _chosen(watch: _Watch, num_devices: int) -> Blocks:
    """Submodules of the module's own code; a long one is taken apart into those of its code, while there are few."""
    by_name = {entry.name: entry for entry in watch.found.values()}
    root = watch.found[watch.root]
    total = root.us or 1.0
    chosen = [by_name[name] for name in root.inside]
    while len(chosen) < MOST_BLOCKS:
        long = [e for e in chosen if (e.us > total / num_devices / _PARTS or e.unfit) and _may_be_taken_apart(e, by_name)]
        if not long:
            break
        entry = max(long, key=lambda e: e.us)
        at = chosen.index(entry)
        inside = [by_name[name] for name in entry.inside]
        chosen[at : at + 1] = [e for e in inside if e not in chosen]
    blocks = tuple(entry for entry in chosen if not entry.unfit)
    left_out = tuple(f"{entry.name}: {entry.unfit}" for entry in chosen if entry.unfit)
    drawn_inside = any(entry.draws for entry in blocks)
    code_draws = root.draws and (not drawn_inside or any(e.draws and e.unfit for e in chosen))
    return Blocks(blocks, sum(entry.us for entry in blocks) / total, left_out, code_draws)


def _may_be_taken_apart(entry: WatchedModule, by_name: Mapping[str, WatchedModule]) -> bool:
    inside = [by_name[name] for name in entry.inside]
    fit = [e for e in inside if not e.unfit]
    if len(inside) < 2 or len(fit) < len(inside):
        return bool(entry.unfit and fit)
    us = sum(e.us for e in fit)
    return us >= _COVERED * entry.us and us / sum(e.calls for e in fit) >= _FEWEST_US
