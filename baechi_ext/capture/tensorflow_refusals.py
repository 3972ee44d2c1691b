"""Says what of a TensorFlow step can't be placed, with the line of the user's code and what to change there."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

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
_TEXTS = ("Print", "PrintV2", "StringFormat")


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


def state_outside(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The Python state around a function that it names: numbers, and the lengths of lists."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    around = function.__globals__
    named = {name: around[name] for name in code.co_names if name in around}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            named[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    numbers = {name: value for name, value in named.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    return numbers | {name: f"{len(value)} entries" for name, value in named.items() if isinstance(value, list)}


def require_unchanged(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raises CaptureError where tracing a function changed Python state: steps do that in eager mode, and not in a graph."""
    for name, value in before.items():
        if name in after and after[name] != value:
            raise CaptureError(
                f"{what} changes the Python variable {name!r} ({value} before it was traced, {after[name]} afterwards), which a graph does "
                "only once; keep it in a tf.Variable, or change it outside of the step"
            )
