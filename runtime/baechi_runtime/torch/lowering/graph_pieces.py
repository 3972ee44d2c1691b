"""Where a device's program can be replayed as CUDA graphs: the runs of ops between its transfers, and what crosses their borders.

A graph works on tensors of fixed addresses. What the rest of the program makes (received tensors, the step's inputs) is copied into
fixed ones before the first graph that reads it; what the rest of the program reads of a graph's tensors is handed out after it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Access:
    """The slots that some actions read, fill and empty; each slot is filled once a step."""

    reads: frozenset[int] = frozenset()
    fills: frozenset[int] = frozenset()
    empties: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Unit:
    """One op of a program: what takes tensors in before it, the op itself, and what gives tensors away after it (None: nothing does)."""

    head: Access | None
    body: Access
    tail: Access | None
    capturable: bool
    num_ops: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Units from `first` up to `end`; their bodies are one graph, or all of it runs op by op."""

    first: int
    end: int
    captured: bool
    copied: tuple[int, ...] = ()
    """Captured: the slots to copy into fixed tensors before it."""
    handed_out: tuple[int, ...] = ()
    """Captured: the slots to fill after it, for those who read them outside of graphs."""
    emptied: tuple[int, ...] = ()
    """Captured: the slots to empty after it."""


def pieces(units: Sequence[Unit], kept: Collection[int] = ()) -> tuple[Piece, ...]:
    """All units in order. `kept` are the slots that are read after the program.

    Starting a graph is a launch, and so is each copy into it: a run of ops is a graph where that takes fewer launches than its ops do,
    which launch at least one kernel each.
    """
    found = _runs(units)
    while True:
        found = _with_borders(units, found, frozenset(kept))
        lasting = [replace(p, captured=p.captured and _pays(units, p)) for p in found]
        if [p.captured for p in lasting] == [p.captured for p in found]:
            return tuple(found)
        # What is no graph any more makes others copy more; so this ends.
        found = lasting


def _runs(units: Sequence[Unit]) -> list[Piece]:
    found: list[Piece] = []
    for i, unit in enumerate(units):
        last = found[-1] if found else None
        together = last is not None and last.captured == unit.capturable
        if together and unit.capturable:
            together = unit.head is None and units[i - 1].tail is None
        if together and last is not None:
            found[-1] = replace(last, end=i + 1)
        else:
            found.append(Piece(i, i + 1, unit.capturable))
    return found


def _pays(units: Sequence[Unit], piece: Piece) -> bool:
    return sum(unit.num_ops for unit in units[piece.first : piece.end]) > 1 + len(piece.copied)


def _with_borders(units: Sequence[Unit], found: Sequence[Piece], kept: frozenset[int]) -> list[Piece]:
    captured = [units[i].body for p in found if p.captured for i in range(p.first, p.end)]
    fixed = set(_union(body.fills for body in captured))
    outside = list(_outside(units, found))
    read_outside = _union(access.reads for access in outside) | kept
    filled_outside = _union(access.fills for access in outside)
    bordered = []
    for piece in found:
        if piece.captured:
            bodies = [unit.body for unit in units[piece.first : piece.end]]
            fills, reads = _union(b.fills for b in bodies), _union(b.reads for b in bodies)
            empties = _union(b.empties for b in bodies)
            copied = (reads & filled_outside) - fixed
            fixed |= copied
            piece = replace(
                piece,
                copied=tuple(sorted(copied)),
                handed_out=tuple(sorted(fills & read_outside)),
                emptied=tuple(sorted(empties & (filled_outside | read_outside))),
            )
        bordered.append(piece)
    return bordered


def _outside(units: Sequence[Unit], found: Sequence[Piece]) -> Iterable[Access]:
    """The accesses made op by op, outside of graphs."""
    for piece in found:
        for unit in units[piece.first : piece.end]:
            parts = (unit.head, unit.tail) if piece.captured else (unit.head, unit.body, unit.tail)
            yield from (access for access in parts if access is not None)


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)
