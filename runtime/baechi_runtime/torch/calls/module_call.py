"""The calls of one module, compiled in place: the object, its type, hooks, `state_dict` and attributes stay the user's own."""

import gc
import math
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from baechi_ext.capture.torch_dynamo import (
    has_global_module_hooks,
    is_set_otherwise,
    sees_single_ops,
    trace_marks,
    traced,
    traced_elsewhere,
)
from baechi_ext.capture.torch_private import inside_backward, is_traced, tree_flatten
from baechi_ext.errors import CaptureError
from baechi_runtime.measure.turns import disturb_timed
from baechi_runtime.report.call_report import FORWARD_ALONE, UNTRACED
from baechi_runtime.torch.calls.fragments import Settings
from baechi_runtime.torch.calls.session import SINGLE_OPS, Session
from baechi_runtime.torch.calls.tracing import inside_one, traced_for_us, watch_compiles
from baechi_runtime.torch.calls.verify import put_back

COMPILED = "the script compiles it itself (torch.compile, torch.jit)"
ELSEWHERE = "another thread was tracing"
_CALL = "_compiled_call_impl"
"""The attribute of a module that nn.Module.__call__ asks for another call. It is set past the module's own `__setattr__`."""

_COLLECT_SECONDS = 1.0
"""Modules that are placed soon after another, as the blocks of a model, have no collection of garbage each."""
_LIVING: "weakref.WeakSet[ModuleCall]" = weakref.WeakSet()
_collected = -math.inf
"""When garbage was collected."""


class ModuleCall:
    """Stands in for the call of `module`; `ordinary` is the original call."""

    def __init__(self, module: nn.Module, ordinary: Callable[..., Any], settings: Settings) -> None:
        watch_compiles()
        _collect()
        _LIVING.add(self)
        self.session = Session(settings, type(module).__name__, module)
        self._module = module
        self._ordinary = ordinary
        self._compiled = traced(module, self.session.backend)
        self._is_first = True
        self._lazy = True
        """True while parameters or buffers may still lack their shapes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = sys._getframe(1).f_locals.get("self")  # a copy made by `copy.__dict__ = module.__dict__.copy()` comes here, too
        if isinstance(called, nn.Module) and called is not self._module and call_of(called) is self:
            return called._call_impl(*args, **kwargs)
        session, why = self.session, self._why_not()
        if why:
            session.count_plain(why)
            return self._ordinary(*args, **kwargs)
        if self._is_first:
            self._is_first = False
            session.look_back((args, kwargs))
            if session.refusal:
                return self(*args, **kwargs)
        ran, trained, placed, marks = session.ran, session.ran_trained, session.ran_placed, trace_marks()
        session.begin_call()
        with traced_for_us(session.log):
            value = self._compiled(*args, **kwargs)
        session.placed_calls += session.ran_placed != placed
        if session.ran == ran or (session.ran_trained == trained and has_gradients(value)):
            if marks % 2 or trace_marks() != marks:
                session.count_plain(ELSEWHERE)
                return value
            session.count_plain(UNTRACED)
            if session.settings.strict:
                raise CaptureError(f"{session.name} is not placed: {UNTRACED}{session.log.why()}")
            session.say_once(f"{session.name} runs as it is: {UNTRACED}{session.log.why()}")
        return value

    def _why_not(self) -> str:
        """Why a call that begins now runs as it is; empty where it may run placed."""
        session = self.session
        if not self._module.training or not torch.is_grad_enabled():
            return f"it was in eval mode, or no gradients were recorded: {FORWARD_ALONE}"
        if self._lazy:
            self._lazy = has_no_shapes(self._module)
            if self._lazy:
                return "its parameters had no shapes yet"
        if why := session.why_plain():
            return why
        if not inside_one() and traced_elsewhere():
            return ELSEWHERE
        if is_set_otherwise():
            return "the script sets TorchDynamo to trace otherwise, or to raise where it traces anew"
        if is_traced() or inside_one() or inside_backward():
            return "it was a part of another call"
        if has_global_module_hooks():
            return "hooks for the calls of all modules are registered, which a placed call would not run"
        return SINGLE_OPS if sees_single_ops() else ""

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace and place the call with these arguments; a module that is in eval mode is put into training mode for it. Its forward runs
        twice; modes, buffers and generators are put back.

        Raises CaptureError where the calls run as they are, with the reason.
        """
        was = self._module.training
        with put_back(self._module), torch.enable_grad():
            try:
                if not was:
                    self._module.train()
                for _ in range(3 if has_no_shapes(self._module) else 2):
                    self(*args, **kwargs)
            finally:
                if not was:
                    self._module.eval()
        if not self.session.groups:
            why = self.session.why_not() or next(reversed(self.session.unplaced), "no training call of it was traced")
            raise CaptureError(f"{self.session.name} is not placed: {why}")

    def is_of(self, module: nn.Module) -> bool:
        return self._module is module

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Make a copy of the module one that is not placed."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Save the module as one that is not placed."""
        return type(None), ()


def has_gradients(value: Any) -> bool:
    """True if a tensor among what a call returned has a gradient."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_flatten(value)[0])


def has_no_shapes(module: nn.Module) -> bool:
    """True if parameters or buffers lack their shapes until the first call."""
    return any(isinstance(t, (nn.UninitializedParameter, nn.UninitializedBuffer)) for t in (*module.parameters(), *module.buffers()))


def compiled_by_others(module: nn.Module) -> bool:
    """True if the module is one that torch.compile or torch.jit made or runs."""
    wrapped = hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule)
    return wrapped or module.__dict__.get(_CALL) is not None


def call_of(module: nn.Module) -> ModuleCall | None:
    """The stand-in for the module's call; None if it is not placed."""
    found = module.__dict__.get(_CALL)
    return found if isinstance(found, ModuleCall) else None


def place_in(module: nn.Module, settings: Settings) -> ModuleCall:
    """Have the module's calls placed from now on, until it or the process ends. Raises CaptureError for a module that is compiled
    already."""
    if compiled_by_others(module):
        raise CaptureError(f"{type(module).__name__} is not placed: {COMPILED}; give the module before it is compiled")
    found = ModuleCall(module, module._call_impl, settings)
    module.__dict__[_CALL] = found
    weakref.finalize(module, found.session.conclude, ended=True)
    return found


def take_out(module: nn.Module) -> None:
    """Have the module's calls run as they did before `place_in`."""
    found = call_of(module)
    if found is not None:
        found.session.drop()
        module.__dict__[_CALL] = None


def _collect() -> None:
    """Free the modules that the script let go of: a module and its call hold each other, and would stay in memory beside the next."""
    global _collected
    if _LIVING and time.monotonic() - _collected > _COLLECT_SECONDS:
        gc.collect()
        _collected = time.monotonic()
        disturb_timed()
