"""The process executor: one process per device, each with memory of its own, running the same static programs as the threads do.

Rank 0 drives: it captures, profiles, places, measures, and is device 0. The others capture the same step and follow its commands.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import BaechiError, ExecutionError, FileError, first_line
from baechi_ext.ir import OpGraph
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.files.checkpoint_folder import Shard
from baechi_runtime.host.malloc import keep_freed_memory, map_large_blocks
from baechi_runtime.measure.device_speeds import Pace
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe
from baechi_runtime.measure.recording import DeviceMemory, DeviceNotes, Recording, recorded_run
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.devices import TorchDevice, memory_bytes
from baechi_runtime.torch.lowering.link_player import play_pace
from baechi_runtime.torch.lowering.random_state import state_as_text, take_up_state
from baechi_runtime.torch.processes.channels import LostPeerError, in_order_of_ends
from baechi_runtime.torch.processes.clocks import clock_ahead, clocks_ahead, tell_clock
from baechi_runtime.torch.processes.probe import play, probed
from baechi_runtime.torch.processes.rank_part import GRADIENT, RankPart
from baechi_runtime.torch.processes.sent_timeline import timeline_from_json, timeline_to_json
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from baechi_runtime.torch.streams.executor import executor_of
from baechi_runtime.torch.threads.executor import PlacedStep, ThreadExecutor, run_until
from baechi_runtime.torch.threads.step_recorder import clock_of

T = TypeVar("T")
_LONGER_SECONDS = 10.0


class ProcessStep:
    """One plan on all ranks; rank 0's handle."""

    def __init__(self, executor: "ProcessExecutor", part: RankPart, number: int) -> None:
        self._executor = executor
        self.number = number
        self._part = part
        self.step = part.step
        seeded = part.binding.seeded_ops
        self._seeded_rank = part.timeline.placement[seeded[0]] if seeded else 0

    def run(self) -> tuple[torch.Tensor, StepTimes]:
        """See PlacedStep.run and RankPart.run.

        Where seeded ops run on another rank, the random state goes there and comes back, so that all steps draw from one sequence.
        """
        device = self._executor.devices[0].torch_device
        state = state_as_text(device) if self._seeded_rank else None
        begin = time.perf_counter_ns()
        (loss, busy_us), others = self._together(self._part.run, do="run", random_state=state, seeded_rank=self._seeded_rank)
        wall_us = (time.perf_counter_ns() - begin) / 1000
        if self._seeded_rank:
            take_up_state(device, others[self._seeded_rank - 1]["random_state"])
        if loss is None:
            value, dtype = next(a["loss"] for a in others if a["loss"] is not None)
            loss = torch.tensor(value, dtype=getattr(torch, dtype))
        return loss, StepTimes(wall_us, (busy_us, *(a["busy_us"] for a in others)))

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """See PlacedStep.gather; each tensor comes from the rank it lives on."""
        found, _ = self._together(self._part.gathered, do="gather")
        gradients = {name.removeprefix(GRADIENT): value for name, value in found.items() if name.startswith(GRADIENT)}
        return gradients, {name: found.get(name, value) for name, value in self.step.state().items()}

    @property
    def random_device(self) -> TorchDevice:
        """See PlacedStep: between steps the random state is here."""
        return self._executor.devices[0]

    def save(self, folder: Path) -> list[Shard]:
        """See PlacedStep; every rank writes its own shard."""
        try:
            own, others = self._together(partial(self._part.save, folder), do="save", folder=str(folder))
        except FileError:
            self._executor.group.settle()  # the folder is going to be removed
            raise
        return [own, *(Shard(**shard) for shard in others)]

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """See PlacedStep; every rank reads what belongs to it."""
        own = partial(self._part.restore, checkpoint, shards)
        self._together(own, do="restore", folder=str(checkpoint), shards=[asdict(s) for s in shards])

    def record(self) -> Recording:
        devices = self._executor.devices
        self._stage("begin")
        ahead, notes = clocks_ahead(devices, self._executor.clock_ahead)
        if not self._part.on_host:
            notes.append("transfers over NCCL are not recorded")

        def by_one_clock(noted: Sequence[dict[str, Any]]) -> list[DeviceNotes]:
            return [DeviceNotes(**n).shifted(-ns) for n, ns in zip(noted, ahead, strict=True)]

        run = recorded_run(partial(self._stage, "clear"), partial(self._stage, "run"), by_one_clock)
        held = [DeviceMemory(**found) for found in self._stage("end")]
        return Recording(*run, held, clock_of(devices[0]).name, tuple(notes))

    def _stage(self, stage: str) -> list[dict[str, Any]]:
        """Run a stage of recording on all ranks; returns their answers."""
        own, others = self._together(partial(self._part.recording, stage), do="record", stage=stage)
        return [own, *others]

    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of every device during one step; see baechi_runtime.torch.threads.accounting."""
        own, others = self._together(self._part.account, do="account")
        return own, *others

    def _together(self, own: Callable[[], T], **command: Any) -> tuple[T, list[Any]]:
        """Do something with the step on all ranks: what it gives here, and on the others."""
        return self._executor.together(partial(self._executor.call, 0, own), **command, step=self.number)


class ProcessExecutor:
    """Rank 0's view of all workers; ThreadExecutor's interface but for what takes one process. Leaving it ends the other ranks' work."""

    shared_memory = False

    def __init__(self, group: WorkerGroup, devices: Sequence[TorchDevice]) -> None:
        self.group = group
        self.devices = tuple(devices)
        self.timeout_seconds = group.timeout_seconds
        self._loaded = self._rounds = 0
        self._live: WeakSet[ProcessStep] = WeakSet()
        """The steps that are loaded and not dropped."""
        # It outwaits the waits for other ranks inside it, whose errors say more.
        if group.lines is None:
            map_large_blocks()  # see follow
        self._local = executor_of(self.devices[:1], group.timeout_seconds + _LONGER_SECONDS)

    def __enter__(self) -> "ProcessExecutor":
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        with contextlib.suppress(*[ExecutionError] if kind else []):  # the first error says more
            self.group.command({"do": "stop"})
            if kind is None:  # rank 0 may have the store, which must not go before the others have read that
                self.group.settle()
        self._local.close()

    def call(self, device: int, function: Callable[[], T]) -> T:
        """Runs a function on device 0, which is this process."""
        if device != 0:
            raise ExecutionError(f"device {device} is another process; only device 0 runs functions of this one")
        return self._local.call(0, function)

    def together(self, own: Callable[[], T], **command: Any) -> tuple[T, list[Any]]:
        """Do something in this thread while the others obey a command: what it gives here, and on the others. Raises ExecutionError, the
        first one's where several fail."""
        self.group.command(command)
        try:
            found = own()
        except LostPeerError as e:
            raise self.group.first_failure() or e from e
        except RuntimeError as e:  # of torch.distributed, whose peer is gone
            raise self.group.first_failure() or ExecutionError(first_line(e)) from e
        return found, [answer["value"] for answer in self.group.answers()]

    def memory_bytes(self) -> list[int]:
        """Bytes that each device may hold, as each worker finds them on its own machine."""
        own, others = self.together(lambda: memory_bytes(self.devices[0], self.group.local_size), do="memory")
        return [own, *others]

    def clock_ahead(self, rank: int) -> tuple[int, int]:
        """Nanoseconds by which a rank's clock is ahead of this one's, and by which that may be wrong."""
        return self.together(partial(clock_ahead, self.group, rank), do="clock", rank=rank)[0]

    def cpu_seconds(self) -> float:
        """CPU time that all workers have used."""
        own, others = self.together(self._local.cpu_seconds, do="time")
        return own + float(sum(others))

    @contextlib.contextmanager
    def keep_busy(self, companions: int, timeline: Timeline, binding: Binding, step: TrainingStep) -> Iterator[None]:
        """See ThreadExecutor. Each rank has a step of its own and builds the one-device timeline of what it captured itself."""
        self._rounds += 1
        enough = f"enough {self._rounds}"
        self.group.command({"do": "keep_busy", "companions": companions, "until": enough, "parts": sizes_of(binding)})
        try:
            for rank in range(1, companions + 1):
                self.group.hear_from(rank, _begun(enough, rank))
            yield
        finally:
            self.group.store.set(enough, "")
        self.group.answers()

    def probe_link(self, source: int = 0, target: int = 1, sizes: Sequence[int] = PROBE_BYTES) -> LinkProbe:
        """The link between two ranks."""
        command = {"first": source, "second": target, "sizes": list(sizes)}
        own: Callable[[], dict[str, list[Any]] | None] = partial(play, self.group, self.devices[0], command)
        if self.devices[0].torch_device.type == "cuda":  # a wait for it has no time-out of its own; that of a call has
            own = partial(self.call, 0, own)
        part, others = self.together(own, do="probe", **command)
        found = probed([part, *others], source, target, sizes)
        return found if self.group.lines is None else replace(found, copies=1)  # into shared memory, where it is read

    def paces(self, windows: int, window_seconds: float) -> list[Pace]:
        """See ThreadExecutor."""
        own = partial(play_pace, self.devices[0], windows, window_seconds)
        first, others = self.together(partial(self.call, 0, own), do="pace", windows=windows, window_seconds=window_seconds)
        return [first, *(Pace(tuple(found["wall_us"]), tuple(found["clock_us"])) for found in others)]

    def load(self, timeline: Timeline, binding: Binding, step: TrainingStep, *, keep_gradients: bool = False) -> ProcessStep | PlacedStep:
        """See ThreadExecutor.load. A timeline of one device is this process's alone; otherwise every rank loads its part."""
        if len(timeline.cluster) == 1:
            return self._local.load(timeline, binding, step, keep_gradients=keep_gradients)
        self._loaded += 1
        command = {
            "step": self._loaded,
            "live": [placed.number for placed in self._live],
            "timeline": timeline_to_json(timeline),
            "ended": None if self.group.tagged else in_order_of_ends(timeline),
            "parts": sizes_of(binding),
            "keep_gradients": keep_gradients,
        }
        own = partial(RankPart, self.group, self.devices[0], timeline, binding, step, keep_gradients=keep_gradients)
        part, _ = self.together(own, do="load", **command)
        placed = ProcessStep(self, part, self._loaded)
        self._live.add(placed)
        return placed


Executor = ThreadExecutor | ProcessExecutor
"""Devices that run placed steps. Device 0 also runs functions: profiling, and the unplaced step."""
LoadedStep = PlacedStep | ProcessStep
"""One plan, loaded; `run` does one training step."""


def sizes_of(binding: Binding) -> list[int] | None:
    """The sizes of the parts of a batch that a step was captured over; None: it was captured as a whole."""
    return None if binding.parts is None else list(binding.parts.sizes)


@dataclass(frozen=True, slots=True)
class RankCapture:
    """The graph, binding and step of a rank other than 0, by its own capture."""

    graph: OpGraph
    binding: Binding
    make_step: Callable[[], TrainingStep]
    in_parts: Callable[[Sequence[int]], tuple[OpGraph, Binding]] | None = None
    """Captures the step over parts of its batch of these sizes; None where rank 0 never does."""

    def of(self, sizes: Sequence[int] | None) -> "RankCapture":
        """The capture over parts of these sizes; None: of the whole batch."""
        if sizes is None:
            return self
        if self.in_parts is None:
            raise ExecutionError("told to run parts of a batch, and the step has none; are all workers of one version?")
        graph, binding = self.in_parts(tuple(sizes))
        return replace(self, graph=graph, binding=binding)


Further = Mapping[str, Callable[..., object]]
"""Commands beyond those of placed steps, and what obeys them; its value stays there."""


def follow(group: WorkerGroup, device: TorchDevice, captured: RankCapture | None = None, further: Further = MappingProxyType({})) -> None:
    """Ranks other than 0: obey until told to stop; links can be probed without a captured step. An error is answered, then raised: a group
    with a failed rank is over."""
    keep_freed_memory()
    if group.lines is None:  # memory may be limited, and mapped memory can be told from what is kept
        map_large_blocks()
    known = _Rank(group, device, captured).commands()
    while (do := (command := group.next_command())["do"]) != "stop":
        answer = None
        try:
            if do in known:
                answer = known[do](command)
            elif do in further:
                further[do](**{name: value for name, value in command.items() if name != "do"})
            else:
                raise ExecutionError(f"unknown command {do!r}; are all workers of one version?")
        except Exception as e:
            raise _answered(group, e) from e
        group.answer({"value": answer})
    group.answer({})


def _answered(group: WorkerGroup, error: Exception) -> ExecutionError:
    """Tells rank 0 of an error, as far as it can still be told; returns the error to raise here."""
    reason = first_line(error)
    text = reason if isinstance(error, BaechiError) else f"{type(error).__name__}: {reason}"
    with contextlib.suppress(RuntimeError):  # rank 0 is gone
        group.answer({"error": text, "echo": isinstance(error, LostPeerError)})
    return ExecutionError(text)


class _Rank:
    """A rank other than 0, with its parts of the plans that are loaded."""

    def __init__(self, group: WorkerGroup, device: TorchDevice, captured: RankCapture | None) -> None:
        self._group, self._device, self._captured = group, device, captured
        self._parts: dict[int, RankPart] = {}

    def commands(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """The commands that it obeys, and what gives the answers."""
        group, device, part = self._group, self._device, self._part
        return {
            "probe": lambda c: play(group, device, c),
            "pace": lambda c: asdict(play_pace(device, c["windows"], c["window_seconds"])),
            "memory": lambda c: memory_bytes(device, group.local_size),
            "time": lambda c: time.process_time(),
            "clock": lambda c: tell_clock(group) if c["rank"] == group.rank else None,
            "keep_busy": self._keep_busy,
            "load": self._load,
            "run": self._run,
            "gather": self._gather,
            "account": lambda c: part(c).account(),
            "record": lambda c: part(c).recording(c["stage"]),
            "save": lambda c: asdict(part(c).save(Path(c["folder"]))),
            "restore": lambda c: part(c).restore(Path(c["folder"]), [Shard(**s) for s in c["shards"]]),
        }

    def _part(self, command: dict[str, Any]) -> RankPart:
        if command["step"] not in self._parts:
            raise ExecutionError(f"told to {command['do']} a plan that is not loaded; are all workers of one version?")
        return self._parts[command["step"]]

    def _capture(self, command: dict[str, Any]) -> RankCapture:
        if self._captured is None:
            raise ExecutionError(f"told to {command['do']}, and there is no step; are all workers of one version?")
        return self._captured.of(command["parts"])

    def _load(self, command: dict[str, Any]) -> None:
        self._parts = {number: part for number, part in self._parts.items() if number in command["live"]}
        group, captured = self._group, self._capture(command)
        step, timeline = captured.make_step(), timeline_from_json(captured.graph, command["timeline"])
        if (None if group.tagged else in_order_of_ends(timeline)) != command["ended"]:
            raise ExecutionError("this worker simulates the plan in another order than rank 0; are all workers of one version?")
        gradients = command["keep_gradients"]
        self._parts[command["step"]] = RankPart(group, self._device, timeline, captured.binding, step, keep_gradients=gradients)

    def _run(self, command: dict[str, Any]) -> dict[str, Any]:
        mine = command["seeded_rank"] == self._group.rank
        if mine:
            take_up_state(self._device.torch_device, command["random_state"])
        loss, busy_us = self._part(command).run()
        state = state_as_text(self._device.torch_device) if mine else None
        value = None if loss is None else (loss.item(), str(loss.dtype).removeprefix("torch."))
        return {"loss": value, "busy_us": busy_us, "random_state": state}

    def _gather(self, command: dict[str, Any]) -> None:
        self._part(command).gathered()

    def _keep_busy(self, command: dict[str, Any]) -> None:
        group, until = self._group, command["until"]
        if group.rank <= command["companions"]:
            captured = self._capture(command)
            with ThreadExecutor([self._device], group.timeout_seconds) as executor:
                placed = executor.load(one_device_timeline(captured.graph), captured.binding, captured.make_step())
                placed.programs[0].run()
                group.store.set(_begun(until, group.rank), "")
                run_until(placed, self._device, lambda: group.store.check([until]))


def _begun(enough: str, rank: int) -> str:
    return f"{enough}: {rank} has begun"
