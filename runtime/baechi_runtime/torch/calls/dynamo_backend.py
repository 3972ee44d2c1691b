"""The backend `baechi` of torch.compile: `torch.compile(model, backend="baechi", options={"devices": 2})`, or
`model.compile(backend="baechi")`. TorchDynamo finds it by its entry point.

All that is compiled with the same options belongs to one session: its fragments share devices, and those of one call are planned together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baechi_runtime.host.generators import python_generators_kept

with python_generators_kept():  # while what is long in loading hooks into TorchDynamo, which looks this backend up before it traces
    from torch import fx

    from baechi_ext.capture.torch_guards import guard_hooks
    from baechi_runtime.torch.calls.parallelize import options_of
    from baechi_runtime.torch.calls.session import Session
    from baechi_runtime.torch.calls.tracing import watch_compiles

    guard_hooks()

_SESSIONS: dict[str, Session] = {}


def baechi(graph: fx.GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None, **given: Any) -> Callable[..., Any]:
    """Returns the function that runs a graph of TorchDynamo's. The options are those of
    baechi_runtime.torch.calls.parallelize.ParallelizeOptions. Raises OptionError for unknown ones."""
    with python_generators_kept():
        return _session_for({**(options or {}), **given}).backend(graph, examples)


def _session_for(given: Mapping[str, Any]) -> Session:
    chosen = options_of(given)
    watch_compiles()
    guard_hooks()
    key = repr(chosen)
    if key not in _SESSIONS:
        _SESSIONS[key] = Session(chosen.settings(), "the compiled model")
    return _SESSIONS[key]


def sessions() -> list[Session]:
    """All that were compiled by name in this process."""
    return list(_SESSIONS.values())
