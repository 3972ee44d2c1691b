"""The process executor: one process per device, each with memory of its own, running the same static programs as the threads do.

Rank 0 drives: it captures, profiles, places, measures, and is device 0. The others capture the same step and follow its commands.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import BaechiError, ExecutionError, FileError
from baechi_ext.ir import OpGraph
from baechi_ext.simulate import Timeline
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.files.checkpoint_folder import Shard
from baechi_runtime.host.host_memory import keep_freed_memory
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe
from baechi_runtime.measure.recording import DeviceMemory, DeviceNotes, Recording, recorded_run
from baechi_runtime.measure.timing import StepTimes
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.devices import TorchDevice, memory_bytes
from baechi_runtime.torch.lowering.memory_limit import loading
from baechi_runtime.torch.lowering.random_state import decoded, encoded
from baechi_runtime.torch.processes import probe as process_probe
from baechi_runtime.torch.processes.channels import LostPeerError, in_order_of_ends
from baechi_runtime.torch.processes.clocks import clock_ahead, clocks_ahead, tell_clock
from baechi_runtime.torch.processes.rank_part import GRADIENT, RankPart
from baechi_runtime.torch.processes.sent_timeline import timeline_from_json, timeline_to_json
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from baechi_runtime.torch.threads.executor import PlacedStep, ThreadExecutor, run_until
from baechi_runtime.torch.threads.step_recorder import clock_of

T = TypeVar("T")
_LONGER_SECONDS = 10.0
_GATHER = 1 << 24
"""Tags from here on are for gathering; a tensor's number is far below."""


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
        group, device = self._executor.group, self._executor.devices[0]
        state = encoded(device.random_state()) if self._seeded_rank else None
        begin = time.perf_counter_ns()
        group.command({"do": "run", "step": self.number, "random_state": state, "seeded_rank": self._seeded_rank})
        try:
            loss, busy = self._executor.call(0, self._part.run)
        except LostPeerError as e:
            raise group.first_failure() or e from e
        others = group.answers()
        wall_us = (time.perf_counter_ns() - begin) / 1000
        if self._seeded_rank:
            device.set_random_state(decoded(others[self._seeded_rank - 1]["random_state"]))
        if loss is None:
            loss = torch.tensor(next(a["loss"] for a in others if a["loss"] is not None))
        return loss, StepTimes(wall_us, (busy, *(a["busy_us"] for a in others)))

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """See PlacedStep.gather; each tensor comes from the rank it lives on."""
        self._executor.group.command({"do": "gather", "step": self.number})
        found = dict(self._part.named())
        everything = self._part.step.state()
        for rank in range(1, self._executor.group.size):
            for number, name in enumerate(self._part.names_of(rank)):
                like = everything[name.removeprefix(GRADIENT)]
                buffer = torch.empty(like.shape, dtype=like.dtype)
                dist.recv(buffer, rank, tag=_GATHER + number)
                found[name] = buffer
        self._executor.group.answers()
        gradients = {name.removeprefix(GRADIENT): value for name, value in found.items() if name.startswith(GRADIENT)}
        return gradients, {name: found.get(name, value) for name, value in everything.items()}

    @property
    def random_device(self) -> TorchDevice:
        """See LoadedStep: between steps the random state is here."""
        return self._executor.devices[0]

    def save(self, folder: Path) -> list[Shard]:
        """See LoadedStep; every rank writes its own shard."""
        self._executor.group.command({"do": "save", "step": self.number, "folder": str(folder)})
        try:
            own = self._executor.call(0, partial(self._part.save, folder))
        except FileError:
            self._executor.group.settle()  # the folder is going to be removed
            raise
        return [own, *(Shard(**a["shard"]) for a in self._executor.group.answers())]

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """See LoadedStep; every rank reads what belongs to it."""
        own = partial(self._part.restore, checkpoint, shards)
        self._together(own, do="restore", folder=str(checkpoint), shards=[asdict(s) for s in shards])

    def record(self) -> Recording:
        """See baechi_runtime.torch.threads.step_recorder."""
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
        return own, *(a["peak_bytes"] for a in others)

    def _together(self, own: Callable[[], T], **command: Any) -> tuple[T, list[dict[str, Any]]]:
        """Do something with the step on all ranks: what it gives here, and the others' answers."""
        return self._executor.together(partial(self._executor.call, 0, own), **command, step=self.number)


class ProcessExecutor:
    """Rank 0's view of all workers; the same interface as ThreadExecutor. Leaving it ends the other ranks' work."""

    shared_memory = False

    def __init__(self, group: WorkerGroup, devices: Sequence[TorchDevice]) -> None:
        self.group = group
        self.devices = tuple(devices)
        self.timeout_seconds = group.timeout_seconds
        self._loaded = self._rounds = 0
        self._live: WeakSet[ProcessStep] = WeakSet()
        """The steps that are loaded and not dropped."""
        # It outwaits the waits for other ranks inside it, whose errors say more.
        self._local = ThreadExecutor(self.devices[:1], group.timeout_seconds + _LONGER_SECONDS)

    def __enter__(self) -> "ProcessExecutor":
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        with contextlib.suppress(*[ExecutionError] if kind else []):  # the first error says more
            self.group.command({"do": "stop"})
        self._local.close()

    def call(self, device: int, function: Callable[[], T]) -> T:
        """Runs a function on device 0, which is this process."""
        if device != 0:
            raise ExecutionError(f"device {device} is another process; only device 0 runs functions of this one")
        return self._local.call(0, function)

    def together(self, own: Callable[[], T], **command: Any) -> tuple[T, list[dict[str, Any]]]:
        """Do something in this thread while the others obey a command: what it gives here, and their answers. Raises ExecutionError, the
        first one's where several fail."""
        self.group.command(command)
        try:
            found = own()
        except RuntimeError as e:  # of torch.distributed, whose peer is gone
            raise self.group.first_failure() or ExecutionError((str(e).splitlines() or [""])[0]) from e
        return found, self.group.answers()

    def memory_bytes(self) -> list[int]:
        """Bytes that each device may hold, as each worker finds them on its own machine."""
        self.group.command({"do": "memory"})
        return [memory_bytes(self.devices[0], self.group.local_size), *(a["memory_bytes"] for a in self.group.answers())]

    def clock_ahead(self, rank: int) -> tuple[int, int]:
        """Nanoseconds by which a rank's clock is ahead of this one's, and by which that may be wrong."""
        self.group.command({"do": "clock", "rank": rank})
        found = clock_ahead(rank)
        self.group.answers()
        return found

    def cpu_seconds(self) -> float:
        """CPU time that all workers have used."""
        self.group.command({"do": "time"})
        return self._local.cpu_seconds() + float(sum(a["cpu_seconds"] for a in self.group.answers()))

    @contextlib.contextmanager
    def keep_busy(self, companions: int, timeline: Timeline, binding: Binding, step: TrainingStep) -> Iterator[None]:
        """See `Executor`. Each rank has a step of its own and builds the one-device timeline of what it captured itself."""
        self._rounds += 1
        enough = f"enough {self._rounds}"
        self.group.command({"do": "keep_busy", "companions": companions, "until": enough, "parts": sizes_of(binding)})
        started = [_begun(enough, rank) for rank in range(1, companions + 1)]
        try:
            self.group.store.wait(started, timedelta(seconds=self.timeout_seconds))
            yield
        finally:
            self.group.store.set(enough, "")
        self.group.answers()

    def probe_link(self, source: int = 0, target: int = 1, sizes: Sequence[int] = PROBE_BYTES) -> LinkProbe:
        """The link between two ranks."""
        probe = partial(process_probe.probe_pair, self.group, self.devices[0], (source, target), sizes)
        # A wait for a CUDA device has no time-out of its own; that of a call has.
        return probe() if self.devices[0].torch_device.type == "cpu" else self.call(0, probe)

    def load(self, timeline: Timeline, binding: Binding, step: TrainingStep, *, keep_gradients: bool = False) -> ProcessStep | PlacedStep:
        """See ThreadExecutor.load. A timeline of one device is this process's alone; otherwise every rank loads its part."""
        if len(timeline.cluster) == 1:
            return self._local.load(timeline, binding, step, keep_gradients=keep_gradients)
        command = {"do": "load", "timeline": timeline_to_json(timeline), "keep_gradients": keep_gradients}
        command["parts"] = sizes_of(binding)
        command["ended"] = None if self.group.tagged else in_order_of_ends(timeline)
        self._loaded += 1
        self.group.command({**command, "step": self._loaded, "live": [placed.number for placed in self._live]})
        with loading(f"the plan's part of device {self.devices[0].name}"):
            part = RankPart(self.group, self.devices[0], timeline, binding, step)
            part.load(keep_gradients=keep_gradients)
        self.group.answers()
        placed = ProcessStep(self, part, self._loaded)
        self._live.add(placed)
        return placed


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


Further = Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]
"""Commands beyond those of placed steps, and what obeys them and gives the answer."""


def follow(group: WorkerGroup, device: TorchDevice, captured: RankCapture | None = None, further: Further = MappingProxyType({})) -> None:
    """Ranks other than 0: obey until told to stop; links can be probed without a captured step. An error is answered, then raised: a group
    with a failed rank is over."""
    keep_freed_memory()
    parts: dict[int, RankPart] = {}
    while (command := group.next_command())["do"] != "stop":
        try:
            if command["do"] == "probe":
                answer: dict[str, Any] = {"part": process_probe.play(group, device, command)}
            elif command["do"] == "memory":
                answer = {"memory_bytes": memory_bytes(device, group.local_size)}
            elif command["do"] == "time":
                answer = {"cpu_seconds": sum(os.times()[:2])}
            elif command["do"] == "clock":
                if group.rank == command["rank"]:
                    tell_clock()
                answer = {}
            elif command["do"] in further:
                answer = further[command["do"]](command)
            elif captured is None:
                raise ExecutionError(f"told to {command['do']}, and there is no step; are all workers of one version?")
            elif command["do"] == "keep_busy":
                answer = _keep_busy(group, device, captured, command)
            elif command["do"] == "load":
                parts = {number: part for number, part in parts.items() if number in command["live"]}
                parts[command["step"]] = _load(group, device, captured, command)
                answer = {}
            elif command["step"] not in parts:
                raise ExecutionError(f"told to {command['do']} a plan that is not loaded; are all workers of one version?")
            else:
                answer = _obey(parts[command["step"]], command)
        except Exception as e:
            raise _answered(group, e) from e
        group.answer(answer)


def _answered(group: WorkerGroup, error: Exception) -> ExecutionError:
    """Tells rank 0 of an error, as far as it can still be told; returns the error to raise here."""
    reason = (str(error).splitlines() or [""])[0]
    text = reason if isinstance(error, BaechiError) else f"{type(error).__name__}: {reason}"
    with contextlib.suppress(RuntimeError):  # rank 0 is gone
        group.answer({"error": text, "echo": isinstance(error, LostPeerError)})
    return ExecutionError(text)


def _load(group: WorkerGroup, device: TorchDevice, captured: RankCapture, command: dict[str, Any]) -> RankPart:
    captured = captured.of(command["parts"])
    step, timeline = captured.make_step(), timeline_from_json(captured.graph, command["timeline"])
    if (None if group.tagged else in_order_of_ends(timeline)) != command["ended"]:
        raise ExecutionError("this worker simulates the plan in another order than rank 0; are all workers of one version?")
    with loading(f"the plan's part of device {device.name}"):
        part = RankPart(group, device, timeline, captured.binding, step)
        part.load(keep_gradients=command["keep_gradients"])
    return part


def _begun(enough: str, rank: int) -> str:
    return f"{enough}: {rank} has begun"


def _keep_busy(group: WorkerGroup, device: TorchDevice, captured: RankCapture, command: dict[str, Any]) -> dict[str, Any]:
    if group.rank <= command["companions"]:
        captured = captured.of(command["parts"])
        with ThreadExecutor([device], group.timeout_seconds) as executor:
            placed = executor.load(one_device_timeline(captured.graph), captured.binding, captured.make_step())
            until = command["until"]
            placed.programs[0].run()
            group.store.set(_begun(until, group.rank), "")
            run_until(placed.programs[0], lambda: group.store.check([until]))
    return {}


def _obey(part: RankPart, command: dict[str, Any]) -> dict[str, Any]:
    group, device = part.group, part.device
    if command["do"] == "run":
        mine = command["seeded_rank"] == group.rank
        if mine:
            device.set_random_state(decoded(command["random_state"]))
        loss, busy_us = part.run()
        state = encoded(device.random_state()) if mine else None
        return {"loss": None if loss is None else loss.item(), "busy_us": busy_us, "random_state": state}
    if command["do"] == "gather":
        for number, (_, value) in enumerate(part.named()):
            dist.send(value.cpu().contiguous(), 0, tag=_GATHER + number)
        return {}
    if command["do"] == "account":
        return {"peak_bytes": part.account()}
    if command["do"] == "record":
        return part.recording(command["stage"])
    if command["do"] == "save":
        return {"shard": asdict(part.save(Path(command["folder"])))}
    if command["do"] == "restore":
        part.restore(Path(command["folder"]), [Shard(**s) for s in command["shards"]])
        return {}
    raise ExecutionError(f"unknown command {command['do']!r}; are all workers of one version?")
