"""Which runs of ops become graphs, and what crosses their borders."""

from hypothesis import given
from hypothesis import strategies as st

from baechi_runtime.torch.lowering.graph_pieces import Access, Piece, Unit, pieces


def unit(reads: set[int], fills: set[int], *, head: set[int] | None = None, tail: set[int] | None = None, capturable: bool = True) -> Unit:
    """`head`: the slots it takes in first; `tail`: those it sends after."""
    taken = None if head is None else Access(fills=frozenset(head))
    sent = None if tail is None else Access(reads=frozenset(tail))
    return Unit(taken, Access(frozenset(reads), frozenset(fills)), sent, capturable)


def test_a_program_without_transfers_is_one_graph() -> None:
    assert pieces([unit(set(), {0}), unit({0}, {1}), unit({1}, {2})], kept={2}) == (Piece(0, 3, True, (), (2,)),)


def test_transfers_end_and_begin_graphs() -> None:
    """0 and 1, which is sent; 2 alone; 3 takes in 9, which 4 reads, too."""
    program = [unit(set(), {0}), unit({0}, {1}, tail={1}), unit({0}, {2}), unit({2, 9}, {3}, head={9}), unit({3, 9}, {4})]
    program += [unit({4}, {5}), unit({5}, {6})]
    assert pieces(program) == (Piece(0, 2, True, (), (0, 1)), Piece(2, 3, False), Piece(3, 7, True, (2, 9)))


def test_a_graph_that_saves_no_launch_is_none() -> None:
    """Three ops that copy two tensors in take as many launches as a graph; four do not."""
    three = [unit({8}, {0}, head={8, 9}), unit({9}, {1}), unit({0, 1}, {2})]
    assert [p.captured for p in pieces(three)] == [False]
    assert pieces([*three, unit({2}, {3})]) == (Piece(0, 4, True, (8, 9)),)


def test_what_a_piece_copies_later_ones_read_there() -> None:
    program = [unit({9}, {0}, head={9}), unit({0}, {1}), unit({1}, {2}, tail={2}), unit({9}, {3}), unit({3}, {4})]
    assert pieces(program) == (Piece(0, 3, True, (9,), (2,)), Piece(3, 5, True))


def test_ops_that_cannot_be_captured_stand_between_graphs() -> None:
    program = [unit(set(), {0}), unit({0}, {1}), unit({1}, {2}, capturable=False), unit({0, 2}, {3}), unit({3}, {4}), unit({4}, {5})]
    assert pieces(program) == (Piece(0, 2, True, (), (1,)), Piece(2, 3, False), Piece(3, 6, True, (2,)))


def test_only_what_others_hold_is_emptied_after_a_graph() -> None:
    freeing = Unit(None, Access(frozenset({0, 9}), frozenset({1}), frozenset({0, 9})), None, True)
    program = [unit({9}, {0}, head={9}), freeing, unit({1}, {2})]
    assert pieces(program) == (Piece(0, 3, True, (9,), (), (9,)),)


@st.composite
def programs(draw: st.DrawFn) -> list[Unit]:
    """Each unit fills the slot of its number, and may take in slot 100 + number; it reads anything there is."""
    found: list[Unit] = []
    there: list[int] = []
    for i in range(draw(st.integers(1, 25))):
        head = {100 + i} if draw(st.integers(0, 4)) == 0 else None
        there += sorted(head or ())
        reads = set(draw(st.lists(st.sampled_from(there), max_size=3))) if there else set()
        there.append(i)
        tail = set(draw(st.lists(st.sampled_from(there), min_size=1, max_size=2))) if draw(st.integers(0, 4)) == 0 else None
        found.append(unit(reads, {i}, head=head, tail=tail, capturable=draw(st.integers(0, 5)) > 0))
    return found


def value(i: int, inputs: list[int]) -> int:
    return hash((i, *inputs))


def op_by_op(units: list[Unit]) -> list[tuple[int, int]]:
    """(slot, value) of all that is sent."""
    slots: dict[int, int] = {}
    sent = []
    for i, u in enumerate(units):
        slots |= {slot: value(slot, []) for slot in (u.head.fills if u.head else ())}
        slots[i] = value(i, [slots[r] for r in sorted(u.body.reads)])
        sent += [(slot, slots[slot]) for slot in sorted(u.tail.reads if u.tail else ())]
    return sent


def by_graphs(units: list[Unit], found: tuple[Piece, ...]) -> list[tuple[int, int]]:
    """The same where graphs see only fixed places, and the others only slots."""
    slots: dict[int, int] = {}
    fixed: dict[int, int] = {}
    sent = []
    for piece in found:
        for i in range(piece.first, piece.end):
            u = units[i]
            slots |= {slot: value(slot, []) for slot in (u.head.fills if u.head else ())}
            if piece.captured and i == piece.first:
                fixed |= {slot: slots[slot] for slot in piece.copied}
            place = fixed if piece.captured else slots
            place[i] = value(i, [place[r] for r in sorted(u.body.reads)])
            if piece.captured and i == piece.end - 1:
                slots |= {slot: fixed[slot] for slot in piece.handed_out}
            sent += [(slot, slots[slot]) for slot in sorted(u.tail.reads if u.tail else ())]
    return sent


@given(programs())
def test_everybody_finds_what_they_read(units: list[Unit]) -> None:
    found = pieces(units)
    assert [i for p in found for i in range(p.first, p.end)] == list(range(len(units)))
    for piece in found:
        inner = units[piece.first : piece.end]
        assert not piece.captured or all(u.capturable for u in inner)
        assert not piece.captured or all(a.tail is None and b.head is None for a, b in zip(inner, inner[1:], strict=False))
        assert not piece.captured or len(inner) > 1 + len(piece.copied)
    assert by_graphs(units, found) == op_by_op(units)
