"""Mailboxes: how a tensor gets from one device's thread to another's. One box per (tensor, destination), filled and emptied once a step."""

import queue
from collections.abc import Callable
from typing import Any

from baechi_ext.errors import ExecutionError


class Mailboxes:
    """The boxes of one placed step. `abort` wakes every waiter with an ExecutionError; the boxes are useless after it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._boxes: dict[tuple[int, int], queue.SimpleQueue[Any]] = {}
        self._aborted = False

    def _box(self, tensor: int, target: int) -> "queue.SimpleQueue[Any]":
        return self._boxes.setdefault((tensor, target), queue.SimpleQueue())

    def giver(self, tensor: int, target: int, gone: Callable[[], None] | None = None) -> Callable[[Any], None]:
        """A function that puts a value into the box of `tensor` at device `target`, and then calls `gone`."""
        put = self._box(tensor, target).put

        def give(value: Any) -> None:
            self._go_on()
            put(value)
            if gone is not None:
                gone()

        return give

    def taker(self, tensor: int, target: int) -> Callable[[], Any]:
        """A function that waits for the box to fill and empties it. It raises ExecutionError after the time-out or an abort."""
        get, timeout = self._box(tensor, target).get, self._timeout_seconds

        def take() -> Any:
            try:
                value = get(timeout=timeout)
            except queue.Empty:
                raise ExecutionError(
                    f"device {target} gave up waiting for tensor {tensor} after {timeout:g} s; raise --timeout if ops take that long"
                ) from None
            self._go_on()
            return value

        return take

    def _go_on(self) -> None:
        if self._aborted:
            raise ExecutionError("another device failed")

    def abort(self) -> None:
        """Wakes whoever waits now or later."""
        self._aborted = True
        for box in self._boxes.values():
            box.put(None)
