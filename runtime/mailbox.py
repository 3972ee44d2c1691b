"""Mailboxes: how a tensor gets from one device's thread to another's. One box per (tensor, destination), filled and emptied once a step."""

import threading
from collections.abc import Callable
from typing import Any

from baechi_ext.errors import ExecutionError


class _Box:
    """Holds one value. A bare lock is the cheapest thing a thread can sleep on: it is open exactly while the box is full."""

    __slots__ = ("full", "value")

    def __init__(self) -> None:
        self.full = threading.Lock()
        self.full.acquire()
        self.value: Any = None


class Mailboxes:
    """The boxes of one placed step. `abort` wakes every waiter with an ExecutionError; the boxes are useless after it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._boxes: dict[tuple[int, int], _Box] = {}
        self._aborted = False

    def _box(self, tensor: int, target: int) -> _Box:
        return self._boxes.setdefault((tensor, target), _Box())

    def giver(self, tensor: int, target: int) -> Callable[[Any], None]:
        """A function that puts a value into the box of `tensor` at device `target`."""
        box = self._box(tensor, target)
        release = box.full.release

        def give(value: Any) -> None:
            box.value = value
            try:
                release()
            except RuntimeError:
                if self._aborted:  # which opened the box
                    raise ExecutionError("another device failed") from None
                raise

        return give

    def taker(self, tensor: int, target: int) -> Callable[[], Any]:
        """A function that waits for the box to fill and empties it. It raises ExecutionError after the time-out or an abort."""
        box = self._box(tensor, target)
        acquire, timeout = box.full.acquire, self._timeout_seconds

        def take() -> Any:
            if not acquire(timeout=timeout):
                raise ExecutionError(
                    f"device {target} waited {timeout:g} s in vain for tensor {tensor}; raise --timeout if ops take that long"
                )
            if self._aborted:
                raise ExecutionError("another device failed")
            value, box.value = box.value, None
            return value

        return take

    def abort(self) -> None:
        """Wakes whoever waits now or later."""
        self._aborted = True
        for box in self._boxes.values():
            if box.full.locked():
                try:
                    box.full.release()
                except RuntimeError:
                    continue  # its giver was quicker
