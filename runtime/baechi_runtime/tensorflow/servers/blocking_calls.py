"""Calls into TensorFlow that may block for ever, made by a thread of their own, so that whoever asked for them need not.

A client of a server that is killed waits for it until its own time-out; here it is told as soon as the server's end is seen.
"""

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from baechi_ext.errors import ExecutionError

T = TypeVar("T")

CLOSING_SECONDS = 10.0
"""Time for a session to end."""
_POLL_SECONDS = 0.2
_INTERRUPTED_SECONDS = 1.5
"""Time for a call that is interrupted: a device that stands still never answers."""
_BEYOND_SECONDS = 10.0
"""TensorFlow's own time-outs come first: they say what was waited for."""


def leave_open(session: Any) -> None:
    """Has a session never end: its end would wait for devices that are gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


class Calls:
    """Makes one call after the other. `gone` says which device is gone, and how; None where none is."""

    def __init__(self, gone: Callable[[], str | None], timeout_seconds: float) -> None:
        self._gone = gone
        self._timeout_seconds = timeout_seconds
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._stuck: Future[Any] | None = None
        """A call that has not come back; no other one is made then."""
        self._lost = False
        """True if that call had all the time it may take."""
        threading.Thread(target=self._serve, name="calls into TensorFlow", daemon=True).start()

    def __call__(self, function: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """Returns what `function` returns, or raises what it raises; ExecutionError where a device goes away meanwhile, or time is up. An
        interrupt is raised when the call has come back, or a little later: what it changes on the devices is whole then, and where it is
        not back by then, the next call waits for it first. A second interrupt does not wait."""
        allowed = self._timeout_seconds + _BEYOND_SECONDS if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + allowed
        if self._stuck is not None:
            self._await_interrupted(self._stuck, deadline, allowed)
        answer: Future[T] = Future()
        self._asked.put((function, answer))
        self._stuck, self._lost = answer, False
        try:
            self._await(answer, deadline, allowed)
        except KeyboardInterrupt:
            with suppress(ExecutionError):
                self._await(answer, min(deadline, time.monotonic() + _INTERRUPTED_SECONDS), allowed)
            raise
        except ExecutionError:
            self._lost = True
            raise
        return answer.result()

    def _await_interrupted(self, earlier: Future[Any], deadline: float, allowed: float) -> None:
        if self._lost:
            raise ExecutionError("a device did not answer, so nothing more is asked of it; start anew")
        self._lost = True
        self._await(earlier, deadline, allowed)
        self._lost = False

    def _await(self, answer: Future[Any], deadline: float, allowed: float) -> None:
        while not wait([answer], _POLL_SECONDS).done:
            gone = self._gone()
            if gone is not None and not wait([answer], _POLL_SECONDS).done:
                raise ExecutionError(gone)
            if time.monotonic() > deadline:
                raise ExecutionError(f"the devices did not answer within {allowed:g} s; check whether they still run, or raise --timeout")
        self._stuck = None

    def end(self) -> None:
        """Ends the thread, if it is not stuck."""
        self._asked.put(None)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            function, answer = asked
            try:
                answer.set_result(function())
            except BaseException as e:  # noqa: BLE001 - raised where the call was asked for
                answer.set_exception(e)
            del asked, function, answer
