"""Costs on hardware that is not here."""

from dataclasses import replace

import pytest

from baechi_ext.cost.hardware import (
    COUNTED,
    CPU,
    HARDWARE,
    OF_OPS,
    SCALED,
    Hardware,
    Spread,
    costs_on,
    hardware_named,
    spread_on,
    uncounted,
)
from baechi_ext.errors import ClusterError, OptionError, ProfileError
from baechi_ext.ir import Link, OpGraph
from tests.build import graph_of

SLOW = Hardware("slow", 10.0, 20.0, 5.0, 1000, Link(1.0, 2.0), "by hand", start_us=3.0)
FAST = replace(SLOW, name="fast", flop_per_us=100.0, convolution_flop_per_us=400.0, bytes_per_us=10.0)
KINDS = {"product": ("aten.mm", 800, 100), "copy": ("aten.clone", 0, 100), "conv": ("aten.convolution", 800, 100)}


def counted(**us: float) -> OpGraph:
    graph = graph_of(us)
    known = {id_: dict(zip(("op", "flop", "moved_bytes"), KINDS[id_], strict=True)) for id_ in us}
    return graph.replace_ops([replace(op, **known[op.id]) for op in graph.ops])


def test_an_op_takes_what_bounds_it_and_its_start() -> None:
    found = [SLOW.roofline_us(op) for op in counted(product=1, copy=1, conv=1).ops]
    assert found == [3 + 80, 3 + 20, 3 + 40]
    assert [FAST.roofline_us(op) for op in counted(product=1, copy=1, conv=1).ops] == [3 + 10, 3 + 10, 3 + 10]


def test_measured_costs_are_scaled_and_counts_need_none() -> None:
    graph = counted(product=166, copy=23, conv=0)
    assert [op.compute_us for op in costs_on(graph, FAST, SLOW).ops] == pytest.approx([26, 13, 0])
    assert costs_on(graph, SLOW, SLOW) == graph
    assert [op.compute_us for op in costs_on(graph, FAST).ops] == pytest.approx([13 * COUNTED.middle] * 3)
    assert costs_on(graph, FAST).fingerprint == graph.fingerprint


def test_what_is_not_counted_is_said() -> None:
    with pytest.raises(ProfileError, match=r"op 'x' has no moved_bytes, so what it takes on fast is not known; capture"):
        costs_on(graph_of({"x": 5}), FAST)
    graph = counted(product=1, copy=1)
    unknown = graph.replace_ops([replace(op, flop=None) for op in graph.ops])
    assert (uncounted(graph.ops), uncounted(unknown.ops)) == ((), ("aten.clone", "aten.mm"))
    assert [SLOW.roofline_us(op) for op in unknown.ops] == [23, 23]


def test_counts_go_into_the_graphs_file_and_back() -> None:
    graph = counted(product=1, copy=1)
    assert OpGraph.from_json(graph.to_json()).ops == graph.ops
    assert "flop" not in graph_of({"x": 5}).to_json()["nodes"][0]


def test_a_cluster_has_so_many_of_it() -> None:
    cluster = FAST.cluster(3)
    assert [(d.name, d.memory_bytes) for d in cluster.devices] == [("fast:0", 1000), ("fast:1", 1000), ("fast:2", 1000)]
    assert cluster.link(0, 2) == FAST.link
    assert [d.memory_bytes for d in replace(FAST, shares_memory=True).cluster(2).devices] == [500, 500]
    assert hardware_named("a100").cluster(1).devices[0].name == "a100:0"
    with pytest.raises(OptionError, match="unknown hardware 'b200'; choose one of h100, a100, rtx4090"):
        hardware_named("b200")
    with pytest.raises(ClusterError, match="number of devices is 0"):
        replace(FAST, shares_memory=True).cluster(0)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
def test_the_source_says_the_figures(hardware: Hardware) -> None:
    assert f"FP32 {hardware.flop_per_us / 1e6:g} " in hardware.source or f"FP32 and TF32 {hardware.flop_per_us / 1e6:g} " in hardware.source
    assert f"TF32 {hardware.convolution_flop_per_us / 1e6:g} TFLOP/s" in hardware.source
    assert f"{hardware.bytes_per_us / 1e6:g} TB/s, {hardware.memory_bytes / 1e9:g} GB" in hardware.source
    link = 1 / hardware.link.us_per_byte / 1e3
    assert f"{2 * link:g} GB/s in both" in hardware.source or f"{link:g} GB/s a direction" in hardware.source


def test_a_range_is_around_a_prediction() -> None:
    assert Spread(2.0, 1.0, 3.0).around(100) == (50, 150)
    assert all(s.low <= s.high for s in (COUNTED, SCALED, OF_OPS))
    card, core = HARDWARE["h100"], replace(SLOW, name=CPU)
    assert [spread_on(*pair) for pair in ((core, None), (card, None), (card, HARDWARE["a100"]))] == [COUNTED, OF_OPS, SCALED]
    assert [spread_on(*pair) for pair in ((card, core), (core, card), (core, core))] == [OF_OPS, OF_OPS, SCALED]
