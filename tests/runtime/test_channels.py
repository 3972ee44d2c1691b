"""When receives are posted: with tags as early as memory allows, without them in the order of the sends."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.simulate import Timeline, simulate
from baechi_runtime.torch.lowering.program import Receive, Run, Send, cut
from baechi_runtime.torch.processes.channels import early_pre_hooks, ordered_pre_hooks
from tests.runtime.test_program import placed_graphs

COMING = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=12).map(sorted)


@given(COMING, st.integers(0, 40))
def test_early_receives_fit_into_the_room_there_is(coming: list[tuple[int, int]], room: int) -> None:
    latest, sizes = [c[0] for c in coming], [c[1] for c in coming]
    pre_hooks = early_pre_hooks(latest, sizes, room)
    assert all(0 <= early <= late for early, late in zip(pre_hooks, latest, strict=True))
    for now in range(8):
        held = sum(size for early, late, size in zip(pre_hooks, latest, sizes, strict=True) if early <= now < late)
        assert held <= room


def test_all_are_posted_at_the_start_where_there_is_room() -> None:
    assert early_pre_hooks([3, 5, 9], [10, 10, 10], float("inf")) == [0, 0, 0]
    assert early_pre_hooks([3, 5, 9], [10, 10, 10], 30) == [0, 0, 0]


def test_a_window_moves_along_where_there_is_less() -> None:
    assert early_pre_hooks([3, 5, 9, 12], [10, 10, 10, 10], 20) == [0, 0, 3, 5]
    assert early_pre_hooks([3, 5, 9], [10, 50, 10], 20) == [0, 5, 5]
    assert early_pre_hooks([3, 5, 9], [10, 10, 10], 0) == [3, 5, 9]
    assert early_pre_hooks([], [], 0) == []


def ends_of(timeline: Timeline, rank: int) -> list[tuple[int, int, int]]:
    """The (tensor, source, target) of this rank's ends of transfers as it starts them; every receive before its first use."""
    pre_hooks, placement = ordered_pre_hooks(timeline, rank), timeline.placement
    ends: list[tuple[int, int, int]] = []
    needed: list[tuple[int, int, int]] = []
    for instruction in cut(timeline)[rank]:
        match instruction:
            case Receive(tensor=t, source=source):
                needed.append((t, source, rank))
            case Run(op=v):
                ends += [(t, placement[timeline.graph.tensors[t].producer], rank) for t in pre_hooks.get(v, ())]
                assert set(needed) <= set(ends)
            case Send(tensor=t, target=target):
                ends.append((t, rank, target))
    assert sorted(needed) == sorted(e for e in ends if e[2] == rank)
    return ends


@given(placed_graphs(), st.sampled_from([Link(0, 1), Link(0.5, 0), Link(0.01, 2, send_us=3, receive_us=1)]))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_without_tags_no_ranks_wait_in_a_circle(case: tuple[OpGraph, int, list[int], list[int]], link: Link) -> None:
    """Where every end of a transfer blocks its rank until the other end is there, all ranks still come to their end."""
    graph, k, placement, priority = case
    timeline = simulate(graph, Cluster.uniform(k, link=link), placement, priority)
    ends = [ends_of(timeline, rank) for rank in range(k)]
    while any(ends):
        ready = [own[0] for rank, own in enumerate(ends) if own and own[0][1] == rank and ends[own[0][2]][:1] == own[:1]]
        assert ready
        for transfer in ready:
            for rank in transfer[1:]:
                assert ends[rank].pop(0) == transfer
