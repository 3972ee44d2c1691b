"""Says what of a TensorFlow step can't be placed, with the line of the user's code and what to change there."""

import dis
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from baechi_ext.capture.tensorflow_private import has_kernel, tensorflow
from baechi_ext.capture.why_not import place_of
from baechi_ext.errors import CaptureError

if TYPE_CHECKING:
    import tensorflow as tf

_ADVICE = (
    (
        ("singleton tf.Variable", "tf.Variable created", "creating variables"),
        "the step makes a variable: make it once, before the step, and use it there",
    ),
    (
        ("has no attribute 'numpy'", "numpy array", "NumPy array"),
        "a tensor of the step has no NumPy value: compute with TensorFlow functions, or do this to what the step returns",
    ),
    (
        ("Python `bool`", "using a `tf.Tensor` as a Python", "iterating over", "float()", "must be real number", "as an integer"),
        "a Python number or truth is taken out of a tensor: use tf.where or tf.cond, or do this to what the step returns",
    ),
)
_OTHERWISE = "take what is no computation on tensors out of the step"
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_WITH_TEXT = ("Const", "Assert", "If", "StatelessIf")
"""Kinds of ops that may work on text: that of an error."""
_MOST_ENTRIES = 100
"""Entries of a dict that are looked at one by one."""
_TEXTS = ("Print", "PrintV2", "StringFormat")
_FRAMEWORKS = ("keras", "tensorflow")
_NUMBERS = (int, float, np.number, np.bool_)


def not_traceable(what: str, error: BaseException) -> CaptureError:
    """The error for `what`, which raised `error` while it was traced: the reason, the line, and what to change."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if re.match(r"\w+(Error|Exception): ", line)), lines[0] if lines else "")
    kind = type(error).__name__
    reason = reason if reason.startswith(kind) or re.match(r"\w+Error: ", reason) else f"{kind}: {reason}"
    advice = next((a for words, a in _ADVICE if any(word in text for word in words)), _OTHERWISE)
    first_sentence = re.split(r"(?<=[^.])\. [A-Z]", reason, maxsplit=1)[0].removesuffix(".")
    # AutoGraph writes the lines of the user's code into its errors.
    frames = [(file, int(line), name) for file, line, name in re.findall(r'File "([^"]+)", line (\d+), in ([^\s,]+)', text)]
    return CaptureError(f"{what} cannot be captured as one graph: {first_sentence}{place_of(frames)}; {advice}")


def require_placeable(operations: "Iterable[tf.Operation]", traced: "tf.Graph", device_type: str) -> None:
    """Raises CaptureError for text, summaries and Python code among the ops of a step, and for an op that no device can run. The
    traced graph knows where ops come from that are not of an inlined function."""
    for operation in operations:
        problem = _problem(operation.type, [t.dtype for t in (*operation.inputs, *operation.outputs)])
        if problem is None and not has_kernel(operation.type, device_type):
            problem = f"{operation.type} has no kernel for a {device_type}", "use another op, or devices that can run this one"
        if problem is not None:
            what, advice = problem
            frames = []
            with suppress(KeyError):
                frames = [(f.filename, f.lineno, f.name) for f in traced.get_operation_by_name(operation.name).traceback]
            raise CaptureError(f"op {operation.name!r} can't be placed: {what}{place_of(frames)}; {advice}")


def require_placeable_inside(library: "tf.compat.v1.FunctionDefLibrary") -> None:
    """The same for branches and bodies of loops, whose lines are not known."""
    tf = tensorflow()
    for function in library.function:
        for node in function.node_def:
            types = [tf.as_dtype(t) for attribute in node.attr.values() for t in (attribute.type, *attribute.list.type) if t]
            problem = _problem(node.op, types)
            if problem is not None:
                raise CaptureError(f"op {node.name!r} of {function.signature.name!r} can't be placed: {problem[0]}; {problem[1]}")


def _problem(kind: str, types: "Iterable[tf.DType]") -> tuple[str, str] | None:
    """The reason why an op of this kind, which works on these types of tensors, can't be placed, and advice."""
    if kind in _PYTHON:
        return "it runs Python code (tf.py_function, tf.numpy_function)", "use TensorFlow functions instead, or do this outside of the step"
    if "Summary" in kind:
        return "it writes a summary", "return the value from the step, and write the summary of what was returned"
    if kind not in _WITH_TEXT and (kind in _TEXTS or tensorflow().string in types):
        return f"it works on text ({kind})", "take tf.print and other text out of the step, and print what it returns"
    return None


def numbers_outside(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The numbers and truths outside of a function that it, and what it calls in its module, names: a trace has them as they were."""
    return {name: value for name, value in _entries(_named_outside(function)).items() if isinstance(value, _NUMBERS)}


def state_outside(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The Python state around a function: numbers, and the lengths of lists and dicts, that it names, or that its object has."""
    own = _object_of(_called(function))
    named = {f"self.{name}": value for name, value in own.items() if not name.startswith("_")} | _named_outside(function)
    lengths = {name: f"{len(value)} entries" for name, value in _entries(named).items() if isinstance(value, (list, dict))}
    return {name: value for name, value in _entries(named).items() if isinstance(value, _NUMBERS)} | lengths


def _entries(named: Mapping[str, Any]) -> dict[str, Any]:
    """All that is named, and the entries of small dicts among it."""
    small = {name: value for name, value in named.items() if isinstance(value, dict) and len(value) <= _MOST_ENTRIES}
    inner = {f"{name}[{k!r}]": v for name, value in small.items() for k, v in value.items() if isinstance(k, (str, int))}
    return {**named, **inner}


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function or method that runs where this is called: that of a partial, and of an object its `__call__`, unless it is that of a
    Keras layer or a function of TensorFlow's, whose own state is theirs."""
    while isinstance(function, partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004 - the object's own would not be what runs
    if isinstance(call, FunctionType) and call.__module__.partition(".")[0] not in _FRAMEWORKS:
        function = call.__get__(function)
    return function


def _object_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The attributes of the object whose method a function is."""
    return getattr(getattr(function, "__self__", None), "__dict__", {})


def _named_outside(function: Callable[..., Any]) -> dict[str, Any]:
    """The globals and the variables of functions around that a function names, the attributes of its object as self.NAME, and the same for
    functions that it names, if they are of its module, and methods of its object."""
    function = _called(function)
    own, kind = _object_of(function), type(getattr(function, "__self__", None))
    found: dict[str, Any] = {}
    todo, seen = [getattr(function, "__func__", function)], set()
    while todo:
        each = todo.pop()
        if not isinstance(each, FunctionType) or each in seen:
            continue
        seen.add(each)
        names, attributes = _names(each.__code__)
        around = {name: each.__globals__[name] for name in names if name in each.__globals__}
        todo += [f for f in around.values() if getattr(f, "__globals__", None) is each.__globals__]
        for name, cell in zip(each.__code__.co_freevars, each.__closure__ or (), strict=True):
            with suppress(ValueError):  # not assigned yet
                around[name] = cell.cell_contents
                todo.append(cell.cell_contents)
        if own:
            around |= {f"self.{name}": own[name] for name in attributes if name in own}
            todo += [getattr(kind, name, None) for name in attributes]
        found |= around
    return found


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals and the attributes that code names, with the functions in it."""
    names, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith("_GLOBAL"):
            names.add(instruction.argval)
        elif instruction.opname.endswith(("_ATTR", "_METHOD")):
            attributes.add(instruction.argval)
    for inner in (c for c in code.co_consts if isinstance(c, CodeType)):
        names |= _names(inner)[0]
        attributes |= _names(inner)[1]
    return frozenset(names), frozenset(attributes)


def require_unchanged(what: str, before: Mapping[str, Any], after: Mapping[str, Any], printed: str = "") -> None:
    """Raises CaptureError where tracing a function changed Python state, or printed: steps do that in eager mode, and not in a graph."""
    advice = "or decorate the step with tf.function, which does it only once, too"
    for name, value in before.items():
        new = after.get(name, value)
        if new is not value and new != value and not (new != new and value != value):  # NaN is no other than it was
            raise CaptureError(
                f"{what} changes the Python variable {name!r} ({value} before it was traced, {new} afterwards), which a graph does "
                f"only once; keep it in a tf.Variable, change it outside of the step, {advice}"
            )
    if printed:
        line = printed.strip().partition("\n")[0]
        raise CaptureError(f"{what} prints {line!r}, which a graph does only once; print what it returns, {advice}")
