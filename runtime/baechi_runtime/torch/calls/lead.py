"""The kind of call of a session that takes turns: the first one, until it comes no more. All others go along with it."""

from collections.abc import Sequence

from baechi_runtime.torch.calls.fragments import PlacedGroup, Settings
from baechi_runtime.torch.calls.turns import GONE, PLACED, PLAIN, Turns, disturb
from baechi_runtime.torch.calls.workers import Workers


class Lead:
    """The lead among `groups`, to which a session adds."""

    def __init__(self, settings: Settings, groups: Sequence[PlacedGroup]) -> None:
        self._settings = settings
        self._groups = groups
        self._group: PlacedGroup | None = None
        self._without = 0  # steps of others since the last one of the lead

    @property
    def turns(self) -> Turns:
        """The lead's turns; new ones where no step has begun."""
        return Turns() if self._group is None else self._group.turns

    def begin_step(self, group: PlacedGroup) -> str:
        """Choose what runs the step that this group begins. Returns PLACED or PLAIN where that is decided for good with it, or else ''."""
        lead, settings = self._of(group), self._settings
        if settings.keep_placed:
            is_timed = group is lead and group.calls >= settings.verify_steps
            group.mode = lead.turns.begin(settings.executor.devices) if is_timed else PLACED
        elif group is not lead:
            group.mode = lead.mode
        elif group.calls >= settings.verify_steps:
            return self._turn(group)
        return ""

    def leave(self) -> None:
        """Leave the timing of steps to other sessions."""
        self.turns.leave()

    def disturb(self) -> None:
        """Discard the time of the step under way, here and in the session whose steps are timed: something else was done in it."""
        disturb([self.turns])

    def _of(self, group: PlacedGroup) -> PlacedGroup:
        """The lead of a step that this group begins: the group itself, where the lead's kind of call does not come any more."""
        lead = self._group = self._group or self._groups[0]
        self._without = 0 if group is lead else self._without + 1
        if self._without <= GONE or lead.turns.decided or self._settings.keep_placed:
            return lead
        lead.turns.leave()
        group.turns.disturbed()
        self._group, self._without, group.mode = group, 0, PLACED
        return group

    def _turn(self, group: PlacedGroup) -> str:
        turns = group.turns
        if known := turns.now():
            group.mode = known
            return ""
        if not turns.join() and not isinstance(self._settings.executor, Workers):
            group.mode = turns.meanwhile
            return ""
        group.mode = self._agreed(turns, turns.begin(self._settings.executor.devices))
        if turns.decided or turns.rest:
            turns.leave()
        return turns.decided

    def _agreed(self, turns: Turns, mode: str) -> str:
        """Worker 0's mode, where there are several; `turns` get to know whether it is decided there, or rests."""
        workers = self._settings.executor
        if not isinstance(workers, Workers):
            return mode
        placed, decided, turns.rest = workers.as_worker_0(mode == PLACED, bool(turns.decided), turns.rest)
        mode = PLACED if placed else PLAIN
        turns.decided = mode if decided else ""
        return mode
