"""Timelines worked out by hand, one for every rule of docs/simulator.md. Times are microseconds, sizes bytes."""


from dataclasses import replace

import pytest

from baechi_ext.errors import PlanError
from baechi_ext.ir import Cluster, Device, Link
from baechi_ext.simulate import Timeline, simulate
from tests.build import cluster_of, graph_of


def starts(timeline: Timeline) -> dict[str, float]:
    return {op.id: us for op, us in zip(timeline.graph.ops, timeline.start_us, strict=True)}


def transfers(timeline: Timeline) -> list[tuple[str, int, float, float]]:
    """(tensor "producer:name", target, start, end) in the order of starts."""
    tensors = timeline.graph.tensors
    return [
        (f"{timeline.graph.ops[tensors[t.tensor].producer].id}:{tensors[t.tensor].name}", t.target, t.start_us, t.end_us)
        for t in timeline.transfers
    ]


# Devices


def test_a_device_runs_one_op_at_a_time() -> None:
    timeline = simulate(graph_of({"a": 2, "b": 3, "c": 4}), cluster_of(2), (0, 0, 1))
    assert timeline.makespan_us == 5
    assert timeline.busy_us == (5, 4)
    assert sorted([timeline.start_us[0], timeline.start_us[1]]) == [0, 3]


@pytest.mark.parametrize(
    ("placement", "message"), [((5,), "op 'a' is placed on device 5; expected 0 to 1"), ((-1,), "device -1"), ((0, 0), "2 entries")]
)
def test_what_is_no_placement_is_refused(placement: tuple[int, ...], message: str) -> None:
    """A device that is not there was written to beyond the end of arrays."""
    with pytest.raises(PlanError, match=message):
        simulate(graph_of({"a": 2}), cluster_of(2), placement)


def test_speed_divides_time() -> None:
    timeline = simulate(graph_of({"a": 6, "b": 6}, ("a", "b", 0)), cluster_of(2, speeds=(2.0, 0.5)), (0, 1))
    assert starts(timeline) == {"a": 0, "b": 3}
    assert timeline.end_us == (3, 15)
    assert timeline.busy_us == (3, 12)


def test_an_empty_graph_takes_no_time() -> None:
    timeline = simulate(graph_of({}), cluster_of(2), ())
    assert (timeline.makespan_us, timeline.busy_us, timeline.peak_memory_bytes) == (0, (0, 0), (0, 0))


def test_ops_of_no_duration_run_in_order_at_one_instant() -> None:
    graph = graph_of({"c": 0, "b": 0, "a": 1}, ("a", "b", 0), ("b", "c", 0))
    timeline = simulate(graph, cluster_of(1), (0, 0, 0))
    assert starts(timeline) == {"a": 0, "b": 1, "c": 1}
    assert timeline.device_order() == ((2, 1, 0),)


# Which ready op an idle device starts


def test_without_priorities_the_earliest_ready_starts_first() -> None:
    # b is ready at 1 (from a), d at 2 (from c, whose transfer takes nothing); e runs on device 0 until 5.
    graph = graph_of(
        {"a": 1, "e": 4, "c": 2, "d": 100, "b": 1},
        ("a", "e", 0), ("a", "b", 0), ("c", "d", 0),
    )  # fmt: skip
    timeline = simulate(graph, cluster_of(2), (0, 0, 1, 0, 0))
    assert starts(timeline) == {"a": 0, "c": 0, "e": 1, "b": 5, "d": 6}


def test_ties_go_to_the_longest_compute_only_path_then_to_file_order() -> None:
    # The paths from a, b and c to the end: 1 + 8, 2 and 2.
    graph = graph_of({"b": 2, "c": 2, "a": 1, "z": 8}, ("a", "z", 50))
    timeline = simulate(graph, cluster_of(2), (0, 0, 0, 1))
    assert starts(timeline) == {"a": 0, "b": 1, "c": 3, "z": 51}


def test_the_path_to_the_end_leaves_speeds_and_transfers_out() -> None:
    # z takes 80 on its slow device and its transfer 500, yet counts 8: b, with 10, goes first.
    graph = graph_of({"a": 1, "b": 10, "z": 8}, ("a", "z", 500))
    timeline = simulate(graph, cluster_of(2, speeds=(1.0, 0.1)), (0, 0, 1))
    assert starts(timeline) == {"b": 0, "a": 10, "z": 511}


def test_the_smallest_priority_starts_first() -> None:
    timeline = simulate(graph_of({"a": 2, "b": 3, "c": 4}), cluster_of(1), (0, 0, 0), (2, -1, 0.5))
    assert starts(timeline) == {"b": 0, "c": 3, "a": 7}


def test_a_device_does_not_wait_for_a_better_op() -> None:
    # b (priority 0) is ready at 1; at 0 only c is.
    timeline = simulate(graph_of({"a": 1, "b": 1, "c": 9}, ("a", "b", 0)), cluster_of(2), (1, 0, 0), (0, 0, 1))
    assert starts(timeline) == {"a": 0, "c": 0, "b": 9}


def test_equal_priorities_go_by_ready_time_then_by_file_order() -> None:
    # While r runs until 5, x becomes ready at 2 and y and w at 1.
    graph = graph_of({"r": 5, "p": 1, "q": 2, "x": 1, "y": 1, "w": 9}, ("p", "y", 0), ("p", "w", 0), ("q", "x", 0))
    timeline = simulate(graph, cluster_of(3), (0, 1, 2, 0, 0, 0), (0, 0, 0, 7, 7, 7))
    assert starts(timeline) == {"r": 0, "p": 0, "q": 0, "y": 5, "w": 6, "x": 15}


def test_all_events_of_an_instant_come_before_its_decisions() -> None:
    # a and b end at 2; u waits for a, v (smaller priority) for b's tensor from the other device, which takes no time.
    graph = graph_of({"a": 2, "b": 2, "u": 1, "v": 1}, ("a", "u", 0), ("b", "v", 0))
    timeline = simulate(graph, cluster_of(2), (0, 1, 0, 0), (0, 0, 2, 1))
    assert starts(timeline) == {"a": 0, "b": 0, "v": 2, "u": 3}


# Transfers


def test_a_transfer_takes_latency_and_time_per_byte() -> None:
    timeline = simulate(graph_of({"a": 2, "b": 3}, ("a", "b", 4)), cluster_of(2, 5, 0.5), (0, 1))
    assert transfers(timeline) == [("a:", 1, 2, 9)]
    assert (timeline.makespan_us, timeline.bytes_moved) == (12, 4)


def test_nothing_is_sent_within_a_device() -> None:
    timeline = simulate(graph_of({"a": 2, "b": 3}, ("a", "b", 4)), cluster_of(2, 5), (1, 1))
    assert (timeline.makespan_us, timeline.transfers) == (5, ())


def test_links_are_directed() -> None:
    cluster = Cluster((Device("x"), Device("y")), Link(latency_us=1), {("y", "x"): Link(latency_us=7)})
    graph = graph_of({"a": 1, "b": 1}, ("a", "b", 0))
    assert simulate(graph, cluster, (0, 1)).makespan_us == 3
    assert simulate(graph, cluster, (1, 0)).makespan_us == 9


def test_a_tensor_is_sent_once_per_destination() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1}, ("a", "b", 10, "t"), ("a", "c", 10, "t"), ("a", "d", 10, "t"))
    timeline = simulate(graph, cluster_of(3), (0, 1, 1, 2))
    assert transfers(timeline) == [("a:t", 1, 1, 11), ("a:t", 2, 11, 21)]
    assert starts(timeline) == {"a": 0, "b": 11, "c": 12, "d": 21}


def test_two_tensors_share_the_outgoing_channel() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 5}, ("a", "b", 10, "t"), ("a", "c", 20, "u"))
    timeline = simulate(graph, cluster_of(3), (0, 1, 2))
    assert transfers(timeline) == [("a:u", 2, 1, 21), ("a:t", 1, 21, 31)]  # c's path is longer than b's


def test_two_senders_share_the_incoming_channel() -> None:
    graph = graph_of({"a": 1, "b": 2, "c": 1, "d": 1}, ("a", "c", 10), ("b", "d", 10))
    timeline = simulate(graph, cluster_of(3), (0, 1, 2, 2))
    assert transfers(timeline) == [("a:", 2, 1, 11), ("b:", 2, 11, 21)]


def test_both_directions_at_once() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1}, ("a", "c", 10), ("b", "d", 10))
    timeline = simulate(graph, cluster_of(2), (0, 1, 1, 0))
    assert sorted(transfers(timeline)) == [("a:", 1, 1, 11), ("b:", 0, 1, 11)]


def test_parallel_transfers_share_nothing() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1}, ("a", "c", 10, "t"), ("a", "d", 20, "u"), ("b", "d", 5))
    timeline = simulate(graph, cluster_of(3, parallel_transfers=True), (0, 1, 2, 2))
    assert sorted(transfers(timeline)) == [("a:t", 2, 1, 11), ("a:u", 2, 1, 21), ("b:", 2, 1, 6)]


def test_the_earliest_request_goes_first() -> None:
    # While x's transfer holds device 0's outgoing channel (1 to 31), y is requested at 2 and z, on the longer path, at 3.
    graph = graph_of({"x": 1, "y": 1, "z": 1, "rx": 1, "ry": 1, "rz": 99}, ("x", "rx", 30), ("y", "ry", 1), ("z", "rz", 1))
    timeline = simulate(graph, cluster_of(2), (0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 0, 0))
    assert transfers(timeline) == [("x:", 1, 1, 31), ("y:", 1, 31, 32), ("z:", 1, 32, 33)]


def test_a_blocked_transfer_holds_nobody_back() -> None:
    # x holds outgoing 0 from 1 to 31. y, from 0 to 2, is requested at 2 and blocked. z, from 3 to 2, is requested at 3 and free.
    graph = graph_of({"x": 1, "y": 1, "z": 3, "rx": 1, "ry": 1, "rz": 1}, ("x", "rx", 30), ("y", "ry", 5), ("z", "rz", 5))
    timeline = simulate(graph, cluster_of(4), (0, 0, 3, 1, 2, 2), (0, 1, 0, 0, 0, 0))
    assert transfers(timeline) == [("x:", 1, 1, 31), ("z:", 2, 3, 8), ("y:", 2, 31, 36)]


def test_a_transfer_needs_both_channels() -> None:
    # x holds outgoing 0 and incoming 1 until 31, z outgoing 2 and incoming 3 until 43; y, from 0 to 3, waits for the later one.
    graph = graph_of({"x": 1, "y": 1, "z": 3, "rx": 1, "ry": 1, "rz": 1}, ("x", "rx", 30), ("y", "ry", 5), ("z", "rz", 40))
    timeline = simulate(graph, cluster_of(4), (0, 0, 2, 1, 3, 3), (0, 1, 0, 0, 0, 0))
    assert transfers(timeline) == [("x:", 1, 1, 31), ("z:", 3, 3, 43), ("y:", 3, 43, 48)]


def test_equal_requests_go_to_the_longest_path_of_a_consumer_there() -> None:
    # t and u are requested at 1. r1 waits for t on device 1 with a path of 2, r2 for u on device 2 with 3; r3 waits for nothing.
    graph = graph_of({"a": 1, "r1": 2, "r2": 3, "r3": 9}, ("a", "r1", 10, "t"), ("a", "r2", 10, "u"), ("a", "r3", 10, "t"))
    timeline = simulate(graph, cluster_of(3), (0, 1, 2, 0))
    assert transfers(timeline) == [("a:u", 2, 1, 11), ("a:t", 1, 11, 21)]


def test_then_to_the_producer_that_stands_first() -> None:
    graph = graph_of({"b": 1, "a": 1, "rb": 1, "ra": 1}, ("a", "ra", 10), ("b", "rb", 10))
    timeline = simulate(graph, cluster_of(3), (0, 1, 2, 2))
    assert transfers(timeline) == [("b:", 2, 1, 11), ("a:", 2, 11, 21)]


def test_then_to_the_device_that_stands_first() -> None:
    graph = graph_of({"a": 1, "r2": 1, "r1": 1}, ("a", "r2", 10, "t"), ("a", "r1", 10, "t"))
    timeline = simulate(graph, cluster_of(3), (0, 2, 1))
    assert transfers(timeline) == [("a:t", 1, 1, 11), ("a:t", 2, 11, 21)]


def test_a_transfer_of_no_length_arrives_at_once_on_a_busy_channel() -> None:
    graph = graph_of({"a": 1, "b": 1, "ra": 1, "rb": 1}, ("a", "ra", 50), ("b", "rb", 0))
    timeline = simulate(graph, cluster_of(2), (0, 0, 1, 1), (0, 1, 0, 0))
    assert transfers(timeline) == [("a:", 1, 1, 51), ("b:", 1, 2, 2)]
    assert starts(timeline)["rb"] == 2


def test_a_channel_is_free_again_at_the_instant_it_ends() -> None:
    # The op b ends exactly when a's transfer does: b's may start then.
    graph = graph_of({"a": 1, "b": 10, "ra": 1, "rb": 1}, ("a", "ra", 10), ("b", "rb", 10))
    timeline = simulate(graph, cluster_of(2), (0, 0, 1, 1), (0, 1, 0, 0))
    assert transfers(timeline) == [("a:", 1, 1, 11), ("b:", 1, 11, 21)]


# What sending and receiving take from the devices

CHARGED = Link(latency_us=5, us_per_byte=1, send_us=2, send_us_per_byte=0.5, receive_us=1, receive_us_per_byte=0.25)


def test_sending_lengthens_the_producer_and_receiving_the_first_reader() -> None:
    cluster = Cluster((Device("x"), Device("y")), CHARGED)
    graph = graph_of({"a": 10, "b": 10, "c": 10}, ("a", "b", 4), ("a", "c", 4))
    timeline = simulate(graph, cluster, (0, 1, 1))
    assert timeline.end_us == (14, 35, 45)  # a: 10 + 2 + 2; arrives at 14 + 9 = 23; b: 10 + 1 + 1; c: 10
    assert timeline.busy_us == (14, 22)


def test_each_destination_and_each_tensor_is_charged() -> None:
    cluster = Cluster((Device("x"), Device("y"), Device("z")), CHARGED)
    graph = graph_of({"a": 10, "b": 10, "c": 10}, ("a", "b", 4, "t"), ("a", "b", 8, "u"), ("a", "c", 4, "t"))
    timeline = simulate(graph, cluster, (0, 1, 2))
    assert timeline.busy_us == (10 + 4 + 4 + 6, 10 + 2 + 3, 10 + 2)


def test_charges_do_not_depend_on_the_devices_speed() -> None:
    cluster = Cluster((Device("x", None, 2.0), Device("y", None, 4.0)), CHARGED)
    timeline = simulate(graph_of({"a": 10, "b": 10}, ("a", "b", 4)), cluster, (0, 1))
    assert timeline.busy_us == (5 + 4, 2.5 + 2)


def test_within_a_device_nothing_is_charged() -> None:
    cluster = Cluster((Device("x"), Device("y")), CHARGED)
    assert simulate(graph_of({"a": 10, "b": 10}, ("a", "b", 4)), cluster, (0, 0)).busy_us == (20, 0)


# The host

HOSTED = Link(latency_us=5, issue_us=7)


def test_no_step_takes_less_than_its_host() -> None:
    graph = graph_of({"a": 10, "b": 10, "c": 10}, ("a", "b", 4), ("a", "c", 4, "u"), issue_us={"a": 4, "b": 8, "c": 8})
    here, apart = (simulate(graph, Cluster((Device("x"), Device("y")), HOSTED), placement) for placement in ((0, 0, 0), (0, 1, 1)))
    assert (here.host_us, here.makespan_us) == (20, 30)
    assert (apart.host_us, apart.makespan_us) == (20 + 7 + 7, 35)  # a to 10, its tensors to 15 and 20; c to 25 or 30
    slow = Cluster((Device("x"), Device("y")), replace(HOSTED, issue_us=20))
    assert simulate(graph, slow, (0, 1, 1)).makespan_us == 60
    assert simulate(graph, slow, (0, 1, 1)).end_us == apart.end_us


# Memory


def test_persistent_bytes_are_held_throughout() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, persistent_bytes={"a": 10, "b": 20, "c": 40})
    assert simulate(graph, cluster_of(3), (0, 0, 1)).peak_memory_bytes == (30, 40, 0)


def test_a_tensor_lives_from_its_producers_start_to_its_last_local_readers_end() -> None:
    # t (100) lives 0 to 3 and u (30) 1 to 4: 130 together. At 3, w (60) starts where t ends: 90.
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1}, ("a", "c", 100, "t"), ("b", "d", 30, "u"), output_bytes={"d": 60})
    timeline = simulate(graph, cluster_of(1), (0, 0, 0, 0), (0, 1, 2, 3))
    assert starts(timeline) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert timeline.peak_memory_bytes == (130,)


def test_what_ends_at_an_instant_is_freed_before_what_starts() -> None:
    # t (100) ends with b at 2, where c's output (90) starts.
    graph = graph_of({"a": 1, "b": 1, "c": 1}, ("a", "b", 100), output_bytes={"c": 90})
    assert simulate(graph, cluster_of(1), (0, 0, 0), (0, 1, 2)).peak_memory_bytes == (100,)


def test_a_sent_tensor_lives_to_the_end_of_its_last_transfer() -> None:
    # t is sent 1 to 11 and 11 to 21. c and d hold 7 each on device 0: c (1 to 21) with t, d (21 to 22) after it.
    graph = graph_of({"a": 1, "r1": 1, "r2": 1, "c": 20, "d": 1}, ("a", "r1", 10, "t"), ("a", "r2", 10, "t"),
                     temporary_bytes={"c": 7, "d": 8})  # fmt: skip
    timeline = simulate(graph, cluster_of(3), (0, 1, 2, 0, 0), (0, 0, 0, 1, 2))
    assert transfers(timeline) == [("a:t", 1, 1, 11), ("a:t", 2, 11, 21)]
    assert timeline.peak_memory_bytes == (17, 10, 10)


def test_a_copy_lives_from_its_transfers_start_to_its_last_reader_there() -> None:
    # The copy (10) arrives on device 1 from 1 to 11 and is read until 12. x (0 to 1) comes before it, y (1 to 5) is with it,
    # z (12 to 13) after it.
    graph = graph_of({"a": 1, "r": 1, "x": 1, "y": 4, "z": 1}, ("a", "r", 10), temporary_bytes={"x": 50, "y": 30, "z": 50})
    timeline = simulate(graph, cluster_of(2), (0, 1, 1, 1, 1), (0, 3, 1, 2, 4))
    assert starts(timeline)["z"] == 5  # work goes on: z does not wait for r
    assert timeline.peak_memory_bytes == (10, 60)
    later = simulate(graph, cluster_of(2), (0, 1, 1, 1, 0), (0, 3, 1, 2, 4))
    assert later.peak_memory_bytes == (60, 50)


def test_temporaries_live_while_their_op_runs() -> None:
    graph = graph_of({"a": 1, "b": 1}, temporary_bytes={"a": 5, "b": 7})
    assert simulate(graph, cluster_of(1), (0, 0)).peak_memory_bytes == (7,)
    assert simulate(graph, cluster_of(2), (0, 1)).peak_memory_bytes == (5, 7)


def test_output_beyond_the_tensors_lives_while_the_op_runs() -> None:
    # Of a's 100 bytes, 40 go into tensors: 60 end with a. b's tensors exceed what it says it puts out: nothing more.
    graph = graph_of({"a": 1, "b": 1, "c": 1}, ("a", "b", 40), ("b", "c", 30), output_bytes={"a": 100, "b": 10})
    assert simulate(graph, cluster_of(1), (0, 0, 0)).peak_memory_bytes == (100,)
    assert simulate(graph, cluster_of(2, 0, 0), (0, 1, 1)).peak_memory_bytes == (100, 70)


def test_each_tensor_counts_apart_and_each_reader_does_not() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, ("a", "b", 8, "t"), ("a", "c", 8, "t"), ("a", "c", 5, "u"))
    assert simulate(graph, cluster_of(1), (0, 0, 0)).peak_memory_bytes == (13,)


def test_persistent_bytes_are_not_counted_again_as_an_output() -> None:
    graph = graph_of({"w": 0, "b": 1}, persistent_bytes={"w": 64}, output_bytes={"w": 0})
    assert simulate(graph, cluster_of(1), (0, 0)).peak_memory_bytes == (64,)


def test_the_inputs_are_left_alone() -> None:
    graph, cluster = graph_of({"a": 1, "b": 1}, ("a", "b", 4)), cluster_of(2, memory_bytes=3)
    before = graph.to_json(), cluster.to_json()
    placement, priority = [0, 1], [0.0, 1.0]
    simulate(graph, cluster, placement, priority)
    assert (graph.to_json(), cluster.to_json()) == before
    assert (placement, priority) == ([0, 1], [0.0, 1.0])
