"""The kind of call that takes turns, of those that one module or training step has: the first one, until it comes no more. All others go
along with it."""

from collections.abc import Callable
from typing import Protocol

from baechi_runtime.measure.turns import GONE, PLACED, Turns


class Kind(Protocol):
    """Calls of one kind, which run by one plan."""

    turns: Turns
    mode: str
    """PLACED or PLAIN: what runs the step under way."""

    @property
    def calls(self) -> int:
        """Placed calls so far."""


class Lead:
    """The lead among kinds of calls."""

    def __init__(
        self,
        settle: Callable[[], object],
        *,
        verify_steps: int,
        keep_placed: bool,
        agree: Callable[[Turns, str], str] | None = None,
    ) -> None:
        """`settle` waits for the devices. `agree` gives the mode that several processes agree on, where there are several."""
        self._settle = settle
        self._verify_steps, self._keep_placed = verify_steps, keep_placed
        self._agree = agree
        self._kind: Kind | None = None
        self._without = 0  # steps of others since the last one of the lead

    @property
    def turns(self) -> Turns:
        """The lead's turns; new ones where no step has begun."""
        return Turns() if self._kind is None else self._kind.turns

    def begin_step(self, kind: Kind) -> str:
        """Choose what runs the step that this kind of call begins. Returns PLACED or PLAIN where it is decided for good with it."""
        lead = self._of(kind)
        if self._keep_placed:
            is_timed = kind is lead and kind.calls >= self._verify_steps
            kind.mode = lead.turns.begin(self._settle) if is_timed else PLACED
        elif kind is not lead:
            kind.mode = lead.mode
        elif kind.calls >= self._verify_steps:
            return self._turn(kind)
        return ""

    def leave(self) -> None:
        """Leave the timing of steps to others."""
        self.turns.leave()

    def disturb(self) -> None:
        """Discard the time of the step under way, here and where steps are timed: something else was done in it."""
        self.turns.disturb_all()

    def _of(self, kind: Kind) -> Kind:
        """The lead of a step that this kind begins: the kind itself, where the lead's does not come any more."""
        lead = self._kind = self._kind or kind
        self._without = 0 if kind is lead else self._without + 1
        if self._without <= GONE or lead.turns.decided or self._keep_placed:
            return lead
        lead.turns.leave()
        kind.turns.disturbed()
        self._kind, self._without, kind.mode = kind, 0, PLACED
        return kind

    def _turn(self, kind: Kind) -> str:
        turns = kind.turns
        if known := turns.now():
            kind.mode = known
            return ""
        if not turns.join() and self._agree is None:
            kind.mode = turns.meanwhile
            return ""
        kind.mode = turns.begin(self._settle)
        if self._agree is not None:
            kind.mode = self._agree(turns, kind.mode)
        if turns.decided or turns.rest:
            turns.leave()
        return turns.decided
