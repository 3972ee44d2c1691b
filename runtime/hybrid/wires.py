"""What crosses from group to group: each member sends its part to the one in its own place, and gets the gradient back from there."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import fx

from baechi_ext.errors import ExecutionError
from runtime.hybrid.program import Programs
from runtime.processes.channels import Going, LostPeerError

Key = tuple[fx.Node, int, bool]
"""A value, the group it goes to, and whether this is its gradient, which goes the other way."""


class Wires:
    """One process's ends of all transfers of a step, told apart by tags; it is member `place` of group `group`. `part` is an empty tensor
    for a part of a value."""

    def __init__(self, programs: Programs, group: int, place: int, part: Callable[[fx.Node], torch.Tensor], timeout_seconds: float) -> None:
        self._members = [members[place] for members in programs.plan.groups]
        self._part = part
        self._timeout = timedelta(seconds=timeout_seconds)
        self._tags = {key: tag for tag, key in enumerate((*crossing, back) for crossing in programs.crossing for back in (False, True))}
        self._home = {node: programs.home(node) for node, _ in programs.crossing}
        self._awaited = [(node, target, False) for node, target in programs.crossing if target == group]
        self._returned = [(node, target, True) for node, target in programs.crossing if self._home[node] == group]
        self._returned = [key for key in self._returned if key[:2] in programs.returned]
        self._coming: dict[Key, tuple[torch.Tensor, dist.Work]] = {}
        self._going = Going(self._timeout)
        self.sent_bytes = 0
        """Since the last step began."""

    def begin(self) -> None:
        """Gets ready for what comes forward: a send ends when its receive is there."""
        self.sent_bytes = 0
        self._coming.clear()
        self._post(self._awaited)

    def turn(self) -> None:
        """Gets ready for the gradients."""
        self._post(self._returned)

    def give(self, key: Key, value: torch.Tensor) -> None:
        """Sends a part, without waiting."""
        node, target, back = key
        value = value.detach().contiguous()
        self.sent_bytes += value.nbytes
        work = dist.isend(value.view(-1), self._members[self._home[node] if back else target], tag=self._tags[key])
        if work is None:
            raise ExecutionError(f"{node.name} can't be sent from a process to itself; the plan is broken")
        self._keep(key, value, work)

    def take(self, key: Key) -> torch.Tensor:
        """Waits for a part. Raises LostPeerError where it does not come in time."""
        value, work = self._coming.pop(key)
        try:
            work.wait(self._timeout)
        except RuntimeError as e:
            node, target, back = key
            what = f"the gradient of {node.name}" if back else node.name
            source = self._members[target if back else self._home[node]]
            reason = str(e).splitlines()[0][-120:]
            raise LostPeerError(f"waited in vain for {what} from device {source} ({reason}); see whether that worker still runs") from e
        return value

    def finish(self) -> None:
        """Waits until all that was sent has arrived."""
        try:
            self._going.drain()
        except RuntimeError as e:
            raise LostPeerError(f"could not send a tensor ({str(e).splitlines()[0][-120:]}); see whether all workers still run") from e

    def _keep(self, key: Key, value: torch.Tensor, work: dist.Work) -> None:
        """Holds what is being sent until it has arrived."""
        self._going.add(value, work)

    def _post(self, keys: list[Key]) -> None:
        for key in keys:
            node, target, back = key
            value = self._part(node)
            work = dist.irecv(value.view(-1), self._members[target if back else self._home[node]], tag=self._tags[key])
            if work is None:
                raise ExecutionError(f"{node.name} can't come from the process it goes to; the plan is broken")
            self._coming[key] = value, work
