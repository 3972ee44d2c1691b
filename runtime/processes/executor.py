"""The process executor: one process per device, each with memory of its own, running the same static programs as the threads do.

Rank 0 drives: it captures, profiles, places, measures, and is device 0. The others capture the same step and follow its commands.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import BaechiError, ExecutionError, FileError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import Timeline, simulate
from runtime.accounting import Held
from runtime.checkpoint_folder import Shard
from runtime.host_memory import keep_freed_memory
from runtime.hybrid.calls import CallPlan
from runtime.hybrid.share import GroupShare
from runtime.links import PROBE_BYTES, LinkProbe
from runtime.memory_limit import loading
from runtime.processes import probe as process_probe
from runtime.processes.channels import LostPeerError, in_order_of_ends
from runtime.processes.local_share import GRADIENT, LocalShare
from runtime.processes.noting_channels import clock_ahead, clocks_ahead, tell_clock
from runtime.processes.worker_group import WorkerGroup
from runtime.program import one_device_timeline
from runtime.random_state import decoded, encoded
from runtime.step import TrainingStep
from runtime.step_recorder import RUNS, DeviceNotes, Recording, clock_of, middle
from runtime.thread_executor import PlacedStep, StepTimes, ThreadExecutor, run_until
from runtime.torch_devices import TorchDevice, memory_bytes

T = TypeVar("T")
_LONGER_SECONDS = 10.0
_GATHER = 1 << 24
"""Tags from here on are for gathering; a tensor's number is far below."""


class ProcessStep:
    """One plan on all ranks; rank 0's handle."""

    def __init__(self, executor: "ProcessExecutor", share: LocalShare, number: int) -> None:
        self._executor = executor
        self.number = number
        self._share = share
        self.step = share.step
        seeded = share.binding.seeded_ops
        self._seeded_rank = share.timeline.placement[seeded[0]] if seeded else 0

    def run(self) -> tuple[torch.Tensor, StepTimes]:
        """See PlacedStep.run and LocalShare.run.

        Where seeded ops run on another rank, the random state goes there and comes back, so that all steps draw from one sequence.
        """
        group, device = self._executor.group, self._executor.devices[0]
        state = encoded(device.random_state()) if self._seeded_rank else None
        begin = time.perf_counter_ns()
        group.command({"do": "run", "step": self.number, "random_state": state, "seeded_rank": self._seeded_rank})
        try:
            loss, busy = self._executor.call(0, self._share.run)
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
        found = dict(self._share.named())
        everything = self._share.step.state()
        for rank in range(1, self._executor.group.size):
            for number, name in enumerate(self._share.names_of(rank)):
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
            own = self._executor.call(0, partial(self._share.save, folder))
        except FileError:
            self._executor.group.settle()  # the folder is going to be removed
            raise
        return [own, *(Shard(**a["shard"]) for a in self._executor.group.answers())]

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """See LoadedStep; every rank reads what belongs to it."""
        command = {"do": "restore", "step": self.number, "folder": str(checkpoint), "shards": [asdict(s) for s in shards]}
        self._executor.group.command(command)
        self._executor.call(0, partial(self._share.restore, checkpoint, shards))
        self._executor.group.answers()

    def record(self) -> Recording:
        """See runtime.step_recorder."""
        devices = self._executor.devices
        self._stage("begin")
        ahead, notes = clocks_ahead(devices, self._executor.clock_ahead)
        if not self._share.on_host:
            notes.append("transfers over NCCL are not recorded")
        runs = []
        for _ in range(1 + RUNS):
            self._stage("clear")
            begin_ns = time.monotonic_ns()
            noted = self._stage("run")
            wall_us = (time.monotonic_ns() - begin_ns) / 1000
            runs.append((wall_us, begin_ns, [DeviceNotes(**n).shifted(-ns) for n, ns in zip(noted, ahead, strict=True)]))
        held = [Held(**found) for found in self._stage("end")]
        wall_us, begin_ns, devices_notes = middle(runs[1:])
        return Recording(begin_ns, wall_us, devices_notes, held, clock_of(devices[0]).name, tuple(notes))

    def _stage(self, stage: str) -> list[dict[str, Any]]:
        """What all ranks say of a stage of recording."""
        self._executor.group.command({"do": "record", "step": self.number, "stage": stage})
        own = self._executor.call(0, partial(self._share.recording, stage))
        return [own, *self._executor.group.answers()]

    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of every device during one step; see runtime.accounting."""
        self._executor.group.command({"do": "account", "step": self.number})
        own = self._executor.call(0, self._share.account)
        return own, *(a["peak_bytes"] for a in self._executor.group.answers())


class ProcessExecutor:
    """Rank 0's view of all workers; the same face as ThreadExecutor. Leaving it ends the other ranks' work."""

    shared_memory = False

    def __init__(self, group: WorkerGroup, devices: Sequence[TorchDevice]) -> None:
        self.group = group
        self.devices = tuple(devices)
        self.timeout_seconds = group.timeout_seconds
        self._loaded = self._rounds = 0
        self.live: WeakSet[Any] = WeakSet()
        """The steps that are loaded and not dropped, each with its `number`."""
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

    def memory_bytes(self) -> list[int]:
        """What each device may hold, as each worker finds it on its own machine."""
        self.group.command({"do": "memory"})
        return [memory_bytes(self.devices[0], self.group.local_size), *(a["memory_bytes"] for a in self.group.answers())]

    def clock_ahead(self, rank: int) -> tuple[int, int]:
        """By how many nanoseconds a rank's clock is ahead of this one's, and by how many that may be wrong."""
        self.group.command({"do": "clock", "rank": rank})
        found = clock_ahead(rank)
        self.group.answers()
        return found

    def cpu_seconds(self) -> float:
        """CPU time that all workers have used."""
        self.group.command({"do": "time"})
        return self._local.cpu_seconds() + sum(a["cpu_seconds"] for a in self.group.answers())

    @contextlib.contextmanager
    def keep_busy(self, companions: int, timeline: Timeline, binding: Binding, step: TrainingStep) -> Iterator[None]:
        """See `Executor`. Each rank has a step of its own and builds the one-device timeline of what it captured itself."""
        self._rounds += 1
        enough = f"enough {self._rounds}"
        self.group.command({"do": "keep_busy", "companions": companions, "until": enough})
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
        """See ThreadExecutor.load. A timeline of one device is this process's alone; otherwise every rank loads its share."""
        if len(timeline.cluster) == 1:
            return self._local.load(timeline, binding, step, keep_gradients=keep_gradients)
        graph = timeline.graph
        plan = {
            "fingerprint": graph.fingerprint,
            "cluster": timeline.cluster.to_json(),
            "placement": timeline.placement,
            "started": timeline.started,
            "ended": None if self.group.tagged else in_order_of_ends(timeline),
        }
        command = {"do": "load", "plan": plan, "keep_gradients": keep_gradients, "costs": costs_of(graph)}
        number = self.begin_load(command)
        with loading(f"the plan's part of device {self.devices[0].name}"):
            share = LocalShare(self.group, self.devices[0], timeline, binding, step)
            share.load(keep_gradients=keep_gradients)
        self.group.answers()
        placed = ProcessStep(self, share, number)
        self.live.add(placed)
        return placed

    def begin_load(self, command: dict[str, Any]) -> int:
        """Tells the others to load a step, and to drop those that are not `live`; the number that it is called by."""
        self._loaded += 1
        self.group.command({**command, "step": self._loaded, "live": [placed.number for placed in self.live]})
        return self._loaded


def follow(group: WorkerGroup, device: TorchDevice, graph: OpGraph, binding: Binding, make_step: Callable[[], TrainingStep]) -> None:
    """What ranks other than 0 do: obey until told to stop. An error is answered, then raised: a group with a failed rank is over."""
    keep_freed_memory()
    shares: dict[int, LocalShare | GroupShare] = {}
    while (command := group.next_command())["do"] != "stop":
        try:
            if command["do"] == "probe":
                answer: dict[str, Any] = {"part": process_probe.play(group.rank, device, command)}
            elif command["do"] == "memory":
                answer = {"memory_bytes": memory_bytes(device, group.local_size)}
            elif command["do"] == "time":
                answer = {"cpu_seconds": sum(os.times()[:2])}
            elif command["do"] == "clock":
                if group.rank == command["rank"]:
                    tell_clock()
                answer = {}
            elif command["do"] == "keep_busy":
                answer = _keep_busy(group, device, (graph, binding), make_step, command)
            elif command["do"] in ("load", "load_groups"):
                shares = {number: share for number, share in shares.items() if number in command["live"]}
                load = _load if command["do"] == "load" else _load_groups
                shares[command["step"]] = load(group, device, (graph, binding), make_step(), command)
                answer = {}
            elif command["step"] not in shares:
                raise ExecutionError(f"told to {command['do']} a plan that is not loaded; are all workers of one version?")
            else:
                answer = _obey(shares[command["step"]], command)
        except Exception as e:
            raise _answered(group, e) from e
        group.answer(answer)


def follow_probes(group: WorkerGroup, device: TorchDevice) -> None:
    """What ranks other than 0 do where links are probed and nothing else."""
    while (command := group.next_command())["do"] != "stop":
        try:
            if command["do"] == "memory":
                answer = {"memory_bytes": memory_bytes(device, group.local_size)}
            else:
                answer = {"part": process_probe.play(group.rank, device, command)}
        except Exception as e:
            raise _answered(group, e) from e
        group.answer(answer)


def _answered(group: WorkerGroup, error: Exception) -> ExecutionError:
    """Tells rank 0 of an error, as far as it can still be told; what to raise here."""
    reason = (str(error).splitlines() or [""])[0]
    text = reason if isinstance(error, BaechiError) else f"{type(error).__name__}: {reason}"
    with contextlib.suppress(RuntimeError):  # rank 0 is gone
        group.answer({"error": text, "echo": isinstance(error, LostPeerError)})
    return ExecutionError(text)


def _load_groups(
    group: WorkerGroup, device: TorchDevice, captured: tuple[OpGraph, Binding], step: TrainingStep, command: dict[str, Any]
) -> GroupShare:
    _require_same(command["fingerprint"], captured[0])
    with loading(f"the part of device {device.name} in its group"):
        return GroupShare(group, device, CallPlan.from_json(command["plan"]), step, exact=command["exact"])


def _require_same(fingerprint: str, graph: OpGraph) -> None:
    if fingerprint != graph.fingerprint:
        raise ExecutionError("this worker captured another graph than rank 0; start all workers with the same flags and versions")


def _load(
    group: WorkerGroup, device: TorchDevice, captured: tuple[OpGraph, Binding], step: TrainingStep, command: dict[str, Any]
) -> LocalShare:
    graph, binding = captured
    plan = command["plan"]
    _require_same(plan["fingerprint"], graph)
    rank_of = {v: i for i, v in enumerate(plan["started"])}
    costed = with_costs(graph, command["costs"])
    timeline = simulate(costed, Cluster.from_json(plan["cluster"]), plan["placement"], [rank_of[v] for v in range(len(graph))])
    ended = None if group.tagged else in_order_of_ends(timeline)
    if (list(timeline.started), ended) != (plan["started"], plan["ended"]):
        raise ExecutionError("this worker simulates the plan in another order than rank 0; are all workers of one version?")
    with loading(f"the plan's part of device {device.name}"):
        share = LocalShare(group, device, timeline, binding, step)
        share.load(keep_gradients=command["keep_gradients"])
    return share


def _begun(enough: str, rank: int) -> str:
    return f"{enough}: {rank} has begun"


def _keep_busy(
    group: WorkerGroup,
    device: TorchDevice,
    captured: tuple[OpGraph, Binding],
    make_step: Callable[[], TrainingStep],
    command: dict[str, Any],
) -> dict[str, Any]:
    if group.rank <= command["companions"]:
        with ThreadExecutor([device], group.timeout_seconds) as executor:
            placed = executor.load(one_device_timeline(captured[0]), captured[1], make_step())
            until = command["until"]
            placed.programs[0].run()
            group.store.set(_begun(until, group.rank), "")
            run_until(placed.programs[0], lambda: group.store.check([until]))
    return {}


def _obey(share: LocalShare | GroupShare, command: dict[str, Any]) -> dict[str, Any]:
    if isinstance(share, GroupShare):
        return share.obey(command)
    group, device = share.group, share.device
    if command["do"] == "run":
        mine = command["seeded_rank"] == group.rank
        if mine:
            device.set_random_state(decoded(command["random_state"]))
        loss, busy_us = share.run()
        state = encoded(device.random_state()) if mine else None
        return {"loss": None if loss is None else loss.item(), "busy_us": busy_us, "random_state": state}
    if command["do"] == "gather":
        for number, (_, value) in enumerate(share.named()):
            dist.send(value.cpu().contiguous(), 0, tag=_GATHER + number)
        return {}
    if command["do"] == "account":
        return {"peak_bytes": share.account()}
    if command["do"] == "record":
        return share.recording(command["stage"])
    if command["do"] == "save":
        return {"shard": asdict(share.save(Path(command["folder"])))}
    if command["do"] == "restore":
        share.restore(Path(command["folder"]), [Shard(**s) for s in command["shards"]])
        return {}
    raise ExecutionError(f"unknown command {command['do']!r}; are all workers of one version?")


def costs_of(graph: OpGraph) -> list[list[float]]:
    """What `with_costs` puts onto the same graph elsewhere."""
    return [[op.compute_us, op.temporary_bytes] for op in graph.ops]


def with_costs(graph: OpGraph, costs: Sequence[Sequence[float]]) -> OpGraph:
    return graph.replace_ops([replace(op, compute_us=us, temporary_bytes=t) for op, (us, t) in zip(graph.ops, costs, strict=True)])

