"""The placing of one module's calls, or of all that one torch.compile is given: what is traced, planned, verified and kept.

TorchDynamo cuts a call into fragments. The first time a fragment runs as the user wrote it, and what it is given and returns is noted.
When one comes the second time, all those that are waiting are planned together. Then placed and plain steps take turns, and the faster
is kept.
"""

import os
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from baechi_ext.capture.torch_dynamo import module_classes, sees_single_ops
from baechi_ext.capture.torch_fragments import CapturedCall
from baechi_ext.capture.torch_guards import guard_the_unguarded
from baechi_ext.capture.torch_private import inside_backward
from baechi_ext.errors import BaechiError, CaptureError, ExecutionError, ParityError
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.host.generators import python_generators_kept
from baechi_runtime.torch.calls.call_step import leaf_of, tolerance_of, version_of
from baechi_runtime.torch.calls.dynamo_graph import recomputes
from baechi_runtime.torch.calls.experience import Experience, Verdict
from baechi_runtime.torch.calls.phases import CallStep, PhasedFragment
from baechi_runtime.torch.calls.placed_function import LoadedFragment
from baechi_runtime.torch.calls.placing import KEPT, place_alike, place_call
from baechi_runtime.torch.calls.prepared import SearchAside, prepare
from baechi_runtime.torch.calls.recording import CallRecorder
from baechi_runtime.torch.calls.settings import Settings
from baechi_runtime.torch.calls.too_small import why_too_small
from baechi_runtime.torch.calls.tracing import TraceLog
from baechi_runtime.torch.calls.turns import PLACED, PLAIN, Turns
from baechi_runtime.torch.calls.verify import Verification, verified_run
from baechi_runtime.torch.calls.workers import DriftError, Workers
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.processes.channels import LostPeerError

_FIRST = "the first call of its kind"
SEARCHED_FOR = "its plan was being searched for"
ASIDE = "its plan was searched for while training went on unplaced"
_SINGLE_OPS = "a mode or hooks that see single ops were active"
_TURN_SECONDS = 30.0
"""A session that has taken no turn for so long leaves them to others."""
_in_turns: "list[Session]" = []
"""The session whose steps are timed: one at a time in a process, as each would be part of the other's steps."""


@dataclass
class PlacedGroup:
    """Fragments that are planned together."""

    members: "list[LiveFragment]"
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
    ran: "set[int]" = field(default_factory=set)
    """The ids of the fragments that ran in the step under way."""

    @property
    def lead(self) -> "LiveFragment":
        return self.members[0]

    @property
    def calls(self) -> int:
        """Placed calls so far."""
        return max(f.count for f in self.members)


class Session:
    """One session, as described above. `module` is the one whose calls these are, if there is one."""

    def __init__(self, settings: Settings, name: str, module: nn.Module | None = None) -> None:
        self.settings = settings
        self.name = name
        self.log = TraceLog()
        self.fragments: list[LiveFragment] = []
        self.groups: list[PlacedGroup] = []
        self.refusal = ""
        """Why everything runs as it is for good; empty while something may be placed."""
        self.paused = ""
        """Why everything runs as it is until steps change: placing does not pay."""
        self.ran = 0
        """Fragments that ran, placed or not."""
        self.ran_placed = 0
        """Fragments that ran placed."""
        self.placed_calls = 0
        """Calls of the module in which a fragment ran placed."""
        self.unplaced: dict[str, int] = {}
        """Reason why calls of fragments ran as they are -> number of calls."""
        self.interrupted: Placement | None = None
        """The placement that the first search had found when it was interrupted; None once something is placed."""
        self._module = None if module is None else weakref.ref(module)
        self._said: set[str] = set()
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._calls = 0
        self.last_turn = 0.0
        """When it last took a turn, or asked for one."""
        self._experience: Experience | None = None
        self._aside = SearchAside()
        self._made: dict[int, tuple[Any, int, int]] = {}
        """id of a tensor -> (weak reference to it, the waiting fragment that returned it, which output)."""

    def backend(self, graph: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Return what TorchDynamo is to run in place of a fragment's graph. Raises CaptureError if the graph recomputes activations."""
        module = self.module()
        if why := recomputes(graph):
            raise CaptureError(why)
        modules = [] if module is None else list(module.modules())
        guard_the_unguarded(module_classes(graph) | {type(m) for m in modules}, modules)
        live = LiveFragment(self, graph)
        self.fragments.append(live)
        return live

    def module(self) -> nn.Module | None:
        return None if self._module is None else self._module()

    def may_place(self) -> bool:
        """True if a training call that begins now may run placed."""
        return not self.refusal and not self.paused and os.getpid() == self._process  # threads do not live on in a fork

    def why_plain(self) -> str:
        """Why nothing runs placed now."""
        return self.refusal or self.paused or "this process was forked"

    def count_plain(self, why: str) -> None:
        """Count a call, or a fragment of one, that runs as it is."""
        self.unplaced[why] = self.unplaced.get(why, 0) + 1

    def look_back(self, arguments: tuple[Any, Any]) -> None:
        """Before the first training call, look at earlier runs of the module: if they showed that placing does not pay, it is not tried."""
        module = self.module()
        if module is None or self.settings.keep_placed or self._several():
            return
        self._experience = Experience(self.settings.request, self.settings.executor.devices, module, arguments)
        if why := self._experience.why_not():
            self.refusal, self._experience = why, None

    def conclude(self, *, ended: bool = False) -> None:
        """Note for later runs what this one has come to, as far as it is known; when the script has ended, that nothing could be placed."""
        if ended:
            self._aside.stop()
        if ended and self in _in_turns:
            _in_turns.clear()
        if self._experience is None:
            return
        turns = self.groups[0].turns if self.groups else Turns()
        why = self.refusal or self.paused
        if ended and not why and not self.groups and self._calls > 1:
            why = next((f.why_not for f in self.fragments if f.why_not), "no fragment of its calls could be placed")
        if not why and not turns.decided and not (ended and turns.placed_us and turns.plain_us):
            return
        plain_us, placed_us = (statistics.median(us) if us else None for us in (turns.plain_us, turns.placed_us))
        seconds = self.log.seconds + sum(g.setup_seconds for g in self.groups)
        if not self.settings.request.reads_files:  # otherwise profile and plan are kept for the next run, too
            seconds -= sum(g.planning_seconds for g in self.groups)
        self._experience.keep(Verdict(not why, why, plain_us, placed_us, seconds, self._calls))

    def begin_call(self) -> None:
        """Begin a call of the module: what it makes is its own, and is not tied to what an earlier one made."""
        self._calls += 1
        if self._made:
            self._made.clear()

    def run_plain(self, fragment: "LiveFragment", args: Sequence[Any], why: str) -> Any:
        self.count_plain(why)
        return fragment.graph(*args)

    def run_waiting(self, fragment: "LiveFragment", args: Sequence[Any]) -> Any:
        """Run a fragment that is not placed; when it comes the second time, plan it first."""
        if not self.may_place() or sees_single_ops() or inside_backward():
            return self.run_plain(fragment, args, _SINGLE_OPS if self.may_place() else self.why_plain())
        if fragment.why_not:
            return self.run_plain(fragment, args, fragment.why_not)
        if not fragment.trains(args):
            return self.run_plain(fragment, args, "no gradients are recorded: a forward pass alone is not placed")
        if fragment.example is not None and self._aside.is_running():
            return self.run_plain(fragment, args, SEARCHED_FOR)
        if not self._lock.acquire(blocking=False):  # another thread is planning
            return self.run_plain(fragment, args, "another thread was placing the call")
        try:
            if fragment.example is None:
                return self._first_run(fragment, args)
            if fragment.loaded is None:
                self._place_waiting(fragment, args)
        finally:
            self._lock.release()
        if fragment.loaded is None:
            return self.run_plain(fragment, args, fragment.why_not or SEARCHED_FOR)
        return self.run_placed(fragment, args)

    def _first_run(self, fragment: "LiveFragment", args: Sequence[Tensor]) -> Any:
        """Run it as it is, and note what came in and out, so that fragments of one call can be planned together."""
        fragment.example = tuple(leaf_of(a) for a in args)
        fragment.order = len([f for f in self.fragments if f.example is not None])
        fragment.call = self._calls
        fragment.links = {i: (*self._made[id(a)][1:],) for i, a in enumerate(args) if self._is_known(a)}
        begun = time.perf_counter()
        versions = [version_of(a) for a in args]
        values = fragment.graph(*args)
        if not torch.is_grad_enabled():
            fragment.why_not = "it leaves gradients switched off"
        fragment.too_small = why_too_small((time.perf_counter() - begun) * 1e6, values)
        fragment.counted = tuple(i for i, (a, v) in enumerate(zip(args, versions, strict=True)) if version_of(a) != v)
        self._made |= {id(v): (weakref.ref(v), id(fragment), i) for i, v in enumerate(values) if isinstance(v, Tensor)}
        self.count_plain(_FIRST)
        return values

    def _is_known(self, value: Any) -> bool:
        return id(value) in self._made and self._made[id(value)][0]() is value

    def _place_waiting(self, fragment: "LiveFragment", args: Sequence[Tensor]) -> None:
        """Plan the fragment together with the waiting ones that the first call tied to it."""
        group = self._tied_to(fragment)
        try:
            # Several workers must come to the same, whatever their clocks say.
            large = group if self.settings.keep_placed or self._several() else [f for f in group if not f.too_small]
            if fragment not in large:
                raise CaptureError(fragment.too_small)
            with python_generators_kept():
                self._place(large, fragment, args)
        except BaechiError as e:
            self.give_up(e, group)
        except Exception as e:  # noqa: BLE001 - what nobody has thought of is no reason to stop a user's training
            reason = (str(e).splitlines() or [""])[0]
            self.give_up(CaptureError(f"a call of {self.name} can't be placed: {type(e).__name__}: {reason}"), group)
        finally:
            for f in group:
                if not self._aside.holds(f):
                    f.forget()
            self._made.clear()
            self._disturbed()

    def _disturbed(self) -> None:
        """Discard this step's time, and that of the session whose steps are timed: something else was done in it."""
        for session in {self, *_in_turns}:
            for group in session.groups[:1]:
                group.turns.disturbed()

    def _tied_to(self, fragment: "LiveFragment") -> "list[LiveFragment]":
        waiting = [f for f in self.fragments if f.example is not None and f.loaded is None and not f.why_not and f.call == fragment.call]
        by_id = {id(f): f for f in waiting}
        tied = {id(fragment)}
        while True:
            more = {id(f) for f in waiting if id(f) not in tied and any(s in tied for s, _ in f.links.values())}
            more |= {s for f in waiting if id(f) in tied for s, _ in f.links.values() if s in by_id} - tied
            if not more:
                return sorted((by_id[i] for i in tied), key=lambda f: f.order)
            tied |= more

    def _place(self, members: "list[LiveFragment]", current: "LiveFragment", args: Sequence[Tensor]) -> None:
        begun, settings = time.monotonic(), self.settings
        prepared = self._aside.take(current)
        aside = prepared is not None
        if prepared is None:
            given = [args if f is current else f.example or () for f in members]
            prepared = prepare(settings.request, members, given, self.name, self.module())
            if not self.groups and self._aside.begin(prepared, settings):
                return
        members, captured, step = prepared.members, prepared.call.captured, prepared.call.step
        planning = time.monotonic()
        with as_it_was(step):  # profiling draws random numbers, different ones on each of several workers
            placement, timeline = self._planned(captured, step)
        if aside:
            notes = tuple(ASIDE if note.startswith(KEPT) else note for note in placement.result.notes)
            placement = replace(placement, result=replace(placement.result, notes=notes))
        planning = time.monotonic() - planning
        step = replace(step, live=weakref.WeakValueDictionary(step.live))  # what Dynamo keeps of a call is no reason to keep its module
        group = PlacedGroup(members, captured, placement, step.live, 0.0, planning, note=prepared.call.note)
        for k, f in enumerate(members):
            self._load(f, group, timeline, k, step)
        group.setup_seconds = time.monotonic() - begun + (prepared.seconds if aside else 0.0)
        self.groups.append(group)
        self.interrupted = None
        if not settings.keep_placed and not placement.result.splits and len(settings.executor.devices) > 1:
            self._pause(placement.result.why_whole or "its plan leaves everything on one device")

    def _planned(self, captured: CapturedCall, step: CallStep) -> tuple[Placement, Timeline]:
        for earlier in self.groups:
            alike = place_alike(earlier.placement, captured)
            if alike is not None:
                return earlier.placement, alike
        executor = self.settings.executor
        place = executor.place if isinstance(executor, Workers) else partial(place_call, executor=executor)
        placement = place(replace(self.settings.request, model=step.name), captured=captured, step=step)
        if placement.result.interrupted:
            self.interrupted = None if self.groups else placement
            raise KeyboardInterrupt
        return placement, placement.result.timeline

    def _load(self, f: "LiveFragment", group: PlacedGroup, timeline: Timeline, k: int, step: CallStep) -> None:
        executor, captured = self.settings.executor, group.captured
        load = executor.load if isinstance(executor, Workers) else partial(PhasedFragment, executor)
        phases = load(timeline, captured, k, step)
        part = captured.fragments[k]
        records = self.settings.record and not self.groups and len(group.members) == 1
        recorder = CallRecorder(executor, phases, timeline, captured, group.live) if records else None
        relaxed = self.settings.request.relaxed_random and part.seeded
        f.tolerance = tolerance_of(part.dtypes, group.live)
        f.verification = Verification(0 if relaxed else self.settings.verify_steps, timed=not self._several())
        f.group = group
        failed = None if self._several() else partial(self.give_up, members=group.members)
        f.loaded = LoadedFragment(part, phases, f.graph, recorder=recorder, failed=failed, counted=f.counted)

    def run_placed(self, fragment: "LiveFragment", args: Sequence[Tensor]) -> Any:
        group, loaded = fragment.group, fragment.loaded
        if not self.may_place() or sees_single_ops() or inside_backward():
            return self.run_plain(fragment, args, _SINGLE_OPS if self.may_place() else self.why_plain())
        if group is None or loaded is None:
            raise ExecutionError(f"a fragment of {self.name} was to run placed before it was loaded")
        if not group.ran or id(fragment) in group.ran:
            group.ran.clear()
            self._begin_step(group)
        group.ran.add(id(fragment))
        if group.mode == PLAIN:
            return self.run_plain(fragment, args, self.why_plain() if self.paused else "it was the plain one's turn")
        fragment.count += 1
        self.ran_placed += 1
        if fragment.verification.is_due(fragment.count):
            self._disturbed()
            differs = partial(self._differs, members=group.members)
            return verified_run(loaded, args, fragment.count, fragment.verification, fragment.tolerance, differs)
        if loaded.recorder is not None and loaded.recorder.is_next():
            self._disturbed()
        try:
            return loaded.run(args)
        except BaechiError as e:
            if self._several():  # the others wait for this worker's share
                raise
            # Nothing of it is to be seen: buffers are written when no device has failed, and generators are put back.
            values = fragment.graph(*args)  # what the user's own code raises here, it would have raised in any case
            self.give_up(e, group.members)
            return values

    def _begin_step(self, group: PlacedGroup) -> None:
        """Choose what runs the step that begins: the first group takes turns, all others go along with it."""
        first = self.groups[0]
        if self.settings.keep_placed:
            group.mode = PLACED
        elif group is not first:
            group.mode = first.mode
        elif group.calls >= self.settings.verify_steps:
            group.mode = self._turn(group)

    def _turn(self, group: PlacedGroup) -> str:
        turns = group.turns
        if turns.decided:
            mode = turns.begin()
            if not self._several() and turns.changed():
                group.turns = turns.again()
            return mode
        if _in_turns and time.monotonic() - _in_turns[0].last_turn > _TURN_SECONDS:
            _in_turns.clear()  # whose steps these were is no longer called
        if not _in_turns:
            _in_turns.append(self)
        self.last_turn = time.monotonic()
        if _in_turns[0] is not self and not self._several():
            turns.disturbed()
            return PLAIN
        mode = self._agree(turns, turns.begin())
        if turns.decided:
            _in_turns.clear()
            self._decided(turns)
        return mode

    def _several(self) -> bool:
        return isinstance(self.settings.executor, Workers)

    def _agree(self, turns: Turns, mode: str) -> str:
        """Take over worker 0's mode, where there are several, and note in `turns` if it is decided."""
        workers = self.settings.executor
        if not isinstance(workers, Workers):
            return mode
        own = torch.tensor([mode == PLACED, bool(turns.decided)], dtype=torch.int64)
        placed, decided = workers.share([own], [own], 0)[0].tolist()
        mode = PLACED if placed else PLAIN
        turns.decided = mode if decided else ""
        return mode

    def _decided(self, turns: Turns) -> None:
        if turns.decided == PLACED:
            self.conclude()
        else:
            self._pause(f"plain steps are faster: {_ms(turns.plain_us)} against {_ms(turns.placed_us)} placed; --keep_placed stays placed")

    def _pause(self, why: str) -> None:
        self.paused = why
        self.conclude()
        self.say_once(f"{self.name} runs as it is: {why}")

    def plain_step(self) -> None:
        """Begin a call while placing does not pay: if steps have changed since that was decided, the question is asked again."""
        if self.groups and self.groups[0].turns.decided and not self._several():
            turns = self.groups[0].turns
            turns.begin()
            if turns.changed():
                self.groups[0].turns, self.paused = turns.again(), ""

    def give_up(self, error: BaechiError, members: "Sequence[LiveFragment]") -> None:
        """Run these fragments as they are from now on, and say so once. Raises the error if `strict`, or if workers drifted or got lost."""
        if self in _in_turns:
            _in_turns.clear()
        for f in members:
            f.why_not, f.loaded = str(error), None
        if all(f.why_not for f in self.fragments):
            self.refusal = str(error)
        if self.settings.strict or isinstance(error, (DriftError, LostPeerError)):
            raise error
        self.say_once(f"{self.name} runs as it is: {error}")

    def _differs(self, error: BaechiError, members: "Sequence[LiveFragment]") -> None:
        """Give up on a verified call that differs. If it failed on one of several workers, raise the error, as the others wait for it."""
        if self._several() and not isinstance(error, ParityError):
            raise error
        self.give_up(error, members)

    def drop(self) -> None:
        """Run all calls as they are from now on."""
        self._aside.stop()
        self.refusal = self.refusal or "it was unplaced"

    def say_once(self, text: str) -> None:
        """Write a line to stderr, the first time."""
        if text not in self._said:
            self._said.add(text)
            with suppress(OSError, ValueError):
                sys.stderr.write(f"baechi: {text}\n")
                sys.stderr.flush()


class LiveFragment:
    """The callable that TorchDynamo's code runs in place of a fragment."""

    def __init__(self, session: Session, graph: fx.GraphModule) -> None:
        self.session = session
        self.graph = graph
        self.loaded: LoadedFragment | None = None
        self.group: PlacedGroup | None = None
        self.verification = Verification(0)
        self.tolerance = 0.0
        self.count = 0
        """Calls that ran placed."""
        self.why_not = ""
        """Why it runs as it is; empty where that is not so, or not known yet."""
        self.example: tuple[Any, ...] | None = None
        """The arguments of its first call, until it is planned."""
        self.links: dict[int, tuple[int, int]] = {}
        self.order = 0
        self.call = 0
        """The call of the module in which it first ran."""
        self.too_small = ""
        """The reason that it can't gain; empty where it may."""
        self.counted: tuple[int, ...] = ()
        """Arguments whose changes autograd counts."""

    def __call__(self, *args: Any) -> Any:
        self.session.ran += 1
        if self.loaded is None:
            return self.session.run_waiting(self, args)
        return self.session.run_placed(self, args)

    def trains(self, args: Sequence[Any]) -> bool:
        return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)

    def forget(self) -> None:
        self.example, self.links = None if self.loaded is None and not self.why_not else (), {}


def _ms(us: Sequence[float]) -> str:
    return f"{statistics.median(us) / 1000:.1f} ms" if us else "nothing measured"

