"""TorchDynamo while it traces for us: its settings, what made it break a graph or trace once more, and what it does not guard."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from baechi_ext.capture.torch_dynamo import (
    as_when_it_runs,
    await_trace,
    break_at_own_generators,
    compilations,
    compile_callbacks,
    dynamo_settings,
    graph_breaks,
    has_settings_by_thread,
    quietly,
    recompiles,
    run_beside_traces,
    without_limits_logged,
)
from baechi_ext.capture.torch_guards import take_raised
from baechi_ext.capture.torch_private import distributions_unchecked
from baechi_ext.capture.why_not import place_of
from baechi_runtime.host.interrupts import PutOff, raise_if_asked_for

_MOST = 20
"""The most breaks, and the most recompiles, that are kept."""
_here = threading.local()


@dataclass
class TraceLog:
    """The log of tracing a module's calls. Every entry is one line that names the user's file and line."""

    breaks: list[str] = field(default_factory=list)
    recompiles: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Time spent tracing."""

    def why(self) -> str:
        """The first graph break, for an error."""
        return f"; {self.breaks[0]}" if self.breaks else ""

    def take(self, since: tuple[int, list[Any]]) -> None:
        """Keep what has come up since: after so many breaks, and these compilations."""
        for reason, frames in graph_breaks()[since[0] :]:
            _add(self.breaks, reason + place_of(frames))
        again, failed = recompiles(since[1])
        for reason in failed:
            _add(self.breaks, reason)
        for reason in again:
            _add(self.recompiles, reason)


def _add(lines: list[str], line: str) -> None:
    line = " ".join(line.split())[:300]
    if line not in lines and len(lines) < _MOST:
        lines.append(line)


class _Shared:
    """State that several threads need at once: the first one sets it up, and the last one takes it down."""

    def __init__(self, make: Callable[[ExitStack], None]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._made = ExitStack()

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._make(self._made)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._made.close()


def _set(stack: ExitStack) -> None:
    """Set TorchDynamo up to trace for us."""
    stack.enter_context(dynamo_settings(allow_rnn=True, suppress_errors=True, trace_numpy=False))


def _hush(stack: ExitStack) -> None:
    stack.enter_context(quietly())
    stack.enter_context(warnings.catch_warnings())
    # TorchDynamo's own look at what a resumed function is given, and its advice on a graph break, which the report lists.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf|Dynamo does not know how to trace")


_SETTINGS, _QUIET = _Shared(_set), _Shared(_hush)


class _Entered:
    """A call that may be traced."""

    def __init__(self) -> None:
        self.position: tuple[int, list[Any]] | None = None
        """Where the logs stood when it began to be traced; None where it is not."""
        self.since: float | None = None
        self.seconds = 0.0
        """Time spent tracing."""
        self.put_off = PutOff()

    def begin(self) -> None:
        if self.position is None:
            self.position = len(graph_breaks()), compilations()
            self._settings = _Shared(_set) if has_settings_by_thread() else _SETTINGS
            self._settings.enter()
            _QUIET.enter()

    def end(self) -> None:
        if self.position is not None:
            self._settings.leave()
            _QUIET.leave()


def _begun(_: object) -> None:
    entered = getattr(_here, "entered", None)
    if entered is not None:
        entered.begin()
        entered.since = time.perf_counter()
        entered.put_off.begin()


def _ended(_: object) -> None:
    entered = getattr(_here, "entered", None)
    if entered is not None and entered.since is not None:
        entered.seconds += time.perf_counter() - entered.since
        entered.since = None
        entered.put_off.end()


@contextmanager
def traced_for_us(log: TraceLog) -> Iterator[None]:
    """While it is entered, Dynamo traces in this thread by our settings, and `log` is told of it. torch.distributions checks nothing then,
    as it doesn't wherever torch.compile was called: each check would be a graph break."""
    if not hasattr(_here, "entered"):
        run_beside_traces()
    compile_callbacks(_begun, _ended)  # torch._dynamo.reset() takes them away
    outer, entered = getattr(_here, "entered", None), _Entered()
    _here.entered = entered
    await_trace()
    try:
        with distributions_unchecked():
            yield
    finally:
        _here.entered = outer
        entered.end()
        if entered.position is not None:
            log.seconds += entered.seconds
            log.take(entered.position)
        raised = take_raised()
        entered.put_off.hand_out()
        if raised is not None:
            raise_if_asked_for(raised)


def watch_compiles() -> None:
    """Have Dynamo not log that it has traced a call of ours too often, and trace a user's code as it runs; once in a process is enough."""
    without_limits_logged(_not_ours)
    break_at_own_generators()
    as_when_it_runs(inside_one)


def _not_ours(_: object) -> bool:
    return not inside_one()


def inside_one() -> bool:
    """True if the calling thread is in a call that is traced for us."""
    return getattr(_here, "entered", None) is not None
