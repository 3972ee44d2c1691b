"""Channels: the ways of a placed step's tensors from one worker process to another; the classes differ in what carries them."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.errors import ExecutionError
from baechi_ext.simulate import Timeline, Transfer
from baechi_runtime.torch.lowering.ops import TOKEN, Exchange
from baechi_runtime.torch.processes.worker_group import WorkerGroup


class LostPeerError(ExecutionError):
    """A transfer failed because its other end is gone or late: an echo of what happened there."""


@dataclass(frozen=True)
class Phase:
    """A part of a step that is run by itself: its ops, and those that may read what it sends."""

    ops: Collection[int]
    readers: Collection[int]


class Channels(Exchange):
    """One worker's ends of all transfers of one placed step, or of one phase of it; see `Exchange`."""

    at_start: Sequence[Callable[[Any], None]] = ()
    """Receives to post before the program begins, where it has no op to post them before."""
    pre_hooks: Mapping[int, tuple[Callable[[Any], None], ...]] = {}
    """Op -> the receives to post before it."""
    extra_bytes = 0
    """Bytes that are kept for received tensors beyond the time for which the plan has them in memory."""

    def __init__(self, timeline: Timeline, binding: Binding, group: WorkerGroup, phase: Phase | None = None) -> None:
        self._rank = group.rank
        self._whereabouts = group.whereabouts
        self._timeout = timedelta(seconds=group.timeout_seconds)
        self._timeline = timeline
        self._phase = phase
        self._ids = [op.id for op in timeline.graph.ops]
        self._tensors = timeline.graph.tensors
        self._placement = timeline.placement
        nodes = {key: node for node, key in binding.home.items()}
        keys = [(tensor.producer, tensor.name) for tensor in self._tensors]
        self._meta = {t: nodes[key].meta["val"] for t, key in enumerate(keys) if key in nodes}

    @abstractmethod
    def finish(self) -> float:
        """Waits until all that was sent has arrived. Returns the microseconds of the step by which the device's own clock ran on while the
        device waited for tensors."""

    def _coming_to(self, target: int) -> list[Transfer]:
        """The transfers to a device, in the phase."""
        return [x for x in self._timeline.transfers if x.target == target and (self._phase is None or self._is_in(self._phase, x))]

    def _is_in(self, phase: Phase, transfer: Transfer) -> bool:
        tensor = self._tensors[transfer.tensor]
        read = any(self._placement[r] == transfer.target and r in phase.readers for r in tensor.readers)
        # An order that crosses devices moves nothing; see in_phases.
        return read and tensor.producer in phase.ops and transfer.tensor in self._meta

    def _like(self, tensor: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """A tensor as it is in the graph, and the strides with which it is sent: those, or without gaps where it is part of something
        larger there."""
        like = self._meta.get(tensor, TOKEN)
        return like, torch.empty_like(torch.empty_strided(like.size(), like.stride(), device="meta")).stride()

    def _in_vain(self, tensor: int, reason: str) -> LostPeerError:
        """The error to raise where a tensor does not come."""
        producer = self._tensors[tensor].producer
        source = self._placement[producer]
        return LostPeerError(
            f"device {self._rank} gave up waiting for the output of op {self._ids[producer]!r} from device {source} "
            f"({reason}){self._whereabouts(source)}; check whether that worker still runs, or raise --timeout"
        )

    def _unsent(self, reason: str) -> LostPeerError:
        """The error to raise where a tensor can't be sent."""
        return LostPeerError(f"device {self._rank} could not send a tensor ({reason}); check whether all workers still run")


def in_order_of_ends(timeline: Timeline) -> list[int]:
    """The ops as they are predicted to end: a topological order, and on each device the order of its program."""
    return sorted(timeline.started, key=timeline.end_us.__getitem__)


def reason(error: RuntimeError) -> str:
    """The end of an error's message."""
    return str(error).splitlines()[0][-120:]
