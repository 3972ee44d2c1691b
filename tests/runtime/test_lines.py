"""Lines between the workers of one machine, and channels through the memory that they share."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import fx

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.simulate import Timeline, simulate
from baechi_runtime.torch.lowering.devices import TorchDevice, cpu_workers
from baechi_runtime.torch.lowering.ops import TOKEN
from baechi_runtime.torch.processes.channels import LostPeerError, Phase, PostedChannels, SharedChannels, channels_of
from baechi_runtime.torch.processes.crash_log import CrashLog
from baechi_runtime.torch.processes.lines import Lines, LostLineError
from baechi_runtime.torch.processes.worker_group import WorkerGroup
from tests.build import cluster_of, graph_of

SIZE, SECONDS = 3, 20.0


def on_all(function: Callable[[int], Any], count: int = SIZE) -> list[Any]:
    """The function's result for each rank, all run at the same time."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result(60.0) for future in [pool.submit(function, rank) for rank in range(count)]]


@pytest.fixture
def lines() -> Iterator[list[Lines]]:
    store = dist.HashStore()
    found = on_all(lambda rank: Lines.join(store, rank, SIZE, SECONDS))
    yield found
    for one in found:
        one.close()


def test_messages_are_told_apart_by_sender_channel_and_number(lines: list[Lines]) -> None:
    for sender, channel, number in [(1, 1, 7), (2, 1, 7), (1, 2, 7), (1, 1, 8)]:
        lines[sender].tell(0, channel, number)
    for sender, channel, number in [(1, 1, 8), (1, 2, 7), (2, 1, 7), (1, 1, 7)]:
        lines[0].wait(sender, channel, number)
    with pytest.raises(LostLineError, match=r"nothing came for 0\.1 s"):
        lines[0].wait(1, 1, 7, 0.1)


def test_two_who_send_more_than_a_pipe_holds_do_not_wait_in_a_circle(lines: list[Lines]) -> None:
    many = 30_000

    def send_all_then_read_all(rank: int) -> None:
        other = 1 - rank
        for number in range(many):
            lines[rank].tell(other, 1, number)
        for number in reversed(range(many)):
            lines[rank].wait(other, 1, number)

    on_all(send_all_then_read_all, 2)


def test_three_who_wait_for_each_other_take_in_what_others_send(lines: list[Lines]) -> None:
    """Worker 1 can't go on to what worker 0 waits for while worker 2, which waits for worker 0, leaves its pipe full."""
    many = 30_000

    def play(rank: int) -> None:
        if rank == 0:
            lines[0].wait(1, 1, 0)
            lines[0].tell(2, 1, 0)
        elif rank == 1:
            for number in range(many):
                lines[1].tell(2, 1, number)
            lines[1].tell(0, 1, 0)
        else:
            lines[2].wait(0, 1, 0)
            for number in range(many):
                lines[2].wait(1, 1, number)

    on_all(play)


def test_the_end_of_another_one_is_no_matter(lines: list[Lines]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lines[0].wait, 1, 1, 1)
        lines[2].close()
        lines[1].tell(0, 1, 1)
        waits.result(SECONDS)


def test_who_takes_nothing_is_late(lines: list[Lines]) -> None:
    lines[0].timeout_seconds = 0.2
    with pytest.raises(LostLineError, match=r"worker 1 took nothing for 0\.2 s"):
        for number in range(30_000):
            lines[0].tell(1, 1, number)


def test_the_end_of_a_worker_is_noticed(lines: list[Lines]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lines[0].wait, 1, 1, 1)
        lines[1].close()
        with pytest.raises(LostLineError, match="worker 1 is gone"):
            waits.result(SECONDS)
    with pytest.raises(LostLineError, match="worker 1 is gone"):
        lines[2].tell(1, 1, 1)
    lines[2].tell(0, 1, 1)
    lines[0].wait(2, 1, 1)


def test_workers_that_see_other_processes_have_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one has none, nobody has, and no descriptor stays open."""
    module = "baechi_runtime.torch.processes.lines._place"
    before, numbers = set(os.listdir("/proc/self/fd")), iter(range(100))
    monkeypatch.setattr(module, lambda: f"another machine {next(numbers)}")
    store = dist.HashStore()
    assert on_all(lambda rank: Lines.join(store, rank, SIZE, SECONDS)) == [None] * SIZE
    assert set(os.listdir("/proc/self/fd")) == before


def timeline_there_and_back(memory_bytes: float | None = None) -> Timeline:
    """Three ops in a row on devices 0, 1 and 0: tensors 0 and 1 are sent."""
    graph = graph_of({"a": 1.0, "b": 1.0, "c": 1.0}, ("a", "b", 1), ("b", "c", 1))
    return simulate(graph, cluster_of(2, memory_bytes=memory_bytes), [0, 1, 0], [0, 1, 2])


def group_of(lines: Lines | None, rank: int) -> WorkerGroup:
    where = lambda _: " (it was last seen here)"  # noqa: E731
    return cast(WorkerGroup, SimpleNamespace(rank=rank, size=2, lines=lines, whereabouts=where, timeout_seconds=SECONDS, tagged=True))


def channels(timeline: Timeline, phase: Phase | None = None) -> list[SharedChannels]:
    """Both workers' ends."""
    store = dist.HashStore()
    joined = on_all(lambda rank: Lines.join(store, rank, 2, SECONDS), 2)
    node = fx.Graph().placeholder("first")
    node.meta["val"] = TOKEN
    binding = cast(Binding, SimpleNamespace(home={node: (0, timeline.graph.tensors[0].name)}))
    return on_all(lambda rank: SharedChannels(timeline, binding, group_of(joined[rank], rank), joined[rank], phase), 2)


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.uint8)


def test_a_place_is_written_again_when_the_run_of_its_reader_is_over() -> None:
    first, second = channels(timeline_there_and_back())
    give, take = first.giver(0, 1), second.taker(0, 1)
    back, home = second.giver(1, 0), first.taker(1, 0)
    with ThreadPoolExecutor(1) as pool:
        give(word(5))
        received = take()
        back(word(6))
        assert home().tolist() == [6]
        first.finish()
        again: Future[None] = pool.submit(give, word(9))
        with pytest.raises(TimeoutError):
            again.result(0.3)
        assert received.tolist() == [5]
        second.finish()
        again.result(SECONDS)
    assert take().tolist() == [9]
    assert received.tolist() == [9]  # the same place


def test_what_a_phase_received_stays() -> None:
    """A later phase may read it after the next run of this one."""
    phase = Phase({0, 1}, {0, 1, 2})
    first, second = channels(timeline_there_and_back(), phase=phase)
    give, take = first.giver(0, 1), second.taker(0, 1)
    give(word(5))
    received = take()
    first.finish()
    second.finish()
    give(word(9))
    assert take().tolist() == [9]
    assert received.tolist() == [5]


def test_a_tensor_that_does_not_come_is_named() -> None:
    first, second = channels(timeline_there_and_back())
    take = second.taker(0, 1)
    first._lines.close()
    with pytest.raises(LostPeerError, match=r"device 1 gave up waiting for the output of op 'a' from device 0 \(worker 0 is gone\)"):
        take()


@pytest.mark.parametrize(("memory_bytes", "kind"), [(None, SharedChannels), (4.0, SharedChannels), (2.0, PostedChannels)])
def test_shared_memory_is_for_plans_that_leave_room_for_it(memory_bytes: float | None, kind: type) -> None:
    timeline = timeline_there_and_back(memory_bytes)
    store = dist.HashStore()
    joined = on_all(lambda rank: Lines.join(store, rank, 2, SECONDS), 2)
    binding, devices = cast(Binding, SimpleNamespace(home={})), cpu_workers(2)

    def of(rank: int) -> object:
        device: TorchDevice = devices[rank]
        return channels_of(timeline, binding, group_of(joined[rank], rank), device)

    assert [type(found) for found in on_all(of, 2)] == [kind, kind]


def test_descriptors_are_given_back() -> None:
    before = set(os.listdir("/proc/self/fd"))
    pair = channels(timeline_there_and_back())
    for one in pair:
        one._lines.close()
    del pair, one
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_without_a_name_gives_its_descriptor_back() -> None:
    """With the last note on a crash log, and where there is no room for it."""
    before = set(os.listdir("/proc/self/fd"))
    note = CrashLog.make(2).note(0, "op")
    note(None)
    del note
    assert set(os.listdir("/proc/self/fd")) == before
    lines = Lines.join(dist.HashStore(), 0, 1, SECONDS)
    with pytest.raises((OSError, ValueError)):
        lines.pages(1, 1 << 62, [])
    assert set(os.listdir("/proc/self/fd")) == before
