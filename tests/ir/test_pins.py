"""Pins: what a pattern matches, and what is refused."""

import pytest

from baechi_ext.errors import GraphError, OptionError
from baechi_ext.ir import OpGraph
from baechi_ext.ir.hints import Pin, with_pins, with_pins_of_groups
from baechi_ext.ir.plan import placement_violations
from tests.build import cluster_of, graph_of

GRAPH = graph_of(
    {"conv": 1, "relu": 1, "linear": 1, "loss": 1, "linear_b": 1, "conv_b": 1, "update.m.encoder.0.weight": 1},
    ("conv", "relu", 1),
    module={
        "conv": "encoder.0",
        "relu": "encoder.1",
        "linear": "decoder.layers.10",
        "linear_b": "decoder.layers.10",
        "conv_b": "encoder.0",
        "update.m.encoder.0.weight": "encoder.0",
    },
    phase={"update.m.encoder.0.weight": "update"},
    colocation={"conv": "m.encoder.0.weight", "conv_b": "m.encoder.0.weight", "update.m.encoder.0.weight": "m.encoder.0.weight"},
)
DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
CONV = {"conv", "conv_b", "update.m.encoder.0.weight"}


def pinned(*texts: str, graph: OpGraph = GRAPH) -> dict[str, int]:
    found = with_pins(graph, [Pin.parse(text) for text in texts], DEVICES)
    assert found.op_digests == graph.op_digests
    assert found.fingerprint == graph.fingerprint
    return {op.id: op.pin for op in found.ops if op.pin is not None}


@pytest.mark.parametrize(
    ("pattern", "ops"),
    [
        ("encoder.0", CONV),
        ("encoder.1", {"relu"}),
        ("encoder", CONV | {"relu"}),
        ("encoder.*", CONV | {"relu"}),
        ("enc*", CONV | {"relu"}),
        ("encoder.?", CONV | {"relu"}),
        ("encoder.[1-9]", {"relu"}),
        ("decoder.layers.1", set()),
        ("decoder.layers.1*", {"linear", "linear_b"}),
        ("decoder", {"linear", "linear_b"}),
        ("*.layers.*", {"linear", "linear_b"}),
        ("encoder.0.weight", CONV),
        ("m.encoder.0.weight", CONV),
        ("loss", {"loss"}),
        ("linear*", {"linear", "linear_b"}),
        ("*", set(GRAPH.index)),
        ("Encoder", set()),
    ],
)
def test_what_a_pattern_matches(pattern: str, ops: set[str]) -> None:
    if ops:
        assert pinned(f"{pattern}=1") == dict.fromkeys(ops, 1)
    else:
        with pytest.raises(OptionError, match="matches nothing: .*; its modules are encoder, decoder"):
            pinned(f"{pattern}=1")


def test_exact_names_count_before_patterns() -> None:
    graph = graph_of(dict.fromkeys(["a[0]", "a0", "b*", "bc"], 1))
    assert pinned("a[0]=1", "b*=2", graph=graph) == {"a[0]": 1, "b*": 2}
    assert pinned("a[0]=1", graph=graph_of({"a0": 1, "b": 1})) == {"a0": 1}


def test_several_pins() -> None:
    assert pinned("encoder=2", "relu=cpu:2", "decoder=0") == dict.fromkeys(CONV | {"relu"}, 2) | {"linear": 0, "linear_b": 0}
    assert pinned("loss=0", "loss=cpu:0") == {"loss": 0}


def test_a_pattern_may_hold_an_equals_sign() -> None:
    assert Pin.parse("a=b=1") == Pin("a=b", "1")


@pytest.mark.parametrize("text", ["encoder", "=1", "encoder=", ""])
def test_what_is_no_pin(text: str) -> None:
    with pytest.raises(OptionError, match="is not a pin; write PATTERN=DEVICE"):
        Pin.parse(text)


@pytest.mark.parametrize("device", ["3", "-1", "x", "cuda:0", "1.0", "²"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(OptionError, match=r"names no device; there are 0 to 2: cpu:0, cpu:1, cpu:2"):
        pinned(f"encoder={device}")


def test_pins_that_contradict_each_other() -> None:
    with pytest.raises(OptionError, match=r"the pin 'encoder=0' and the pin 'relu=1' contradict each other: both are for op 'relu'"):
        pinned("encoder=0", "relu=1")


def test_pins_that_contradict_each_other_within_a_group() -> None:
    with pytest.raises(OptionError, match=r"'conv=0' and the pin 'conv_b=1' contradict .* colocation group 'm.encoder.0.weight'"):
        pinned("conv=0", "conv_b=1")


def test_pins_of_the_graph_itself() -> None:
    graph = graph_of({"a": 1, "b": 1, "c": 1}, pin={"a": 1}, colocation={"a": "g", "c": "g"})
    assert pinned(graph=graph) == {"a": 1, "c": 1}
    assert pinned("b=0", graph=graph) == {"a": 1, "b": 0, "c": 1}
    with pytest.raises(OptionError, match=r"the graph's pin of op 'a' to device 1 and the pin 'c=0' contradict"):
        pinned("c=0", graph=graph)
    with pytest.raises(OptionError, match="the graph pins op 'a' to device 1; there are 0 to 0; give more"):
        with_pins(graph, [], ["cpu:0"])


def test_a_graph_without_modules_says_what_its_ops_are() -> None:
    with pytest.raises(OptionError, match="its first ops are a, b$"):
        pinned("x=0", graph=graph_of({"a": 1, "b": 1}))


def test_a_group_is_pinned_where_its_first_pinned_op_is() -> None:
    graph = graph_of(dict.fromkeys("abcd", 1), pin={"b": 2, "c": 1}, colocation={"a": "g", "b": "g", "c": "g"})
    assert [op.pin for op in with_pins_of_groups(graph).ops] == [2, 2, 2, None]


def test_pins_and_modules_are_kept_in_files_only_where_there_are_any() -> None:
    graph = with_pins(GRAPH, [Pin.parse("encoder=1")], DEVICES)
    written = graph.to_json()
    assert OpGraph.from_json(written).ops == graph.ops
    by_id = {node["id"]: node for node in written["nodes"]}
    assert by_id["relu"]["pin"] == 1
    assert by_id["relu"]["module"] == "encoder.1"
    assert not {"pin", "module"} & set(by_id["loss"])
    with pytest.raises(GraphError, match='op \'a\' has "pin": \'x\'; expected a device index or null'):
        OpGraph.from_json({"nodes": [{"id": "a", "compute_us": 1, "pin": "x"}], "edges": []})


@pytest.mark.parametrize("pin", [-1, 1024, 3_000_000_000, 10**30])
def test_a_pin_in_a_file_to_what_no_cluster_has(pin: int) -> None:
    with pytest.raises(GraphError, match=f'op \'a\' has "pin": {pin}; expected the index of a device, from 0 to 1023, or null'):
        OpGraph.from_json({"nodes": [{"id": "a", "compute_us": 1, "pin": pin}], "edges": []})


def test_a_placement_that_breaks_a_pin() -> None:
    graph = graph_of({"a": 1, "b": 1}, pin={"a": 1})
    assert placement_violations(graph, cluster_of(2), (0, 0)) == ["op 'a' is pinned to device 1 and placed on 0"]
    assert placement_violations(graph, cluster_of(2), graph.pinned((0, 0))) == []


def test_a_pattern_or_a_device_that_is_too_long() -> None:
    with pytest.raises(OptionError, match="has 30000 characters; the limit is 1000"):
        Pin.parse("[" * 30_000 + "=0")
    with pytest.raises(OptionError, match="names no device; there are 0 to 1"):
        Pin.parse(f"a={'1' * 5000}").index(["x", "y"])
