"""Rank 0's view of workers that run a plan on groups: the face of an executor, so that it is checked, measured and trained as any other."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import OptionError
from baechi_ext.hybrid.placer import HybridResult
from baechi_ext.hybrid.plan import HybridPlan
from baechi_ext.simulate import Timeline
from runtime import process_memory
from runtime.checkpoint_folder import Shard
from runtime.hybrid.calls import CallPlan
from runtime.hybrid.recording import GroupRecording, MemberNotes
from runtime.hybrid.share import GroupShare, in_double
from runtime.parity_result import Parity
from runtime.processes.channels import LostPeerError
from runtime.processes.executor import ProcessExecutor
from runtime.processes.local_share import GRADIENT
from runtime.processes.noting_channels import clocks_ahead
from runtime.random_state import decoded, encoded
from runtime.sharding.parity import compare_exact
from runtime.step import TrainingStep
from runtime.step_recorder import RUNS, middle
from runtime.thread_executor import StepTimes
from runtime.torch_devices import TorchDevice

T = TypeVar("T")
NOT_KEPT = "checkpoints keep whole tensors, and a plan on groups splits them; drop --checkpoint, or choose --placement_method=auto"


class GroupedStep:
    """One plan on all groups; rank 0's handle (see runtime.executor.LoadedStep)."""

    def __init__(self, executor: "GroupedExecutor", share: GroupShare, number: int) -> None:
        self._executor = executor
        self._share = share
        self.number = number
        self.step = share.part.step

    @property
    def random_device(self) -> TorchDevice:
        """See LoadedStep."""
        return self._executor.devices[0]

    def run(self) -> tuple[Tensor, StepTimes]:
        """The loss, and wall time and how long each group's busiest member worked."""
        begin = time.perf_counter_ns()
        answers = self._all("run", self._share.run)
        wall_us = (time.perf_counter_ns() - begin) / 1000
        loss = next(answer["loss"] for answer in answers if answer["loss"] is not None)
        return torch.tensor(loss, dtype=torch.float64), StepTimes(wall_us, self._by_group([answer["busy_us"] for answer in answers]))

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """See LoadedStep; all are whole."""
        self._executor.command({"do": "gather", "step": self.number})
        found = self._share.gather()
        self._executor.answers()
        gradients = {name.removeprefix(GRADIENT): value for name, value in found.items() if name.startswith(GRADIENT)}
        return gradients, {name: found.get(name, value) for name, value in self.step.state().items()}

    def peak_bytes(self) -> tuple[int, ...]:
        """Of each group's member that held most; none where the system does not tell."""
        if not process_memory.can_tell():
            return ()
        self._executor.command({"do": "account", "step": self.number})
        own = self._share.account()
        return self._by_group([own, *(answer["peak_bytes"] for answer in self._executor.answers())])

    def sent_bytes(self) -> dict[str, float]:
        """What all processes together send in one step, which it takes: between groups, and inside them."""
        answers = self._all("count", self._share.count)
        return {f"{where}_groups": sum(answer[key] for answer in answers) for where, key in (("between", "between"), ("inside", "inside"))}

    def record(self) -> GroupRecording:
        """See runtime.step_recorder."""
        self._all("record", partial(self._share.recording, "begin"), stage="begin")
        ahead, remarks = clocks_ahead(self._executor.devices, self._executor.clock_ahead)
        runs = []
        for _ in range(1 + RUNS):
            begin_ns = time.monotonic_ns()
            answers = self._all("record", partial(self._share.recording, "run"), stage="run")
            runs.append(((time.monotonic_ns() - begin_ns) / 1000, begin_ns, answers))
        self._all("record", partial(self._share.recording, "end"), stage="end")
        wall_us, begin_ns, answers = middle(runs[1:])
        members = [MemberNotes.of(answer, ns) for answer, ns in zip(answers, ahead, strict=True)]
        return GroupRecording(begin_ns, wall_us, members, self._executor.plan, self._executor.timeline, tuple(remarks))

    def save(self, folder: Path) -> list[Shard]:
        """Raises OptionError: there are no checkpoints of it."""
        raise OptionError(NOT_KEPT)

    def restore(self, checkpoint: Path, shards: Sequence[Shard]) -> None:
        """See `save`."""
        raise OptionError(NOT_KEPT)

    def _all(self, what: str, own: Callable[[str | None], dict[str, Any]], **more: str) -> list[dict[str, Any]]:
        """All ranks' answers to a step, whose random numbers are drawn from rank 0's state on."""
        state = None if self._share.part.programs.seeded_group is None else encoded(self.random_device.random_state())
        self._executor.command({"do": what, "step": self.number, "random_state": state, **more})
        try:
            answers = [own(state)]
        except LostPeerError as e:
            raise self._executor.first_failure() or e from e
        answers += self._executor.answers()
        drawn = next((answer["random_state"] for answer in answers if answer["random_state"] is not None), None)
        if drawn is not None:
            self.random_device.set_random_state(decoded(drawn))
        return answers

    def _by_group(self, values: Sequence[T]) -> tuple[T, ...]:
        return tuple(max(values[rank] for rank in members) for members in self._share.plan.groups)


class GroupedExecutor:
    """Runs the timeline of a plan on groups as such, and any other as the process executor does.

    Raises PlanError where the plan says of a call that it is on several groups.
    """

    shared_memory = False

    def __init__(self, executor: ProcessExecutor, result: HybridResult, plan: HybridPlan) -> None:
        self._executor = executor
        self.plan, self.timeline = plan, result.timeline
        self._calls = CallPlan.of(plan, result.timeline)
        self._fingerprint = plan.graph.fingerprint
        self.devices = executor.devices
        self.timeout_seconds = executor.timeout_seconds
        self.call = executor.call
        self.memory_bytes = executor.memory_bytes
        self.cpu_seconds = executor.cpu_seconds
        self.probe_link = executor.probe_link
        self.keep_busy = executor.keep_busy
        self.command = executor.group.command
        self.answers = executor.group.answers
        self.first_failure = executor.group.first_failure
        self.clock_ahead = executor.clock_ahead

    def load(self, timeline: Timeline, binding: Binding, step: TrainingStep, *, keep_gradients: bool = False) -> Any:
        """See ProcessExecutor.load. Gradients of a plan on groups are always kept."""
        if timeline is not self.timeline:
            return self._executor.load(timeline, binding, step, keep_gradients=keep_gradients)
        return self._load(step, exact=False)

    def check_parity(self, step: TrainingStep) -> Parity:
        """Compares loss, gradients and buffers of one step on groups, in double precision, with those of the step run whole."""
        random = torch.get_rng_state()
        placed = self._load(step, exact=True)
        torch.manual_seed(step.seed)
        loss, _ = placed.run()
        gradients, state = placed.gather()
        buffers = [name for name, _ in step.module.named_buffers()]
        actual = {"loss": loss} | {f"{GRADIENT}{n}": g for n, g in gradients.items()} | {n: state[n] for n in buffers}
        whole = in_double(step)
        torch.manual_seed(step.seed)
        loss = whole.module(*whole.inputs)
        loss.backward()
        torch.set_rng_state(random)
        learned = {n: p for n, p in whole.module.named_parameters() if n in gradients}
        expected = {f"{GRADIENT}{n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in learned.items()}
        expected |= {"loss": loss} | dict(whole.module.named_buffers())
        return compare_exact({n: v.detach() for n, v in expected.items()}, actual)

    def _load(self, step: TrainingStep, *, exact: bool) -> GroupedStep:
        group = self._executor.group
        command = {"do": "load_groups", "fingerprint": self._fingerprint, "plan": self._calls.to_json(), "exact": exact}
        number = self._executor.begin_load(command)
        share = GroupShare(group, self.devices[0], self._calls, step, exact=exact)
        self.answers()
        placed = GroupedStep(self, share, number)
        self._executor.live.add(placed)
        return placed
