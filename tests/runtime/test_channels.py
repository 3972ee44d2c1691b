"""When receives are posted: as early as memory allows, never later than they must be."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.channels import early_posts

COMING = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=12).map(sorted)


@given(COMING, st.integers(0, 40))
def test_early_receives_fit_into_the_room_there_is(coming: list[tuple[int, int]], room: int) -> None:
    latest, sizes = [c[0] for c in coming], [c[1] for c in coming]
    posts = early_posts(latest, sizes, room)
    assert all(0 <= early <= late for early, late in zip(posts, latest, strict=True))
    for now in range(8):
        held = sum(size for early, late, size in zip(posts, latest, sizes, strict=True) if early <= now < late)
        assert held <= room


def test_all_are_posted_at_the_start_where_there_is_room() -> None:
    assert early_posts([3, 5, 9], [10, 10, 10], float("inf")) == [0, 0, 0]
    assert early_posts([3, 5, 9], [10, 10, 10], 30) == [0, 0, 0]


def test_a_window_moves_along_where_there_is_less() -> None:
    assert early_posts([3, 5, 9, 12], [10, 10, 10, 10], 20) == [0, 0, 3, 5]
    assert early_posts([3, 5, 9], [10, 50, 10], 20) == [0, 5, 5]
    assert early_posts([3, 5, 9], [10, 10, 10], 0) == [3, 5, 9]
    assert early_posts([], [], 0) == []
