"""The solver in a process of its own, seen from this side: started, listened to, and gone when the caller is done, whatever happened."""

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from baechi_ext.python_process import command_of, surroundings
from baechi_ext.stderr import nameless_file

_THREADS = 8


class SolverProcess:
    """`with SolverProcess(task) as solver`: the worker of worker.py, at work. Leaving the block kills it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.status: str | None = None
        """None while it runs; else what it ended with, or "failed"."""
        self.complaint = ""
        """Why it failed."""

    def __enter__(self) -> "SolverProcess":
        self._errors = nameless_file()
        # A session of its own: an interrupt at the terminal is for us, and we end it.
        self._process = subprocess.Popen(
            command_of("baechi_ext.place.exact.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            start_new_session=True,
            env=surroundings(),
        )
        try:
            threading.Thread(target=self._talk, daemon=True).start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._errors.close()

    def _talk(self) -> None:
        to, of = self._process.stdin, self._process.stdout
        with contextlib.suppress(OSError, ValueError):
            if to is not None and of is not None:
                to.write(json.dumps(self._task) + "\n")
                to.flush()
                for line in of:
                    self._lines.put(line)
        self._lines.put(None)

    def messages(self, wait_seconds: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yields the messages that have come since; waits so long at most for the first."""
        while self.status is None:
            try:
                line = self._lines.get(timeout=wait_seconds) if wait_seconds > 0 else self._lines.get_nowait()
            except queue.Empty:
                return
            wait_seconds = 0.0
            message = {"status": "failed"} if line is None else self._read(line)
            self.status = message.get("status")
            if self.status == "failed":
                if line is not None:
                    self._process.kill()
                self.complaint = self._last_words()
            yield message

    @staticmethod
    def _read(line: str) -> dict[str, Any]:
        """A message; a failure where a process that was killed has sent half of it."""
        try:
            found = json.loads(line)
        except ValueError:
            return {"status": "failed"}
        return found if isinstance(found, dict) else {"status": "failed"}

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {lines[-1]}" if lines else "")


def threads() -> int:
    """The number of threads that the solver may use here."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_THREADS, available)
