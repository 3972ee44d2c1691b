"""The parts of TorchDynamo that the project uses and that are not public, behind names of its own: see torch_private.py."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from inspect import signature
from numbers import Number
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

from baechi_ext.capture.torch_private import distributions_unchecked, needed

if TYPE_CHECKING:
    import torch
    from torch import fx


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """TorchDynamo does not log graph breaks and the tracebacks of frames that it can't trace; the reports have what it says of them."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._subclasses.fake_tensor")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def without_limits_logged(logs: Callable[[object], bool]) -> None:
    """Have TorchDynamo log that it has traced a frame too often only where `logs` says so; the same function once."""
    logging.getLogger("torch._dynamo.convert_frame").addFilter(logs)


@contextlib.contextmanager
def tracing_alone() -> Iterator[None]:
    """No other thread traces: neither TorchDynamo nor what it is built on is safe beside another trace. Raises MissingBackendError."""
    with needed("tracing a module's calls"):
        from torch._dynamo.convert_frame import compile_lock
    with compile_lock:
        try:
            _Alone.marks += 1
            yield
        finally:
            _Alone.marks += 1


class _Alone:
    marks = 0
    """Number of times that `tracing_alone` was entered or left: odd while it is entered."""


def trace_marks() -> int:
    """A number that says whether a trace was under way: it is odd, or another one later."""
    return _Alone.marks


def run_beside_traces() -> None:
    """Have compiled calls of this thread run as they are while another thread traces: by default TorchDynamo takes them for a part of what
    is traced, and refuses that. Raises MissingBackendError."""
    with needed("tracing a module's calls"):
        from torch._dynamo import config
    config.error_on_nested_fx_trace = False


def await_trace() -> None:
    """Wait until no other thread traces. Raises MissingBackendError."""
    if _Alone.marks % 2:
        with needed("tracing a module's calls"):
            from torch._dynamo.convert_frame import compile_lock
        with compile_lock:
            pass


def traced_elsewhere() -> bool:
    """True if TorchDynamo says that something is traced, and another thread traces it.

    It says so by one mark for all threads, which a trace puts back to what it was before: of two traces that overlap, as torch.export's do,
    the last one may leave the mark behind, and everything would run unplaced from then on. A mark that stays for long while nobody traces
    is taken away. Raises MissingBackendError.
    """
    with needed("tracing a module's calls"):
        import torch
        from torch._dynamo.convert_frame import compile_lock
    if not torch.compiler.is_compiling():
        _Left.since = None
        return False
    if compile_lock._is_owned():  # type: ignore[attr-defined]  # of every RLock
        return False
    if not compile_lock.acquire(blocking=False):
        _Left.since = None
        return True
    try:
        _Left.since = _Left.since or time.monotonic()
        if time.monotonic() - _Left.since > _Left.seconds:
            torch.compiler._is_compiling_flag = False
        return torch.compiler.is_compiling()
    finally:
        compile_lock.release()


class _Left:
    since: float | None = None
    """When the mark of a trace was first seen without one; None where it was not."""
    seconds = 10.0


def has_settings_by_thread() -> bool:
    """True if each thread has settings of TorchDynamo of its own; in torch 2.11 all have the same. Raises MissingBackendError."""
    with needed("tracing a module's calls"):
        from torch._dynamo import config
    settings = config._config  # type: ignore[attr-defined]  # made when the module is loaded
    return isinstance(getattr(settings["allow_rnn"], "user_override", None), ContextVar)


@contextlib.contextmanager
def dynamo_settings(**settings: Any) -> Iterator[None]:
    """Settings of TorchDynamo, while it is entered. Raises MissingBackendError."""
    with needed("tracing a module's calls"):
        from torch._dynamo import config
    with config.patch(settings):
        yield


def compile_callbacks(begun: Callable[[object], None], ended: Callable[[object], None]) -> None:
    """Have TorchDynamo call these whenever it begins and ends to trace a frame; the same functions once. Raises MissingBackendError."""
    with needed("tracing a module's calls"):
        from torch._dynamo.callback import callback_handler
    if begun not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begun)
        callback_handler.register_end_callback(ended)


def traced(module: "torch.nn.Module", backend: Callable[..., Any] | str) -> Callable[..., Any]:
    """The module's call, which TorchDynamo traces for `backend`: for the sizes that come, and with a count of its own of how often, where
    this torch has that (2.11 counts all modules of a class together).

    Frames of torch's own modules, as nn.Sequential, are passed over unless they are inlined into another one; a user's own `forward` is
    traced as a frame of its own, and hooks of the module itself run outside of it. Raises MissingBackendError.
    """
    with needed("tracing a module's calls"):
        import torch
        from torch._dynamo.external_utils import wrap_inline
        from torch._dynamo.trace_rules import check
    call = wrap_inline(module._call_impl) if check(type(module).forward) else module._call_impl
    counted: dict[str, Any] = {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}
    with distributions_unchecked():  # torch.compile takes their checks away for good
        compiled: Callable[..., Any] = torch.compile(call, backend=backend, dynamic=False, **counted)
    return compiled


def compile_workers_ended() -> None:
    """End the processes in which TorchInductor compiles, as far as it has started any; it starts others when it needs them."""
    import sys

    if (pools := sys.modules.get("torch._inductor.async_compile")) is not None:
        pools.shutdown_compile_workers()


def skip_frame(why: str) -> NoReturn:
    """From a backend: have TorchDynamo run the frame that it traces, and all later calls of that, as the user wrote it."""
    with needed("tracing a module's calls"):
        from torch._dynamo.exc import SkipFrame
    raise SkipFrame(why)


def pass_over(code: CodeType) -> None:
    """Have TorchDynamo run each frame of this code as it is, and trace what it calls as frames of their own."""
    with needed("tracing a module's calls"):
        from torch._dynamo.eval_frame import skip_code
    skip_code(code)


def skip_guarded_frame(why: str) -> NoReturn:
    """The same while guards of the frame are made."""
    with needed("tracing a module's calls"):
        from torch._dynamo import exc
    exc.unimplemented(gb_type=why, context="", explanation="", hints=[])


def source_of(node: "fx.Node") -> tuple[str, bool]:
    """The source of a graph's argument as TorchDynamo writes it (L['self'].weight), and whether it is a parameter or a buffer."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return "", False
    name = source.name() if callable(source.name) else source.name
    return name, "ParamBuffer" in repr(source)


def unmark(tensors: Iterable[object]) -> None:
    """Take from parameters the mark that TorchDynamo leaves on those that it traces, which would be saved with them. It makes the mark
    anew whenever it traces them; `guarded` ones are a user's own."""
    for tensor in tensors:
        marks = getattr(tensor, "__dict__", {})
        if marks.get("_dynamo_static_input_type") == "unguarded":
            del marks["_dynamo_static_input_type"]


def graph_breaks() -> list[tuple[str, list[tuple[str, int, str]]]]:
    """All graph breaks of this process so far: the reason, and the user's frames as (file, line, function), the innermost last."""
    with needed("tracing a module's calls"):
        from torch._dynamo.utils import graph_break_reasons
    return [
        (r.reason.strip().splitlines()[0] if r.reason.strip() else "", [(f.filename, f.lineno or 0, f.name) for f in r.user_stack])
        for r in graph_break_reasons
    ]


def compilations() -> list[Any]:
    """TorchDynamo's records of what it traced last in this process, some dozens."""
    with needed("tracing a module's calls"):
        from torch._dynamo.utils import get_compilation_metrics
    return list(get_compilation_metrics())


def recompiles(before: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Why TorchDynamo traced a frame once more since `compilations` gave `before`, and why it could not trace one, with the frame's file
    and line."""
    old = {id(m) for m in before}
    known = [m for m in compilations() if id(m) not in old]
    where = {id(m): f"({m.co_name} at {m.co_filename}:{m.co_firstlineno})" for m in known}
    reasons = {id(m): (getattr(m, "recompile_reason", None) or "").partition("User stack trace")[0].strip() for m in known}
    again = [f"{reason} {where[key]}" for key, reason in reasons.items() if reason and "BACKEND_MATCH" not in reason]
    failed = [f"{_first_line(m.fail_reason)} {where[id(m)]}" for m in known if m.fail_reason]
    return again, failed


def _first_line(reason: str) -> str:
    """The first line of a reason; of what a backend raised, without TorchDynamo's line before it."""
    text = reason.strip()
    return ((text.partition(" raised:\n")[2] or text).splitlines() or [""])[0]


def sees_single_ops() -> bool:
    """True if a mode or hooks are active in this thread that see single ops or what autograd keeps for them: saved-tensor hooks,
    function and dispatch modes (but for default devices), function transforms (torch.func), forward-mode derivatives, anomaly detection."""
    import torch
    from torch.autograd import forward_ad

    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and _has_function_mode())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.is_anomaly_enabled()
    )


def _has_function_mode() -> bool:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def has_global_module_hooks() -> bool:
    """True if hooks for the calls of all modules are registered, which a traced call does not run."""
    from torch.nn.modules import module

    return bool(module._has_any_global_hook())


def is_set_otherwise() -> bool:
    """True while compiled functions are to run in another way than by default (torch.compiler.set_stance), or to raise where one is traced
    anew, or too often."""
    from torch._dynamo import config, eval_frame

    raises = any(getattr(config, name, False) for name in ("error_on_recompile", "fail_on_recompile_limit_hit"))  # not in each release
    return raises or eval_frame._stance.stance != "default"


def break_at_own_generators() -> None:
    """Have TorchDynamo leave draws from generators of Python's that are a user's own to Python: it would neither read their state back nor
    guard it. Raises MissingBackendError."""
    with needed("tracing a module's calls"):
        from torch._dynamo.variables.misc import RandomVariable

        supported: Any = RandomVariable
        supported.is_supported_random_obj = staticmethod(lambda _: False)


@cache
def as_when_it_runs(ours: Callable[[], bool]) -> None:
    """Have TorchDynamo give to a user's code what it gets when it runs, where `ours` is true of what is traced. For the whole process.

    torch.compiler.is_compiling() is False. A function behind functools.lru_cache is left to Python, where TorchDynamo would run it anew
    each time, and so are what gives a tensor other memory (`.data = ...`), which no graph can, and NumPy, but its functions of numbers are
    called at once. Installed packages are told that they are compiled, as they ask in order to be traced, and their cached functions of
    constants are called at once. Raises MissingBackendError.
    """
    with needed("tracing a module's calls"):
        import torch
        from torch._dynamo.external_utils import is_compiling
        from torch._dynamo.variables import builtin
        from torch._dynamo.variables.functions import WrapperUserFunctionVariable
        from torch._dynamo.variables.misc import NumpyVariable
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        handlers = TorchInGraphFunctionVariable._get_handlers()
        questions = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._utils.is_compiling, is_compiling)
    for question in handlers.keys() & set(questions):
        handlers[question] = _instead(_no, handlers[question], ours)
    wrapped: Any = WrapperUserFunctionVariable
    wrapped.call_function = _instead(_cached, wrapped.call_function, ours)
    numpy: Any = NumpyVariable
    numpy.call_function = _instead(_of_numbers, numpy.call_function, ours)
    kind, setting = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable), "_call_setattr"
    setting = setting if hasattr(kind, setting) else "call_setattr"  # of torch 2.11
    setattr(kind, setting, _instead(_to_data, getattr(kind, setting), ours))


def _instead(found: Callable[..., Any], ordinary: Callable[..., Any], ours: Callable[[], bool]) -> Callable[..., Any]:
    """A way to call a traced variable: what is `found`, where `ours` is true and there is anything, or the ordinary one."""

    def call(variable: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        result = found(variable, frame, *args, **kwargs) if ours() else None
        return ordinary(variable, frame, *args, **kwargs) if result is None else result

    return call


def _no(_: Any, frame: Any) -> Any:
    from torch._dynamo.variables import ConstantVariable

    asking = [f for f in (frame, frame.parent) if f is not None]
    told = frame.f_globals.get("__name__", "").partition(".")[0] == "torch" or all(_is_installed(f.f_code) for f in asking)
    return None if told else ConstantVariable.create(False)


def _cached(variable: Any, _: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from torch._dynamo import exc, utils

    function = variable.wrapper_obj
    is_known = getattr(utils, "is_lru_cache_wrapper_trace_without_warning_allowed", lambda _: False)  # not in 2.11
    if not hasattr(function, "cache_info") or str(function.__module__).partition(".")[0] == "torch" or is_known(function):
        return None
    value = _called(function, [*variable.self_args(), *args], kwargs) if _is_installed(function.__wrapped__.__code__) else None
    return value or exc.unimplemented(gb_type="results of a function are cached", context=str(function), explanation="", hints=[])


def _of_numbers(variable: Any, _: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    import numpy

    function: Any = variable.value
    is_public = vars(numpy).get(getattr(function, "__name__", "")) is function  # numpy.random is not: its numbers are no constants
    return _called(function, args, kwargs) if is_public else None


def _to_data(_: Any, frame: Any, owner: Any, name: Any, value: Any) -> Any:
    from torch._dynamo import exc
    from torch._dynamo.variables import TensorVariable

    if isinstance(owner, TensorVariable) and name.is_python_constant() and name.as_python_constant() == "data":
        exc.unimplemented(gb_type="a tensor gets other memory", context=f"{owner}.data = {value}", explanation="", hints=[])


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a call with constants, if it is one; otherwise None."""
    from torch._dynamo.variables import ConstantVariable

    if not all(value.is_python_constant() for value in (*args, *kwargs.values())):
        return None
    result = function(*(a.as_python_constant() for a in args), **{name: a.as_python_constant() for name, a in kwargs.items()})
    result = result.item() if isinstance(result, Number) and hasattr(result, "item") else result
    return ConstantVariable.create(result) if ConstantVariable.is_base_literal(result) else None


def _is_installed(code: CodeType) -> bool:
    """True for code of an installed package."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(code.co_filename).parts)


def module_classes(graph: "fx.GraphModule") -> set[type]:
    """The classes of the modules whose code a traced graph is from, as far as its nodes say."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph.graph.nodes)
    return {kind for stack in stacks for _, kind in stack.values() if isinstance(kind, type)}
