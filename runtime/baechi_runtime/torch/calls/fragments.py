"""The fragments of a module's calls, from the first time that one runs until it is placed, and how a session is to place them."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from baechi_ext.capture.torch_autocast import Autocast, autocast_now
from baechi_ext.capture.torch_fragments import CapturedCall
from baechi_ext.errors import CaptureError
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.measure.turns import PLACED, Turns
from baechi_runtime.torch.calls.capturing import TrainingCall, leaf_of, why_too_small
from baechi_runtime.torch.calls.placed_function import LoadedFragment
from baechi_runtime.torch.calls.recording import CallRecorder
from baechi_runtime.torch.calls.search_process import Search
from baechi_runtime.torch.calls.verify import Verification
from baechi_runtime.torch.calls.workers import Workers
from baechi_runtime.torch.threads.executor import ThreadExecutor

Made = tuple["weakref.ref[Tensor]", int, int]
"""A tensor that a fragment returned, the fragment's id, and the number of the output."""


@dataclass(frozen=True)
class Settings:
    """The settings for placing a module's calls."""

    request: TrainRequest
    executor: ThreadExecutor | Workers
    verify_steps: int = 2
    strict: bool = False
    """Raise an error for what cannot be placed; otherwise it runs as it is, and that is said once."""
    keep_placed: bool = False
    """Stay placed without asking whether that is faster."""
    record: bool = False
    """Record some calls; see baechi_runtime.torch.calls.recording."""
    planned: Placement | None = None
    """A plan that is made already, for calls of the same ops."""


@dataclass(eq=False)
class LiveFragment:
    """The callable that TorchDynamo's code runs in place of a fragment: `run` with it and the arguments."""

    run: Callable[["LiveFragment", Sequence[Any]], Any]
    graph: fx.GraphModule
    loaded: LoadedFragment | None = None
    was: "Ended | None" = None
    """The record of its placed calls, where it runs as it is for good."""
    group: "PlacedGroup | None" = None
    verification: Verification = field(default_factory=lambda: Verification(0))
    count: int = 0
    """Calls that ran placed."""
    why_not: str = ""
    """Why it runs as it is; empty where that is not so, or not known yet."""
    example: tuple[Any, ...] | None = None
    """The arguments of its first call, until it is planned; weak references to parameters, with the first of which all are forgotten."""
    links: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Argument -> the id of the fragment that made it, and which of its outputs it is."""
    order: int = 0
    call: int = 0
    """The call of the module in which it first ran."""
    too_small: str = ""
    """The reason that it can't gain; empty where it may."""
    counted: tuple[int, ...] = ()
    """Arguments whose changes autograd counts."""
    autocast: Autocast = ()
    """Autocast around it."""

    def __call__(self, *args: Any) -> Any:
        return self.run(self, args)

    def run_first(self, args: Sequence[Any], made: dict[int, Made]) -> Sequence[Any]:
        """Run it as it is, and note what it is given, and what of that it changes. `made`, by their ids, are the tensors that fragments of
        the call have returned, to which it adds its own."""
        self.example, self.autocast = tuple(self._noted(a) for a in args), autocast_now()
        found = ((i, a, made.get(id(a))) for i, a in enumerate(args))
        self.links = {i: source[1:] for i, a, source in found if source is not None and source[0]() is a}
        begun = time.perf_counter()
        versions = [a._version if isinstance(a, Tensor) else 0 for a in args]
        try:
            values: Sequence[Any] = self.graph(*args)
        except BaseException:
            self.forget()  # the script may go on after that: the next call is the first one
            raise
        if not torch.is_grad_enabled():
            self.why_not = "it leaves gradients switched off"
        self.too_small = why_too_small((time.perf_counter() - begun) * 1e6, values, args)
        self.counted = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor) and a._version != versions[i])
        made |= {id(v): (weakref.ref(v), id(self), i) for i, v in enumerate(values) if isinstance(v, Tensor)}
        return values

    def _noted(self, argument: Any) -> Any:
        return weakref.ref(argument, lambda _: self.forget()) if isinstance(argument, nn.Parameter) else leaf_of(argument)

    def given(self) -> tuple[Any, ...]:
        """The arguments of its first call."""
        return tuple(a() if isinstance(a, weakref.ref) else a for a in self.example or ())

    def end(self) -> None:
        """Let go of its programs and of its first call: it runs placed no more. Calls under way have their own hold of them."""
        if (loaded := self.loaded) is not None:
            self.was, self.loaded = Ended(loaded.times, loaded.placed.note, loaded.recorder), None
            if loaded.recorder is not None:
                loaded.recorder.end()
        self.forget()

    def noted(self) -> "Ended | None":
        """The record of its placed calls so far."""
        return self.was if self.loaded is None else Ended(self.loaded.times, self.loaded.placed.note, self.loaded.recorder)

    def forget(self) -> None:
        self.example, self.links = None if self.loaded is None and not self.why_not else (), {}


@dataclass(frozen=True)
class Ended:
    """The record of a fragment that was placed: times of calls, a note on its passes, and what recorded some of them."""

    times: deque[StepTimes]
    note: str
    recorder: CallRecorder | None


def require_as_run(captured: CapturedCall, members: Sequence[LiveFragment], arguments: Sequence[Sequence[Any]]) -> None:
    """Raise CaptureError where nothing captured trains, or where a fragment's first call changed an argument that its capture leaves as it
    is: a dropout that drops nothing returns its input itself, and in a trace a copy. `arguments`: those of each fragment."""
    if not any(part.trains for part in captured.fragments):
        raise CaptureError("no output of what TorchDynamo traced has a gradient, so there is nothing to train")
    for fragment, part, args in zip(members, captured.fragments, arguments, strict=True):
        known = {args[i].untyped_storage().data_ptr() for i in part.written}
        changed = (args[i] for i in fragment.counted if args[i].layout == torch.strided)
        if any(value.untyped_storage().data_ptr() not in known for value in changed):
            raise CaptureError("the step changes one of its inputs in place; copy the input first (x = x.clone())")


@dataclass(frozen=True)
class Prepared:
    """Fragments that are planned together, captured."""

    members: list[LiveFragment]
    call: TrainingCall
    seconds: float
    """Spent on capturing, and on measuring costs for a search in another process."""
    search: Search | None = None
    """The search in another process, while training goes on unplaced."""


@dataclass
class PlacedGroup:
    """Fragments that are planned together."""

    members: list[LiveFragment]
    captured: CapturedCall
    placement: Placement
    live: Mapping[str, Tensor]
    """Parameters and buffers, as long as the user's module lives."""
    setup_seconds: float
    planning_seconds: float = 0.0
    """Seconds of these that profiling and searching took."""
    turns: Turns = field(default_factory=Turns)
    mode: str = PLACED
    note: str = ""
    ran: set[int] = field(default_factory=set)
    """The ids of the fragments that ran in the step under way."""
    call: int = 0
    """The call of the module that is the step under way; 0 where no module's calls are counted."""

    def begins_step(self, fragment: LiveFragment, call: int) -> bool:
        """True if a step begins with this fragment: the first one in this call of the module, where a loop may run it several times. Where
        calls are not counted, a fragment that ran before begins the next step."""
        begins = not self.ran or (call != self.call if call else id(fragment) in self.ran)
        if begins:
            self.ran.clear()
        self.ran.add(id(fragment))
        self.call = call
        return begins

    @property
    def first(self) -> LiveFragment:
        return self.members[0]

    @property
    def calls(self) -> int:
        """Placed calls so far."""
        return max(f.count for f in self.members)
