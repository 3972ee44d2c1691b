"""LocalShare: one worker's part of a placed step, with the parameters and buffers that live there."""

import contextlib
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import ExecutionError
from baechi_ext.simulate import Timeline
from runtime import process_memory
from runtime.accounting import Held, held_tensors, live_bytes, resident_bytes
from runtime.checkpoint import homes, living_on, read_shards, write_shard
from runtime.checkpoint_folder import Shard, verify_shard
from runtime.cuda.stream_channels import StreamChannels
from runtime.host_memory import freed_memory_given_back
from runtime.memory_limit import CudaMemoryLimit, MemoryLimit
from runtime.processes.channels import Channels
from runtime.processes.noting_channels import NotingChannels
from runtime.processes.worker_group import WorkerGroup
from runtime.program import cut
from runtime.step import TrainingStep
from runtime.step_recorder import DeviceLog, clock_of
from runtime.torch_devices import TorchDevice
from runtime.torch_ops import Action, LoweredProgram, Lowering, OpError, StepContext

_LITTLE = 0.005
"""An op that takes no more than this part of its device's predicted peak changes the peak by no more."""
GRADIENT = "gradient of "
_ROOMY = 2.0
"""A worker whose limit is so many times its predicted peak may keep what it frees; malloc keeps up to 1.6 times what is used."""


class _ProcessClock:
    """CPU time of this process, with all its threads: those of torch.distributed work for the device, too."""

    def mark(self) -> int:
        return time.process_time_ns()

    def elapsed_us(self, start: int, end: int) -> float:
        return (end - start) / 1000


class LocalShare:
    """One rank's part of a placed step. A CPU device works on the step's own parameters and buffers, a CUDA device on a replica."""

    def __init__(self, group: WorkerGroup, device: TorchDevice, timeline: Timeline, binding: Binding, step: TrainingStep) -> None:
        self.group = group
        self.device = device
        self.timeline = timeline
        self.binding = binding
        self.on_host = device.torch_device.type == "cpu"
        self.step = step if self.on_host else step.replica("cpu")
        self.clock = _ProcessClock() if self.on_host else device
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.gradients: dict[str, torch.Tensor] | None = None

    def load(self, *, keep_gradients: bool) -> None:
        """Lowers this rank's program, with optimizers for the parameters that live here."""
        rank = self.group.rank
        channels = Channels if self.on_host else StreamChannels
        self.channels = channels(self.timeline, self.binding, self.group, self.device)
        state = self.step.state()
        self.owned = [n for n, home in homes(self.binding, self.timeline.placement).items() if home == rank]
        for name in self.owned:
            state[name].data = state[name].data.to(self.device.torch_device)
        parameters = {n: state[n] for n in self.owned if state[n].requires_grad}
        self.optimizers = {n: self.step.optimizer.make([p], foreach=False) for n, p in parameters.items()}
        self.gradients = {} if keep_gradients else None
        self.program = self._lowered(self.channels.posts)
        if self.group.rank:
            self._drop_the_rest()
        self.memory_bytes = self.timeline.cluster.devices[rank].memory_bytes
        self.tight = self.memory_bytes is not None and self.memory_bytes < _ROOMY * self.timeline.peak_memory_bytes[rank]
        resident = resident_bytes(self.owned, state, self.optimizers)
        more_bytes = None if self.memory_bytes is None else int(self.memory_bytes) - resident
        self.limit = MemoryLimit(more_bytes) if self.on_host else CudaMemoryLimit(more_bytes, self.device.torch_device)

    def _lowered(self, posts: Mapping[int, tuple[Action, ...]]) -> LoweredProgram:
        """This rank's program, with `posts` before its ops."""
        graph, rank = self.timeline.graph, self.group.rank
        context = StepContext(graph, self.binding, self.step, self.channels, self.optimizers, self.gradients, posts)
        return self.group.board.marked(Lowering(context, self.device, rank).lower(cut(self.timeline)[rank]), graph, rank)

    def run(self) -> tuple[torch.Tensor | None, float]:
        """The loss, on the rank that computes it, and for how many microseconds the device was busy: the CPU time that this process took,
        its transfers included; on a CUDA device the time from the step's first event to its last, without the waits for tensors."""
        start = self.clock.mark()
        with self.limit, freed_memory_given_back() if self.tight and self.on_host else contextlib.nullcontext():
            try:
                slots = self.program.run()
                waited_us = self.channels.finish()
                end = self.clock.mark()
                self.device.synchronize()
            except OpError as e:
                held = held_tensors(self.owned, self.step.state(), self.optimizers)
                raise ExecutionError(e.explain(self.device.name, self.timeline.graph, self.memory_bytes, held)) from e.cause
            except RuntimeError as e:  # of a kernel, found only now
                raise ExecutionError(f"device {self.device.name} failed: {type(e).__name__}: {(str(e).splitlines() or [''])[0]}") from e
        loss = None if self.program.loss_slot is None else slots[self.program.loss_slot]
        return loss, self.clock.elapsed_us(start, end) - waited_us

    def account(self) -> int:
        """Peak bytes here during one step: a CUDA device's by its allocator; a process's as the system sees it, above what it holds when no
        step runs, plus what of the step it always holds. Freed memory is given back: what malloc would keep of it is not what a step takes.
        """
        if not self.on_host:
            self.device.reset_peak()
            self.run()
            return int(self.device.peak_bytes() or 0)
        if not process_memory.can_tell():
            return self.held().peak
        kept, self.program = self.program, self._lowered(before_large_ops(self.timeline, self.group.rank, self.channels.posts))
        try:
            with freed_memory_given_back():
                self.run()  # what is made once is made: the optimizers' state
                gc.collect()
                process_memory.trim()
                before = process_memory.resident_bytes()
                process_memory.reset_high_water()
                self.run()
                grown = process_memory.high_water_bytes() - before
        finally:
            self.program = kept
        return grown + resident_bytes(self.owned, self.step.state(), self.optimizers) + self._input_bytes()

    def held(self) -> Held:
        """What this rank holds during one step, counted."""
        state = self.step.state()
        ops = live_bytes(self.program, self.timeline, {v.untyped_storage().data_ptr() for v in state.values()})
        self.channels.finish()
        return Held(resident_bytes(self.owned, state, self.optimizers), ops)

    def recording(self, stage: str) -> dict[str, Any]:
        """One of the stages of recording steps: "begin", then for each step "clear" and "run", and at last "end", which puts everything
        back and counts what a step holds. What this rank has to say of it, as JSON: a run's notes, and at the end what was held."""
        if stage == "begin":
            self._timed = self.program, self.channels
            self._log = DeviceLog(clock_of(self.device))
            if self.on_host:
                self.channels = NotingChannels(self.timeline, self.binding, self.group, self.device)
                self.channels.log = self._log
            self.program = self._log.noting(self._lowered(self.channels.posts))
            return {}
        if stage == "clear":
            self._log.begin()
            return {}
        if stage == "run":
            self.run()
            return asdict(self._log.notes())
        self.program, self.channels = self._timed
        return asdict(self.held())

    def _input_bytes(self) -> int:
        """Of the step's inputs that are read here."""
        ops = (v for v, device in enumerate(self.timeline.placement) if device == self.group.rank)
        read = {index for v in ops if (index := self.binding.ops[v].input_index) is not None and index >= 0}
        return sum(self.step.inputs[i].numel() * self.step.inputs[i].element_size() for i in read)

    def save(self, folder: Path) -> Shard:
        """Writes this rank's shard of a checkpoint."""
        return write_shard(folder, self.group.rank, self._kept_here(), self.optimizers)

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """Takes up what belongs here, whichever device wrote it; each rank verifies its part of the shards."""
        for shard in shards[self.group.rank :: self.group.size]:
            verify_shard(checkpoint, shard)
        read_shards(checkpoint, [s.file for s in shards], self._kept_here(), self.optimizers)

    def _kept_here(self) -> dict[str, torch.Tensor]:
        return living_on(self.group.rank, homes(self.binding, self.timeline.placement), self.step.state())

    def _drop_the_rest(self) -> None:
        """Frees the parameters and buffers that live on other ranks: a device holds what is its own."""
        for name, value in self.step.state().items():
            if name not in self.owned:
                value.data = torch.empty(0, dtype=value.dtype)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """What lives here, gradients first, in the order of `names_of`."""
        state, gradients = self.step.state(), self.gradients or {}
        values = {n: gradients[n.removeprefix(GRADIENT)] if n.startswith(GRADIENT) else state[n].detach() for n in self.names_of(None)}
        return list(values.items())

    def names_of(self, rank: int | None) -> list[str]:
        """What lives on a rank (None: this one), in an order all ranks find alike."""
        rank = self.group.rank if rank is None else rank
        owned = [n for n, home in homes(self.binding, self.timeline.placement).items() if home == rank]
        updated = {self.binding.state_names[b.parameters[0]] for b in self.binding.ops if b.parameters}
        gradients = [GRADIENT + n for n in owned if n in updated] if self.gradients is not None else []
        return gradients + owned


def before_large_ops(timeline: Timeline, rank: int, posts: Mapping[int, tuple[Action, ...]]) -> dict[int, tuple[Action, ...]]:
    """`posts`, and before every op of `rank` that takes more than a little memory: what is free goes back to the system."""
    ops, little = timeline.graph.ops, _LITTLE * timeline.peak_memory_bytes[rank]
    large = [v for v, d in enumerate(timeline.placement) if d == rank and ops[v].output_bytes + ops[v].temporary_bytes > little]
    return {**posts, **{v: (_give_back, *posts.get(v, ())) for v in large}}


def _give_back(_: Any) -> None:
    process_memory.trim()
