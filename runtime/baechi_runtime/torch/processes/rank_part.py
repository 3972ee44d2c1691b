"""RankPart: one worker's part of a placed step, with the parameters and buffers that live there."""

import contextlib
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import ExecutionError, first_line
from baechi_ext.simulate import Timeline
from baechi_runtime.files.checkpoint_folder import Shard, verify_shard
from baechi_runtime.host import process_memory
from baechi_runtime.host.malloc import freed_memory_given_back, mind_shortage
from baechi_runtime.measure.recording import DeviceMemory
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.torch.lowering.checkpoint import homes, living_on, owned, read_shards, write_shard
from baechi_runtime.torch.lowering.devices import CudaDevice, TorchDevice
from baechi_runtime.torch.lowering.memory_limit import CudaMemoryLimit, MemoryLimit, loading
from baechi_runtime.torch.lowering.op_error import OpError
from baechi_runtime.torch.lowering.ops import Action, Exchange, LoweredProgram, Lowering, Segment, StepContext
from baechi_runtime.torch.lowering.program import cut
from baechi_runtime.torch.lowering.updates import optimizers_by_device
from baechi_runtime.torch.processes.channels import PostedChannels, channels_of
from baechi_runtime.torch.processes.crash_log import CrashLog
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from baechi_runtime.torch.streams.walk import WARM_UP_STEPS, OpTimer
from baechi_runtime.torch.threads.accounting import counting, held_tensors, resident_bytes
from baechi_runtime.torch.threads.step_recorder import DeviceLog

_LITTLE = 0.005
"""An op that takes no more than this part of its device's predicted peak changes the peak by no more."""
GRADIENT = "gradient of "
_GATHER = 1 << 24
"""Tags from here on are for gathering; a tensor's number is far below."""
_ROOMY = 2.0
"""A worker whose limit is so many times its predicted peak may keep what it frees; malloc keeps up to 1.6 times what is used."""


def logged(program: LoweredProgram, timeline: Timeline, log: CrashLog, rank: int) -> LoweredProgram:
    """The program, noting every op in the crash log as it comes to it, and nothing once all are done."""
    log.plan(rank, int(timeline.peak_memory_bytes[rank]))

    def noted(segment: Segment) -> Segment:
        op = timeline.graph.ops[segment.op]
        return replace(segment, arrivals=(log.note(rank, f"{op.phase} op {op.id!r}"), *segment.arrivals))

    return replace(program, segments=tuple(map(noted, program.segments)), epilogue=(*program.epilogue, log.note(rank, "")))


class RankPart:
    """One rank's part of a placed step. A CPU device works on the step's own parameters and buffers, a CUDA device on a replica."""

    def __init__(
        self, group: WorkerGroup, device: TorchDevice, timeline: Timeline, binding: Binding, step: TrainingStep, *, keep_gradients: bool
    ) -> None:
        """Ready to run. Raises ExecutionError where there is no memory for it."""
        self.group = group
        self.device = device
        self.timeline = timeline
        self.binding = binding
        self.on_host = device.torch_device.type == "cpu"
        self.runs = 0
        self.busy_us = 0.0
        self.homes = homes(binding, timeline.placement)
        self.owned_by = owned(binding, timeline.placement, group.size)
        """The names of what lives on each rank."""
        self.owned = self.owned_by[group.rank]
        self.gradients: dict[str, torch.Tensor] | None = {} if keep_gradients else None
        with loading(f"the plan's part of device {device.name}"):
            self.step = step if self.on_host else step.replica("cpu")
            self.load()

    def load(self) -> None:
        """Lowers this rank's program, with optimizers for the parameters that live here."""
        rank = self.group.rank
        self.channels = channels_of(self.timeline, self.binding, self.group, self.device)
        state = self.step.state()
        for name in self.owned:
            state[name].data = state[name].data.to(self.device.torch_device)
        if self.on_host:
            self.optimizers = self.step.optimizers(self.owned)
        else:
            self.optimizers = optimizers_by_device(self.timeline, self.binding, self.step, [rank])
        self.program = self._lowered(self.channels, self.channels.pre_hooks)
        for name, value in state.items():
            if rank and name not in self.owned:  # a device holds what is its own
                value.data = torch.empty(0, dtype=value.dtype)
        self.memory_bytes = self.timeline.cluster.devices[rank].memory_bytes
        self.tight = self.memory_bytes is not None and self.memory_bytes < _ROOMY * self.timeline.peak_memory_bytes[rank]
        resident = resident_bytes(self.owned, state, self.optimizers)
        more_bytes = None if self.memory_bytes is None else int(self.memory_bytes) - resident - self.channels.extra_bytes
        self.limit = MemoryLimit(more_bytes) if self.on_host else CudaMemoryLimit(more_bytes, self.device.torch_device)

    def _lowered(self, exchange: Exchange, pre_hooks: Mapping[int, tuple[Action, ...]]) -> LoweredProgram:
        """This rank's program, which sends and receives through `exchange`, with `pre_hooks` before its ops."""
        timeline, rank = self.timeline, self.group.rank
        context = StepContext(timeline.graph, self.binding, self.step, exchange, self.optimizers, self.gradients, pre_hooks)
        return logged(Lowering(context, self.device, rank).lower(cut(timeline)[rank]), timeline, self.group.crash_log, rank)

    def run(self) -> tuple[torch.Tensor | None, float]:
        """The loss, on the rank that computes it, and for how many microseconds the device was busy: the CPU time that this process took
        with all its threads, since those of torch.distributed work for the device, too; on a CUDA device the sum of its ops, as they were
        timed when the steps were warm."""
        self.runs += 1
        timer = OpTimer(self.device) if isinstance(self.device, CudaDevice) and self.runs == WARM_UP_STEPS else None
        begin_ns = time.process_time_ns()
        with self.limit, freed_memory_given_back() if self.tight and self.on_host else contextlib.nullcontext():
            try:
                slots = (self.program if timer is None else timer.timed(self.program)).run()
                self.channels.finish()
                self.device.synchronize()
            except OpError as e:
                held = held_tensors(self.owned, self.step.state(), self.optimizers)
                raise ExecutionError(e.explain(self.device.name, self.timeline.graph, self.memory_bytes, held)) from e.cause
            except RuntimeError as e:  # of a kernel, found only now
                raise ExecutionError(f"device {self.device.name} failed: {type(e).__name__}: {first_line(e)}") from e
        if timer is not None:
            self.busy_us = timer.busy_us()
        elif self.on_host:
            self.busy_us = (time.process_time_ns() - begin_ns) / 1000
        mind_shortage()
        loss = None if self.program.loss_slot is None else slots[self.program.loss_slot]
        return loss, self.busy_us

    def account(self) -> int:
        """Peak bytes here during one step: a CUDA device's by its allocator; a process's as the system sees it, above what it holds when no
        step runs, plus what of the step it always holds. Freed memory is given back: what malloc would keep of it is not what a step takes.
        Tensors come over torch.distributed, into memory of this process alone: of shared memory the system can't tell who holds it.
        """
        if not self.on_host:
            self.device.reset_peak()
            self.run()
            return int(self.device.peak_bytes() or 0)
        if not process_memory.can_tell():
            return self.held().peak
        kept = self.program, self.channels
        self.channels = PostedChannels(self.timeline, self.binding, self.group, self.device)
        self.program = self._lowered(self.channels, before_large_ops(self.timeline, self.group.rank, self.channels.pre_hooks))
        try:
            with freed_memory_given_back():
                self.run()  # what is made once is made: the optimizers' state
                gc.collect()
                process_memory.trim()
                before = process_memory.resident_bytes()
                process_memory.reset_high_water()
                self.run()
                # The system counts pages, and some of them late: a step of a few KiB can seem to give memory back.
                grown = max(0, process_memory.high_water_bytes() - before)
        finally:
            self.program, self.channels = kept
        return grown + resident_bytes(self.owned, self.step.state(), self.optimizers) + self._input_bytes()

    def held(self) -> DeviceMemory:
        """Run one step, and count what this rank holds during it."""
        state, kept = self.step.state(), self.program
        ops: list[tuple[int, int, int]] = []
        self.program = counting(kept, self.timeline, state.values(), ops)
        try:
            self.run()
        finally:
            self.program = kept
        return DeviceMemory(resident_bytes(self.owned, state, self.optimizers), ops)

    def recording(self, stage: str) -> dict[str, Any]:
        """One of the stages of recording steps: "begin", then for each step "clear" and "run", and at last "end", which puts everything
        back and counts what a step holds. Returns what this rank has to say of it, as JSON: a run's notes, and at the end what was held."""
        if stage == "begin":
            self._timed, self._log = self.program, DeviceLog(self.device)
            self.program = self._log.noting(self._lowered(self._log.exchange(self.channels), self.channels.pre_hooks))
            return {}
        if stage == "clear":
            self._log.begin()
            return {}
        if stage == "run":
            self.run()
            return asdict(self._log.notes())
        self.program = self._timed
        return asdict(self.held())

    def _input_bytes(self) -> int:
        """Bytes of the step's inputs that are read here."""
        inputs = (v for v, bound in enumerate(self.binding.ops) if bound.input_index is not None and bound.input_index >= 0)
        return sum(int(self.timeline.graph.ops[v].output_bytes) for v in inputs if self.timeline.placement[v] == self.group.rank)

    def save(self, folder: Path) -> Shard:
        """Writes this rank's shard of a checkpoint."""
        return write_shard(folder, self.group.rank, self._kept_here(), self.optimizers)

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """Takes up what belongs here, whichever device wrote it; each rank verifies its part of the shards."""
        for shard in shards[self.group.rank :: self.group.size]:
            verify_shard(checkpoint, shard)
        read_shards(checkpoint, [s.file for s in shards], self._kept_here(), self.optimizers)

    def _kept_here(self) -> dict[str, torch.Tensor]:
        return living_on(self.group.rank, self.homes, self.step.state())

    def gathered(self) -> dict[str, torch.Tensor]:
        """The gradients, where they are kept, and the parameters and buffers that live here; on rank 0 those of all ranks, which send it
        theirs."""
        gradients = {GRADIENT + name: value for name, value in (self.gradients or {}).items()}
        found = gradients | {name: value.detach() for name, value in self.step.state().items() if name in self.owned}
        if self.group.rank:
            for number, name in enumerate(self._gathered_from(self.group.rank)):
                dist.send(found[name].cpu().contiguous(), 0, self.group.process_group, _GATHER + number)
            return found
        for rank in range(1, self.group.size):
            for number, name in enumerate(self._gathered_from(rank)):
                like = self.step.state()[name.removeprefix(GRADIENT)]
                found[name] = torch.empty(like.shape, dtype=like.dtype)
                dist.recv(found[name], rank, self.group.process_group, _GATHER + number)
        return found

    def _gathered_from(self, rank: int) -> list[str]:
        owned = self.owned_by[rank]
        updated = {self.binding.state_names[b.parameters[0]] for b in self.binding.ops if b.parameters}
        return ([GRADIENT + name for name in owned if name in updated] if self.gradients is not None else []) + owned


def before_large_ops(timeline: Timeline, rank: int, pre_hooks: Mapping[int, tuple[Action, ...]]) -> dict[int, tuple[Action, ...]]:
    """`pre_hooks`, and before every op of `rank` that takes more than a little memory: what is free goes back to the system."""
    ops, little = timeline.graph.ops, _LITTLE * timeline.peak_memory_bytes[rank]
    large = [v for v, d in enumerate(timeline.placement) if d == rank and ops[v].output_bytes + ops[v].temporary_bytes > little]
    return {**pre_hooks, **{v: (_give_back, *pre_hooks.get(v, ())) for v in large}}


def _give_back(_: Any) -> None:
    process_memory.trim()
