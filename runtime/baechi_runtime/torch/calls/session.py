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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import networkx as nx
import torch
from torch import Tensor, fx, nn

from baechi_ext.capture.torch_dynamo import module_classes, sees_single_ops, skip_frame, skip_guarded_frame, unmark
from baechi_ext.capture.torch_fragments import CapturedCall
from baechi_ext.capture.torch_guards import guard_the_unguarded, take_raised
from baechi_ext.capture.torch_private import casts_all, inside_backward
from baechi_ext.capture.why_not import require_uncaught
from baechi_ext.errors import BaechiError, CaptureError, ExecutionError, InfeasibleError, ParityError, first_line
from baechi_ext.simulate import Timeline
from baechi_runtime.drivers.placement import Placement, is_near_least, log_device_placement
from baechi_runtime.host.generators import python_generators_kept
from baechi_runtime.host.interrupts import raise_if_asked_for
from baechi_runtime.measure.lead import Lead
from baechi_runtime.measure.parity_result import UNPLACED_RANDOMNESS
from baechi_runtime.measure.turns import PLACED, PLAIN, Turns
from baechi_runtime.report.call_report import FORWARD_ALONE, PLAIN_TURN
from baechi_runtime.report.progress import progress
from baechi_runtime.report.tables import as_time
from baechi_runtime.torch.calls.capturing import (
    CallStep,
    Given,
    Parts,
    TrainingCall,
    call_of_fragments,
    captured_call,
    limits_of,
    require_kept_activations,
    require_results_read,
)
from baechi_runtime.torch.calls.experience import Experience, Verdict
from baechi_runtime.torch.calls.fragments import LiveFragment, Made, PlacedGroup, Prepared, Settings, require_as_run
from baechi_runtime.torch.calls.placed_function import LoadedFragment, share_memory
from baechi_runtime.torch.calls.placing import KEPT, begin_search, place_alike, place_call
from baechi_runtime.torch.calls.recording import CallRecorder
from baechi_runtime.torch.calls.tracing import TraceLog
from baechi_runtime.torch.calls.verify import Verification, normalised_by_part, verified_run
from baechi_runtime.torch.calls.workers import DriftError, Workers, loaded_phases
from baechi_runtime.torch.lowering.devices import is_capturing, settle
from baechi_runtime.torch.lowering.random_state import as_it_was
from baechi_runtime.torch.measure import load_of_others
from baechi_runtime.torch.processes.channels import LostPeerError

IN_ANOTHER_ORDER = "parts of a batch are added up in another order; --microbatches=1, or microbatches=1, places it whole"
_FIRST = "the first call of its kind"
SEARCHED_FOR = "its plan was being searched for"
ASIDE = "its plan was searched for while training went on unplaced"
SINGLE_OPS = "a mode or hooks that see single ops were active"
ONE_BUFFER = "a buffer that it changes has come to share memory with another of its tensors"
"""TorchDynamo does not look at that, and a plan would write one value over the other."""
_EARLY = 16
"""Calls of a module in which what is too small is no reason to give all up: to warm up a script may take one example."""


class Session:
    """One session, as described above. `module` is the one whose calls these are, if there is one."""

    def __init__(self, settings: Settings, name: str, module: nn.Module | None = None) -> None:
        self.settings = settings
        self.name = name
        self.load = None if self._several() else load_of_others(settings.executor)  # of several processes none sees what the others use
        self.log = TraceLog()
        self.fragments: list[LiveFragment] = []
        self.groups: list[PlacedGroup] = []
        self.refusal = ""
        """Why everything runs as it is for good: placing does not pay, or can't be done. Empty while something may be placed."""
        self.ran = 0
        """Fragments that ran, placed or not."""
        self.ran_trained = 0
        """Those of them that were given something with gradients."""
        self.ran_placed = 0
        """Fragments that ran placed."""
        self.placed_calls = 0
        """Calls of the module in which a fragment ran placed."""
        self.unplaced: dict[str, int] = {}
        """Reason why calls of fragments ran as they are -> number of calls."""
        self.interrupted: Placement | None = None
        """The placement that the first search had found when it was interrupted; None once something is placed."""
        self._module = None if module is None else weakref.ref(module, lambda _: self._end())
        self._said: set[str] = set()
        self._lock = threading.RLock()
        self.calls = 0
        """Calls of the module that began."""
        self.lead = Lead(
            lambda: settle(settings.executor.devices),
            verify_steps=settings.verify_steps,
            keep_placed=settings.keep_placed,
            agree=settings.executor.agree_on_turn if isinstance(settings.executor, Workers) else None,
        )
        self._parts: Parts | None = settings.request.microbatches
        """The parts that a batch goes in, or their shares; None: not decided yet."""
        self._experience: Experience | None = None
        self._waits = 0
        """Calls that run as they are by what an earlier run had come to, before placing is tried after all; 0: none do."""
        self._waited = 0
        """Those that did."""
        self._aside: Prepared | None = None
        """The call whose plan is searched for in another process; there is one search in a session."""
        self._made: dict[int, Made] = {}
        """id of a tensor -> (weak reference to it, the waiting fragment that returned it, which output)."""

    def backend(self, graph: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Return what TorchDynamo is to run in place of a fragment's graph. Raises CaptureError for a graph that can't run as one, or what
        has TorchDynamo run that frame as it is."""
        module = self.module()
        try:
            require_kept_activations(graph)
            require_results_read(graph)
            require_uncaught(graph)
        except CaptureError as e:
            self._refuse(skip_frame, e)
        modules = [] if module is None else list(module.modules())
        guard_the_unguarded(module_classes(graph) | {type(m) for m in modules}, modules, partial(self._refuse, skip_guarded_frame))
        unmark(examples)
        live = LiveFragment(self.run, graph)
        self.fragments.append(live)
        return live

    def _refuse(self, skip: Callable[[str], NoReturn], error: CaptureError) -> NoReturn:
        """Say why a frame runs as it is. In a module's calls TorchDynamo takes errors for that; what the script compiles itself they would
        end."""
        if self._module is not None or self.settings.strict:
            raise error
        self.count_plain(str(error))
        self.say_once(f"a part of {self.name} runs as it is: {error}")
        skip(str(error))

    def module(self) -> nn.Module | None:
        return None if self._module is None else self._module()

    def why_plain(self) -> str:
        """Why nothing runs placed now; empty where it may."""
        here = os.getpid() == self.settings.executor.process
        now = "the script captures a CUDA graph" if is_capturing() else ""
        return self.refusal or (now if here else "this process was forked")

    @property
    def pays(self) -> bool:
        """True once placed calls were faster."""
        return self.lead.turns.decided == PLACED

    def why_not(self) -> str:
        """Why nothing of its calls is placed for good, as far as it is known; otherwise empty."""
        return self.why_plain() or next((f.why_not for f in self.fragments if f.why_not), "")

    def count_plain(self, why: str) -> None:
        """Count a call, or a fragment of one, that runs as it is."""
        self.unplaced[why] = count = self.unplaced.get(why, 0) + 1
        if why == self.refusal and count == self._waits:
            self.refusal, self._waits, self._waited = "", 0, count

    def look_back(self, arguments: tuple[Any, Any]) -> None:
        """Before the first training call, look at earlier runs of the module: if they showed that placing does not pay, it is not tried."""
        module = self.module()
        if module is None or self.settings.keep_placed or self._several():
            return
        self._experience = Experience(self.settings.request, self.settings.executor.devices, module, arguments)
        self.refusal, self._waits = self._experience.why_not()
        if self.refusal and not self._waits:
            self._experience = None

    def conclude(self, *, ended: bool = False) -> None:
        """Note for later runs what this one has come to, as far as it is known; when its calls have ended, why nothing could be placed."""
        searched = self._aside is not None
        if ended:
            self._stop_search()
            self.lead.leave()
        elsewhere = self.settings.executor.process not in (0, os.getpid())  # 0: it is closed, as this process ends
        if self._experience is None or self._waits or elsewhere:
            return
        turns, why = self.lead.turns, self.refusal
        if ended and not self.groups and not searched and all(f.why_not for f in self.fragments):  # else it ended before that was known
            is_early = self.calls < _EARLY and any(f.why_not == f.too_small for f in self.fragments)
            why = why or next((f.why_not for f in self.fragments if not is_early), "")
        if not why and not turns.decided and not (ended and turns.saved_us > 0):  # a few steps do not tell that it costs
            return
        plain_us, placed_us = (statistics.median(us) if us else None for us in (turns.plain_us, turns.placed_us))
        seconds = self.log.seconds + sum(g.setup_seconds for g in self.groups)
        if not self.settings.request.reads_files:  # otherwise profile and plan are kept for the next run, too
            seconds -= sum(g.planning_seconds for g in self.groups)
        self._experience.keep(Verdict(not why, why, plain_us, placed_us, seconds, self.calls + self._waited))

    def begin_call(self) -> None:
        """Begin a call of the module: what it makes is its own, and is not tied to what an earlier one made."""
        self.calls += 1
        self._made.clear()
        if self.calls == _EARLY and self.fragments and all(f.why_not for f in self.fragments):
            self.refusal = self.refusal or self.fragments[-1].why_not

    def run_plain(self, fragment: LiveFragment, args: Sequence[Any], why: str) -> Any:
        self.count_plain(why)
        return fragment.graph(*args)

    def run(self, fragment: LiveFragment, args: Sequence[Any]) -> Any:
        """Run a fragment: placed if it is; when it comes the second time, plan it first."""
        if (raised := take_raised()) is not None:
            raise_if_asked_for(raised)
        self.ran += 1
        self.ran_trained += torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if why := self._why_plain_now(fragment, args):
            return self.run_plain(fragment, args, why)
        if fragment.loaded is None:
            if not self._lock.acquire(blocking=False):
                return self.run_plain(fragment, args, "another thread was placing the call")
            try:
                if why := self.why_plain():  # another thread has said so just now
                    return self.run_plain(fragment, args, why)
                if fragment.example is None:
                    return self._first_run(fragment, args)
                if fragment.loaded is None:
                    self._place_waiting(fragment, args)
            finally:
                self._lock.release()
        group, loaded = fragment.group, fragment.loaded
        if group is None or loaded is None or self.why_plain():
            return self.run_plain(fragment, args, fragment.why_not or self.why_plain() or SEARCHED_FOR)
        return self._run_loaded(fragment, group, loaded, args)

    def _why_plain_now(self, fragment: LiveFragment, args: Sequence[Any]) -> str:
        """Why a fragment runs as it is; empty where it may be placed, or is to be noted."""
        if why := self.why_plain():
            return why
        if sees_single_ops() or inside_backward():
            return SINGLE_OPS
        if fragment.why_not or fragment.loaded is not None:
            return fragment.why_not
        if not torch.is_grad_enabled() or not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return f"no gradients are recorded: {FORWARD_ALONE}"
        return SEARCHED_FOR if fragment.example is not None and self.is_searching() else ""

    def _first_run(self, fragment: LiveFragment, args: Sequence[Tensor]) -> Any:
        """Run it as it is, and note what came in and out, so that fragments of one call can be planned together."""
        if any(isinstance(a, Tensor) and a.is_inference() for a in args):
            self.give_up(CaptureError("a call takes a tensor of torch.inference_mode(), whose changes nobody counts"), [fragment])
            return self.run_plain(fragment, args, fragment.why_not)
        fragment.order = len([f for f in self.fragments if f.example is not None]) + 1
        fragment.call = self.calls
        values = fragment.run_first(args, self._made)
        self.count_plain(_FIRST)
        return values

    def _place_waiting(self, fragment: LiveFragment, args: Sequence[Tensor]) -> None:
        """Plan the fragment together with the waiting ones that the first call tied to it."""
        group = self._tied_to(fragment)
        try:
            # Several workers must come to the same, whatever their clocks say.
            large = group if self.settings.keep_placed or self._several() else [f for f in group if not f.too_small]
            if fragment not in large:
                raise CaptureError(fragment.too_small)
            with python_generators_kept():
                self._place(large, fragment, args)
        except Exception as e:  # noqa: BLE001 - what nobody has thought of is no reason to stop a user's training
            raise_if_asked_for(e)
            if not isinstance(e, BaechiError):  # no memory, say, which a later run may have
                self._experience = None
                e = CaptureError(f"a call of {self.name} can't be placed: {type(e).__name__}: {first_line(e)}")
            self.give_up(e, group)
        finally:
            for f in group:
                if self._aside is None or f not in self._aside.members:
                    f.forget()
            self._made.clear()
            self.lead.disturb()

    def _tied_to(self, fragment: LiveFragment) -> list[LiveFragment]:
        waiting = {id(f): f for f in self.fragments if f.example is not None and f.loaded is None and not f.why_not}
        waiting = {key: f for key, f in waiting.items() if f.call == fragment.call}
        links = nx.Graph([(key, source) for key, f in waiting.items() for source, _ in f.links.values() if source in waiting])
        links.add_node(id(fragment))
        return sorted((waiting[key] for key in nx.node_connected_component(links, id(fragment))), key=lambda f: f.order)

    def _place(self, members: list[LiveFragment], current: LiveFragment, args: Sequence[Tensor]) -> None:
        begun, settings = time.monotonic(), self.settings
        found = self._aside if self._aside is not None and current in self._aside.members and not self.is_searching() else None
        if found is None:
            prepared = self._captured(members, [args if f is current else f.given() for f in members])
            if self._search_aside(prepared):
                return
        else:
            prepared, self._aside = found, None
        planning = time.monotonic()
        with as_it_was(prepared.call.step):  # profiling draws random numbers, different ones on each of several workers
            call, placement, timeline = self._planned_best(prepared.call)
        members, captured, step = prepared.members, call.captured, call.step
        if found is not None:
            notes = tuple(ASIDE if note.startswith(KEPT) else note for note in placement.result.notes)
            placement = replace(placement, result=replace(placement.result, notes=notes))
        planning = time.monotonic() - planning
        step = replace(step, live=weakref.WeakValueDictionary(step.live))  # what Dynamo keeps of a call is no reason to keep its module
        group = PlacedGroup(members, captured, placement, step.live, 0.0, planning, Turns(alone=settings.keep_placed), note=call.note)
        for k, f in enumerate(members):
            self._load(f, group, timeline, k, step)
        group.setup_seconds = time.monotonic() - begun + (0.0 if found is None else prepared.seconds)
        if settings.request.log_device_placement and all(placement is not earlier.placement for earlier in self.groups):
            log_device_placement(placement)
        self.groups.append(group)
        self.interrupted = None
        stays = settings.keep_placed or settings.request.as_graphs or placement.result.splits
        if not stays and len(settings.executor.devices) > 1:
            self._pause(placement.result.why_whole or "its plan leaves everything on one device")

    def _captured(self, members: list[LiveFragment], arguments: Sequence[Sequence[Any]]) -> Prepared:
        """Capture fragments of a call, each with its arguments. Raises CaptureError."""
        begun = time.monotonic()
        number = {id(f): k for k, f in enumerate(members)}
        given: list[Given] = []
        for f, args in zip(members, arguments, strict=True):
            given.append((f.graph, args, {i: (number[s], o) for i, (s, o) in f.links.items() if s in number}, f.autocast))
        with progress(f"capturing a training call of {self.name}"):
            call = captured_call(self.settings.request, given, self.name, self.module(), self._parts or 1)
        require_as_run(call.captured, members, arguments)
        if why := call.captured.why_whole:
            if self.settings.strict:
                raise CaptureError(f"the batch can't be split: {why}")
            self.say_once(f"the batch of {self.name} stays whole: {why}")
        return Prepared(members, call, time.monotonic() - begun)

    def _search_aside(self, prepared: Prepared) -> bool:
        """Begin to search for the session's first plan in another process, unless placing is insisted on."""
        settings, call, begun = self.settings, prepared.call, time.monotonic()
        executor = settings.executor
        if self.groups or self._aside is not None or settings.keep_placed or settings.strict or settings.planned is not None:
            return False
        if self._parts is None or isinstance(executor, Workers):
            return False
        search = begin_search(replace(settings.request, model=call.step.name), executor, call.captured, call.step)
        if search is not None:
            self._aside = replace(prepared, search=search, seconds=prepared.seconds + time.monotonic() - begun)
        return search is not None

    def is_searching(self) -> bool:
        """True while training goes on unplaced because a plan is searched for."""
        return self._aside is not None and self._aside.search is not None and self._aside.search.is_running()

    def _stop_search(self) -> None:
        if self._aside is not None and self._aside.search is not None:
            self._aside.search.stop()
        self._aside = None

    def _planned_best(self, call: TrainingCall) -> tuple[TrainingCall, Placement, Timeline]:
        """The call with its plan; the first time that this is left to a search, the same call over parts of its batch, one for each device,
        where that is predicted to be faster. Later calls go in as many parts."""
        placement, timeline = self._planned(call.captured, call.step)
        if self._parts is not None:
            return call, placement, timeline
        self._parts, cluster = 1, placement.result.plan.cluster
        if self._as_worker_0(is_near_least(placement, cluster))[0]:
            return call, placement, timeline
        speeds = [device.speed for device in cluster.devices]
        shares = len(speeds) if len(set(speeds)) == 1 else tuple(speeds)
        parted = call_of_fragments(self.settings.request, call.fragments, self.name, shares)
        if not parted.captured.parts:
            return call, placement.noting(f"the batch stays whole: {parted.captured.why_whole}"), timeline
        try:
            other, its = self._planned(parted.captured, parted.step)
        except LostPeerError:
            raise
        except (InfeasibleError, ExecutionError) as e:
            return call, placement.noting(f"the batch stays whole: {e}"), timeline
        us, other_us = placement.result.predicted_step_us, other.result.predicted_step_us
        if self._as_worker_0(other_us >= us)[0]:
            note = f"the batch stays whole; in {len(speeds)} parts it is predicted to take {as_time(other_us)}"
            return call, placement.noting(note), timeline
        self._parts = shares
        return parted, replace(other, single=placement.single).noting(f"whole the batch is predicted to take {as_time(us)}"), its

    def _planned(self, captured: CapturedCall, step: CallStep) -> tuple[Placement, Timeline]:
        planned = self.settings.planned
        for earlier in (*([] if planned is None else [planned]), *(group.placement for group in self.groups)):
            if (alike := place_alike(earlier, captured)) is not None:
                return earlier, alike
        executor = self.settings.executor
        place = executor.place if isinstance(executor, Workers) else partial(place_call, executor=executor)
        placement = place(replace(self.settings.request, model=step.name), captured=captured, step=step)
        if placement.result.interrupted:
            self.interrupted = None if self.groups else placement
            raise KeyboardInterrupt
        return placement, placement.result.timeline

    def _load(self, f: LiveFragment, group: PlacedGroup, timeline: Timeline, k: int, step: CallStep) -> None:
        executor, captured, part = self.settings.executor, group.captured, group.captured.fragments[k]
        phases = loaded_phases(executor, timeline, captured, k, step)
        records = self.settings.record and not self.groups and len(group.members) == 1
        recorder = CallRecorder(executor, phases, timeline, captured, group.live) if records else None
        relaxed = self.settings.request.relaxed_random and part.draws_on is not None
        always = 0 if relaxed else self.settings.verify_steps
        parted = bool(captured.parts)
        advice = IN_ANOTHER_ORDER if parted else UNPLACED_RANDOMNESS
        tolerance, share = limits_of([part], group.live, parted=parted)
        f.verification = Verification(always, timed=not self._several(), tolerance=tolerance, share=share, advice=advice)
        f.group = group
        failed = None if self._several() else partial(self.give_up, members=group.members)
        graph = normalised_by_part(f.graph, part.normalised)
        f.loaded = LoadedFragment(part, phases, graph, recorder=recorder, counted=f.counted, casts=casts_all(f.graph), failed=failed)

    def _run_loaded(self, fragment: LiveFragment, group: PlacedGroup, loaded: LoadedFragment, args: Sequence[Tensor]) -> Any:
        if group.begins_step(fragment, self.calls):
            self._begin_step(group)
        if group.mode == PLAIN:
            return self.run_plain(fragment, args, self.why_plain() or PLAIN_TURN)
        if loaded.part.written and share_memory(loaded.part.written, args):
            self.lead.disturb()
            return self.run_plain(fragment, args, ONE_BUFFER)
        fragment.count += 1
        self.ran_placed += 1
        if fragment.verification.is_due(fragment.count):
            self.lead.disturb()
            return verified_run(loaded, args, fragment.count, fragment.verification, partial(self._differs, members=group.members))
        if loaded.recorder is not None and loaded.recorder.is_next():
            self.lead.disturb()
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
        if self.lead.begin_step(group) == PLAIN:
            self._pause(group.turns.why_plain)

    def _several(self) -> bool:
        return isinstance(self.settings.executor, Workers)

    def _as_worker_0(self, *own: int) -> Sequence[int]:
        """Worker 0's answers, where there are several workers."""
        workers = self.settings.executor
        return workers.as_worker_0(*own) if isinstance(workers, Workers) else own

    def _pause(self, why: str) -> None:
        self.refusal = why
        self._end()
        self.conclude()
        self.say_once(f"{self.name} runs as it is: {why}")

    def give_up(self, error: BaechiError, members: Sequence[LiveFragment]) -> None:
        """Run these fragments as they are from now on, and say so once. Raises the error if `strict`, or if workers drifted or got lost."""
        self.lead.leave()
        if isinstance(error, ExecutionError):
            self._experience = None  # what happened once is nothing that later runs should go by
        for f in members:
            f.why_not, f.loaded, f.was = str(error), None, None
        whole = all(f.why_not for f in self.fragments)
        early = self.calls < _EARLY and any(f.too_small == str(error) for f in members)
        whole = whole and not early
        if whole:
            self.refusal = str(error)
        if self.settings.strict or isinstance(error, (DriftError, LostPeerError)):
            raise error
        self.say_once(f"{'' if whole else 'a part of '}{self.name} runs as it is: {error}")

    def _differs(self, error: BaechiError, members: Sequence[LiveFragment]) -> None:
        """Give up on a verified call that differs. If it failed on one of several workers, raise the error, as the others wait for it."""
        if self._several() and not isinstance(error, ParityError):
            raise error
        self.give_up(error, members)

    def drop(self) -> None:
        """Run all calls as they are from now on."""
        self.conclude(ended=True)
        self._experience = None
        self.refusal = self.refusal or "it was unplaced"
        self._end()

    def _end(self) -> None:
        self.lead.leave()
        self._stop_search()
        for f in self.fragments:
            f.end()

    def say_once(self, text: str) -> None:
        """Write a line to stderr, the first time."""
        if text not in self._said:
            self._said.add(text)
            with suppress(OSError, ValueError):
                sys.stderr.write(f"baechi: {text}\n")
