"""A worker's share of a plan on groups: its part of the step, and the optimizer of the parts of weights that live there."""

import contextlib
import copy
import gc
import logging
import time
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from baechi_ext.errors import ExecutionError
from runtime import process_memory
from runtime.host_memory import freed_memory_given_back
from runtime.hybrid.call_log import CallLog, named
from runtime.hybrid.calls import CallPlan
from runtime.hybrid.step import GroupStep
from runtime.processes.channels import LostPeerError
from runtime.processes.local_share import GRADIENT
from runtime.processes.worker_group import WorkerGroup
from runtime.random_state import decoded, encoded
from runtime.sharding.traffic import counted
from runtime.step import TrainingStep
from runtime.torch_devices import TorchDevice

_GATHER = 1 << 24
"""Tags from here on are for gathering."""


class GroupShare:
    """One rank's share. `exact`: in double precision and without an optimizer, to be compared; of a step of its own."""

    def __init__(self, group: WorkerGroup, device: TorchDevice, plan: CallPlan, step: TrainingStep, *, exact: bool) -> None:
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # how gloo does things is no news
        self.group, self.device, self.plan = group, device, plan
        self.part = GroupStep(in_double(step) if exact else step, plan, group.rank, group.timeout_seconds)
        learned = [p for p in self.part.sharded.parts.values() if p.requires_grad]
        self.optimizer = step.optimizer.make(learned) if learned and not exact else None
        self.updated: tuple[int, int] | None = None
        """When the last step's update began and ended, in nanoseconds of the host's monotonic clock."""
        if group.rank:
            for value in step.state().values():  # the parts are copies
                value.data = torch.empty(0, dtype=value.dtype)

    @property
    def seeded(self) -> bool:
        """Whether this rank's group draws the step's random numbers."""
        return self.part.programs.seeded_group == self.part.group

    def obey(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """What a rank other than 0 answers to a command."""
        if command["do"] == "run":
            return self.run(command["random_state"])
        if command["do"] == "gather":
            self.gather()
            return {}
        if command["do"] == "account":
            return {"peak_bytes": self.account()}
        if command["do"] == "count":
            return self.count(command["random_state"])
        if command["do"] == "record":
            return self.recording(command["stage"], command["random_state"])
        raise ExecutionError(f"unknown command {command['do']!r} for a plan on groups; are all workers of one version?")

    def run(self, random_state: str | None) -> dict[str, Any]:
        """One step: the loss, where it is computed here, the CPU time that this process took, and the random state after it."""
        if random_state is not None:
            self.device.set_random_state(decoded(random_state))
        start = time.process_time_ns()
        try:
            loss = self.part.run()
        except RuntimeError as e:
            reason = (str(e).splitlines() or [""])[0][-200:]
            lost = "gloo" in reason or "onnection" in reason or "imed out" in reason
            raise (LostPeerError if lost else ExecutionError)(f"device {self.device.name} failed: {type(e).__name__}: {reason}") from e
        updated = None
        if self.optimizer is not None:
            begun = time.monotonic_ns()
            self.optimizer.step()
            updated = begun, time.monotonic_ns()
        self.updated = updated
        busy_us = (time.process_time_ns() - start) / 1000
        state = encoded(self.device.random_state()) if self.seeded else None
        return {"loss": None if loss is None else loss.item(), "busy_us": busy_us, "random_state": state}

    def recording(self, stage: str, random_state: str | None) -> dict[str, Any]:
        """One of the stages of recording steps, as of LocalShare: "begin", then "run" for each step, whose notes are in the answer, and
        at last "end", which puts everything back."""
        if stage == "begin":
            self._log, self._noted = CallLog(), contextlib.ExitStack()
            self._noted.enter_context(self.part.noted(self._log))
        elif stage == "end":
            self._noted.close()
            self._log.begin()
        else:
            self._log.begin()
            answer, call_of = self.run(random_state), self.part.programs.call_of
            ends = {"sent": named(self._log.sent, call_of), "received": named(self._log.received, call_of)}
            return answer | {"notes": {"calls": self._log.calls(), "update": self.updated, **ends}}
        return {"random_state": None}

    def count(self, random_state: str | None) -> dict[str, Any]:
        """One step, and what this process sent in it: to other groups, and to the others of its own."""
        with counted() as traffic:
            answer = self.run(random_state)
        inside = sum(size for kind, size in traffic.sent.items() if kind not in ("send", "recv"))
        return answer | {"between": self.part.sent_bytes, "inside": inside}

    def account(self) -> int:
        """Peak bytes here during one step, as the system sees them, above what the process holds when no step runs, and the parts of
        parameters, buffers and optimizer state that live here."""
        state = encoded(self.device.random_state()) if self.seeded else None
        with freed_memory_given_back():
            self.run(state)
            gc.collect()
            process_memory.trim()
            before = process_memory.resident_bytes()
            process_memory.reset_high_water()
            self.run(state)
            grown = process_memory.high_water_bytes() - before
        held = [value.to_local() for value in self._kept().values()]
        if self.optimizer is not None:
            held += [v for slots in self.optimizer.state.values() for v in slots.values() if isinstance(v, Tensor)]
        return grown + sum(value.nbytes for value in held)

    def _kept(self) -> dict[str, DTensor]:
        sharded = self.part.sharded
        return {**sharded.parameters, **sharded.buffers}

    def gather(self) -> dict[str, Tensor]:
        """Rank 0 gets what lives anywhere, whole, from the first rank of each group: parameters, buffers, and gradients, which are 0 where
        nothing came. Every rank has to call it."""
        found: dict[str, Tensor] = {}
        self.part.sharded.place_gradients()
        for name, value in self._kept().items():
            found[name] = value.detach().full_tensor().clone()  # what is whole here already would change with the next step
            if value.requires_grad:
                found[GRADIENT + name] = torch.zeros_like(found[name]) if value.grad is None else value.grad.full_tensor().clone()
        if self.group.rank and self.group.rank == self.plan.groups[self.part.group][0]:
            for number, value in enumerate(found.values()):
                dist.send(value.contiguous(), 0, tag=_GATHER + number)
        for group, members in enumerate(self.plan.groups if self.group.rank == 0 else ()):
            if 0 not in members:
                found |= self._from(members[0], self.part.programs.read_by(group))
        return found

    def _from(self, rank: int, names: Set[str]) -> dict[str, Tensor]:
        """What another group keeps, in the order in which its first rank sends it."""
        found: dict[str, Tensor] = {}
        for name, value in self.part.step.state().items():
            if name in names:
                for title in (name, GRADIENT + name) if value.requires_grad else (name,):
                    found[title] = torch.empty(value.shape, dtype=value.dtype)
                    dist.recv(found[title], rank, tag=_GATHER + len(found) - 1)
        return found


def in_double(step: TrainingStep) -> TrainingStep:
    """A copy of the step in double precision."""
    inputs = tuple(value.double() if value.is_floating_point() else value for value in step.inputs)
    return replace(step, module=copy.deepcopy(step.module).double(), inputs=inputs)
