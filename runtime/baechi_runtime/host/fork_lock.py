"""A lock that is free in a fork of the process: what held it there may be a thread, which does not live on in the fork."""

import os
import threading
import weakref


class ForkLock:
    """For `with`, as threading.Lock is."""

    def __init__(self) -> None:
        self._lock = self._held = threading.Lock()
        renew = weakref.WeakMethod(self._renew)
        os.register_at_fork(after_in_child=lambda: (known := renew()) and known())

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held = lock

    def __exit__(self, *_: object) -> None:
        self._held.release()  # in a fork that was made meanwhile, too, it is the one that was taken
