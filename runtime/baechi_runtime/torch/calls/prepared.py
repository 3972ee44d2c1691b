"""A call that is captured and waits for its plan, which may be searched for aside, while training goes on unplaced."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from baechi_ext.errors import CaptureError
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.report.progress import progress
from baechi_runtime.torch.calls.call_step import Given, TrainingCall, captured_call
from baechi_runtime.torch.calls.placing import begin_search
from baechi_runtime.torch.calls.search_process import Search, is_serializable
from baechi_runtime.torch.calls.settings import Settings
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.threads.executor import ThreadExecutor

FEWEST_OPS = 200
"""A search for fewer is over before another process has started."""


class Waiting(Protocol):
    """A fragment that is not planned yet."""

    graph: fx.GraphModule
    links: dict[int, tuple[int, int]]
    """Argument -> the id of the fragment that made it, and which of its outputs it is."""


@dataclass(frozen=True)
class Prepared:
    """Fragments that are planned together, captured."""

    members: list[Any]
    call: TrainingCall
    seconds: float
    """Spent on capturing, and on measuring costs for a search aside."""


def prepare(
    request: TrainRequest, members: Sequence[Waiting], arguments: Sequence[Sequence[Any]], name: str, module: nn.Module | None
) -> Prepared:
    """Capture fragments of a call of that name, each with its arguments; of a module, if there is one. Raises CaptureError."""
    begun = time.monotonic()
    number = {id(f): k for k, f in enumerate(members)}
    given: list[Given] = []
    for f, args in zip(members, arguments, strict=True):
        given.append((f.graph, args, {i: (number[s], o) for i, (s, o) in f.links.items() if s in number}))
    with progress(f"capturing a training call of {name}"):
        call = captured_call(request, given, name, module)
    if not any(part.trains for part in call.captured.fragments):
        raise CaptureError("no output has a gradient, so there is nothing to train")
    return Prepared(list(members), call, time.monotonic() - begun)


class SearchAside:
    """The one search that a session may have under way."""

    def __init__(self) -> None:
        self._prepared: Prepared | None = None
        self._search: Search | None = None

    def begin(self, prepared: Prepared, settings: Settings) -> bool:
        """Measure the call's costs, and have its plan searched for in another process, where a core is left for that; False where the
        search is to be done here and now."""
        begun = time.monotonic()
        executor, call = settings.executor, prepared.call
        if self._search is not None or len(call.captured.graph) < FEWEST_OPS or not _has_room(settings):
            return False
        if not isinstance(executor, ThreadExecutor):  # workers search together
            return False
        with as_it_was(call.step):
            self._search = begin_search(replace(settings.request, model=call.step.name), executor, call.captured, call.step)
        if self._search is None:
            return False
        self._prepared = replace(prepared, seconds=prepared.seconds + time.monotonic() - begun)
        return True

    def is_running(self) -> bool:
        """True while training goes on unplaced for it."""
        return self._search is not None and self._search.is_running()

    def holds(self, fragment: Waiting) -> bool:
        """True for a fragment whose plan is searched for."""
        return self._prepared is not None and fragment in self._prepared.members

    def take(self, fragment: Waiting) -> Prepared | None:
        """The call that the fragment is a part of, once its search has ended; None where there is none."""
        if not self.holds(fragment) or self.is_running():
            return None
        prepared, self._prepared, self._search = self._prepared, None, None
        return prepared

    def stop(self) -> None:
        """End the search, if there is one."""
        if self._search is not None:
            self._search.stop()
        self._prepared = self._search = None


def _has_room(settings: Settings) -> bool:
    """True if a core is left beside training, and the search can be told to another process. Who insists on placing waits for the plan."""
    request = settings.request
    if settings.keep_placed or settings.strict or request.cache is None or request.reads_files:
        return False
    if not is_serializable(request.plan):
        return False
    return request.cuda or torch.get_num_threads() < len(os.sched_getaffinity(0))
