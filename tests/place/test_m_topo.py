"""m_topo and m_topo_nonuniform: memory filled in topological order, to an equal cap or to each device's limit."""

from baechi_ext.ir import Cluster, Device, Link
from baechi_ext.place.baselines import fill, memory_cap_bytes
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of


def test_bytes_of_an_op_are_all_it_allocates() -> None:
    graph = graph_of(
        {"a": 1, "b": 1}, ("a", "b", 4), persistent_bytes={"a": 1}, temporary_bytes={"a": 2}, output_bytes={"a": 3, "b": 5}
    )
    assert graph.columns.all_bytes().tolist() == [1 + 2 + 4, 5]


def test_cap_is_the_share_and_the_largest_op() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, persistent_bytes={"a": 1, "b": 5, "c": 1})
    assert memory_cap_bytes(graph, 2) == 3 + 5


def test_fills_one_device_after_the_other() -> None:
    """Seven ops of 2 bytes on three devices: cap 4 + 2."""
    graph = graph_of({f"o{i}": 1 for i in range(7)}, persistent_bytes={f"o{i}": 2 for i in range(7)})
    assert fill(graph, graph.order, [6, 6, 6]) == (0, 0, 0, 1, 1, 1, 2)
    assert place("m_topo", graph, cluster_of(3)).plan.placement == (0, 0, 0, 1, 1, 1, 2)


def test_first_of_a_group_takes_all_members() -> None:
    graph = graph_of(
        {"a": 1, "b": 1, "c": 1, "a2": 1}, persistent_bytes={"a": 2, "b": 2, "c": 2, "a2": 2}, colocation={"a": "g", "a2": "g"}
    )
    assert fill(graph, graph.order, [6, 6]) == (0, 0, 1, 0)


def test_never_goes_back() -> None:
    """After the large op has closed device 0, the small one that would fit there follows it."""
    graph = graph_of({"a": 1, "b": 1, "c": 1, "d": 1}, persistent_bytes={"a": 4, "b": 5, "c": 1, "d": 0})
    assert fill(graph, graph.order, [8, 8]) == (0, 1, 1, 1)


def test_what_is_left_over_goes_where_most_room_is() -> None:
    """5 + 5 + 5 bytes on devices of 6 and 9: the third op exceeds both limits, the second device's by less."""
    graph = graph_of({"a": 1, "b": 1, "c": 1}, persistent_bytes={"a": 5, "b": 5, "c": 5})
    assert fill(graph, graph.order, [6, 9]) == (0, 1, 1)


def test_another_sequence_of_devices() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(4)}, persistent_bytes={f"o{i}": 2 for i in range(4)})
    assert fill(graph, graph.order, [4, 2, 4], (2, 1, 0)) == (2, 2, 1, 0)


def test_nonuniform_fills_each_device_to_its_limit() -> None:
    """12 bytes: the cap of m_topo is 4 + 2 on each of three devices; their own limits are 8, 2 and 4."""
    graph = graph_of({f"o{i}": 1 for i in range(6)}, persistent_bytes={f"o{i}": 2 for i in range(6)})
    cluster = Cluster((Device("0", 8), Device("1", 2), Device("2", 4)), Link(0, 1))
    assert fill(graph, graph.order, [8, 2, 4]) == (0, 0, 0, 0, 1, 2)
    plan = place("m_topo_nonuniform", graph, cluster).plan
    assert plan.placement == (2, 2, 1, 0, 0, 0)  # a sequence of devices whose step ends first
    assert place("m_topo", graph, cluster).plan.placement.count(0) == 3


def test_nonuniform_uses_one_device_where_nothing_limits_it() -> None:
    graph = graph_of({f"o{i}": 1 for i in range(6)}, persistent_bytes={f"o{i}": 2 for i in range(6)})
    assert place("m_topo_nonuniform", graph, cluster_of(3)).plan.placement == (0,) * 6


def test_the_faster_device_is_filled_first() -> None:
    """Chunks of 30 and 10 bytes: the larger one runs where it takes a third of the time."""
    graph = graph_of({f"o{i}": 6 for i in range(4)}, persistent_bytes=dict.fromkeys(("o0", "o1", "o2", "o3"), 10))
    cluster = Cluster((Device("slow", None, 1.0), Device("fast", None, 3.0)), Link(0, 1))
    for method, step_us in (("m_topo", 6.0), ("m_topo_nonuniform", 8.0)):
        assert place(method, graph, cluster).predicted_step_us == step_us
