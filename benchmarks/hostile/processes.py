"""Each run of a case in a process of its own, forked from one that has imported what they need and has trained nothing."""

import faulthandler
import multiprocessing.util
import os
import random
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from hashlib import sha256
from io import StringIO
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.hostile.suite import SUBJECTS, Case

_PRELOADED = [
    *("torch", "benchmarks.hostile.torch_private", "baechi_runtime.torch.calls.parallelize"),
    *(f"benchmarks.hostile.cases.{s}" for s in SUBJECTS),
]


@dataclass(frozen=True)
class Raised:
    """An exception that left a loop: the names of its classes, the most special first, its text, and where it came from."""

    types: tuple[str, ...]
    text: str
    trace: str


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run of a case; `ended` is "crash" or "hang" where the process did not come to its end."""

    leaves: tuple[tuple[str, Any], ...] = ()
    raised: Raised | None = None
    ended: str = ""
    detail: str = ""
    seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """The number of processes that run at a time, and the seconds that each may take."""

    jobs: int = 2
    seconds: float = 120.0


@dataclass
class _Running:
    key: tuple[str, str]
    process: Any
    pipe: Connection
    output: Path
    begin: float


def run_all(runs: Sequence[tuple[Case, str]], limits: Limits) -> Iterator[tuple[tuple[str, str], Outcome]]:
    """Yield ((case, backend), outcome) of each (case, backend) as it is done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    todo, running = list(reversed(runs)), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while todo or running:
                while todo and len(running) < limits.jobs:
                    running.append(_start(context, *todo.pop(), Path(folder, str(len(todo)))))
                yield from _collect(running, limits)
        finally:
            for one in running:
                one.process.kill()
                one.process.join()


def _start(context: Any, case: Case, backend: str, output: Path) -> _Running:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(case.name, backend, there, output), daemon=False)
    process.start()
    there.close()
    return _Running((case.name, backend), process, here, output, time.monotonic())


def _collect(running: list[_Running], limits: Limits) -> Iterator[tuple[tuple[str, str], Outcome]]:
    """Yield those that are done, or out of time, and take them off the list."""
    first = min(one.begin for one in running) + limits.seconds - time.monotonic()
    ready = wait([one.pipe for one in running], timeout=max(0.0, first))
    for one in list(running):
        late = time.monotonic() - one.begin >= limits.seconds
        if one.pipe not in ready and not late:
            continue
        running.remove(one)
        yield one.key, _outcome(one, hung=one.pipe not in ready)


def _outcome(one: _Running, hung: bool) -> Outcome:
    try:
        found = Outcome(ended="hang") if hung else one.pipe.recv()
    except EOFError:
        found = Outcome(ended="crash")
    if found.ended == "hang":
        one.process.kill()
    else:  # what holds the process up after its last word is no part of the case
        one.process.join(10.0)
        one.process.kill()
    one.process.join()
    one.pipe.close()
    if not found.ended:
        return found
    said = one.output.read_text(errors="replace") if one.output.exists() else ""
    return Outcome(ended=found.ended, detail=f"exit {one.process.exitcode}: {said[-600:]}", seconds=time.monotonic() - one.begin)


def _run(name: str, backend: str, pipe: Connection, output: Path) -> None:
    """Run a case and send its Outcome; the process then ends at once, whatever threads are left in it."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    pipe.send(observe(name, backend))
    pipe.close()
    multiprocessing.util._run_finalizers()
    os._exit(0)


def observe(name: str, backend: str) -> Outcome:
    """Run a case in this process."""
    import torch

    from benchmarks.hostile import backends, observed
    from benchmarks.hostile.suite import all_cases

    torch.set_num_threads(1)
    wrap, stats = backends.backend(backend)
    _seed()
    printed, begin, found, error = StringIO(), time.perf_counter(), None, None
    try:
        with redirect_stdout(printed):
            found = all_cases()[name].loop(wrap)
    except BaseException as e:  # noqa: BLE001 - a user's KeyboardInterrupt is as good an exception as any
        types = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in type(e).__mro__)
        error = Raised(types, str(e), "".join(traceback.format_exception(e))[-3000:])
    seconds = time.perf_counter() - begin
    everything = {"result": found, "printed": printed.getvalue(), **_left_behind()}
    return Outcome(tuple((path.lstrip("."), leaf) for path, leaf in observed.leaves(everything)), error, seconds=seconds, stats=stats())


def _seed() -> None:
    import numpy as np
    import torch

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def _left_behind() -> dict[str, Any]:
    """Return the states of the global generators, and modes that a loop may have left switched on."""
    import numpy as np
    import torch

    return {
        "random": sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy": sha256(repr(np.random.get_state()).encode()).hexdigest(),
        "torch": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
