"""Groups of worker processes that one process forks, which has imported and captured what each of them would otherwise do by itself: the
tests' side of `forking_process`."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import copyfileobj
from typing import TextIO

from tests.runtime.forked import Forked


class ForkedWorkers:
    """The process that forks, seen from the tests."""

    def __init__(self, process: Forked, asked: TextIO) -> None:
        self._process, self._asked = process, asked

    def finish(self, module: str, count: int, *arguments: str) -> tuple[list[int], str, str]:
        """The exit codes of this many workers of `tests.runtime.MODULE`, and what rank 0 printed on stdout and stderr."""
        print(json.dumps([f"tests.runtime.{module}", count, *arguments]), file=self._asked, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks ended, with {self._process.wait()}"
        return tuple(json.loads(answer))

    def run(self, module: str, count: int, *arguments: str) -> str:
        """Returns rank 0's output once all have ended well."""
        codes, out, err = self.finish(module, count, *arguments)
        assert codes == [0] * count, f"exit codes {codes}: {err}"
        return out


@contextmanager
def forked_workers() -> Iterator[ForkedWorkers]:
    """Starts the process that forks, and ends it."""
    reading, writing = os.pipe()
    process = Forked(["-m", "tests.runtime.forking_process"], os.environ, stdin=reading)
    with process.stdout, process.stderr:
        printed = threading.Thread(target=copyfileobj, args=(process.stderr, sys.__stderr__), daemon=True)
        printed.start()
        with os.fdopen(writing, "w") as asked:
            yield ForkedWorkers(process, asked)
        process.wait()
        printed.join()
