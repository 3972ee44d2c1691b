"""Costs by hand: terms, machines, tensors that move, configurations, memory."""

import json
import re
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Axis, Edge, Node, ShardGraph, Tensor, dot
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.networks import network
from baechi_ext.shard.tables import build_tables, configurations, node_bytes
from baechi_ext.shard.terms import AllReduce, Compute, Exchange, Feedback, Halo, Shares, Term

PLAIN = Machine(devices=64)  # 10 TFLOPS over 4 G words/s: 2500 operations a word
WORD = 2500.0


def cost(term: Term, split: tuple[int, ...], sizes: tuple[int, ...] = (8, 6, 4), machine: Machine = PLAIN) -> float:
    return float(term.cost(Shares(sizes, np.array([split]), machine))[0])


def test_units() -> None:
    assert PLAIN.flop_per_word == WORD
    assert Machine(devices=1, word_bytes=8).flop_per_word == 5000
    assert PLAIN.seconds(1e13) == 1


@pytest.mark.parametrize(
    ("term", "split", "operations"),
    [
        (Compute(3.0, (0, 2)), (2, 3, 1), 3 * 4 * 4),
        (AllReduce(1.0, (0, 1), (2,), "sum"), (2, 1, 4), WORD * (4 * 6 / 4) * 2 * 3),
        (AllReduce(2.0, (0,), (1, 2), "sum", times=3.0), (1, 3, 2), 3 * WORD * (2 * 8 / 6) * 2 * 5),
        (AllReduce(1.0, (0,), (1,), "sum"), (8, 1, 4), 0),
        (Exchange(2.0, (0, 1), (2,), "labels"), (2, 3, 2), WORD * 2 * 4 * 2),
        (Exchange(2.0, (0, 1), (2,), "labels"), (2, 3, 1), 0),
        (Halo(1.0, (0,), (1, 2), (12, 16), (3.0, 2.0)), (2, 3, 4), WORD * 4 * ((4 + 3) * (4 + 2) - 4 * 4)),
        (Halo(1.0, (0,), (1, 2), (12, 16), (3.0, 2.0)), (1, 3, 1), WORD * 8 * ((4 + 3) * 16 - 4 * 16)),
        (Halo(1.0, (0,), (1, 2), (12, 16), (3.0, 2.0)), (8, 1, 1), 0),
        (Halo(1.0, (0,), (1, 2), (12, 16), (9.0, 2.0)), (1, 3, 1), WORD * 8 * (12 * 16 - 4 * 16)),
        (Feedback((0, 1), (0, 2), 5.0), (2, 3, 1), 5 * WORD * (4 * 4 - 4 * 2)),
        (Feedback((0, 1), (0, 2), 5.0), (2, 1, 2), 5 * WORD * (4 * 2)),
    ],
)
def test_terms(term: Term, split: tuple[int, ...], operations: float) -> None:
    assert cost(term, split) == pytest.approx(operations)


def test_latency_counts_messages() -> None:
    slow = Machine(devices=64, latency_us=2.0)
    message = 2.0 * 10e12 / 1e6
    for term, messages in (
        (AllReduce(1.0, (0,), (1,), "sum"), 2 * 2),
        (AllReduce(1.0, (0,), (1,), "sum", messages=256), 256 * 2 * 2),
        (Exchange(2.0, (0,), (1,), "labels"), 1),
        (Halo(1.0, (0,), (1, 2), (12, 16), (3.0, 2.0)), 2),
    ):
        assert cost(term, (1, 3, 1), machine=slow) - cost(term, (1, 3, 1)) == pytest.approx(messages * message)
        assert cost(term, (8, 1, 1), machine=slow) == cost(term, (8, 1, 1))


def test_two_levels() -> None:
    """8 devices in nodes of 4; the last axis is inside, what the first one shares out is between nodes."""
    two = Machine(devices=8, devices_per_node=4, node_gigabytes_per_second=1.6)
    inside, outside = AllReduce(1.0, (1,), (2,), "sum"), AllReduce(1.0, (1,), (0,), "sum")
    assert cost(inside, (2, 1, 4), machine=two) == pytest.approx(cost(inside, (2, 1, 4)))
    assert cost(outside, (2, 1, 4), machine=two) == pytest.approx(10 * cost(outside, (2, 1, 4)))
    both = AllReduce(1.0, (1,), (0, 2), "sum")
    assert cost(both, (2, 1, 4), machine=two) == pytest.approx(WORD * (6 / 4) * 2 * 3 + 10 * WORD * (6 / 4 / 2) * 2)
    one_node = Machine(devices=8, devices_per_node=8, node_gigabytes_per_second=1.6)
    assert cost(both, (2, 1, 4), machine=one_node) == pytest.approx(cost(both, (2, 1, 4)))


def test_as_many_of_an_axis_are_in_each_node() -> None:
    """12 devices in nodes of 4, of which 3 parts by the batch have 2 by units inside: the ring between nodes is one of 3."""
    machine = Machine(devices=12, devices_per_node=4, node_gigabytes_per_second=1.6)
    node = Node("u", "test", (Axis("batch", 12), Axis("units", 24)), (), ())
    shares = Shares(node.sizes, configurations(node, 12), machine)
    for axes in ((0,), (1,), (0, 1)):
        assert not (shares.group(axes) % shares.near(axes)).any()
    sums = AllReduce(1.0, (1,), (0,), "sum")
    splits = np.array([[3, 2, 1]])
    assert sums.cost(Shares((12, 24, 1), splits, machine)) == pytest.approx(10 * WORD * 12 * 2 * 2 / 3)


def two_nodes(shape: tuple[int, int], terms: tuple[Term, ...] = ()) -> ShardGraph:
    axes = (Axis("a", shape[0]), Axis("b", shape[1]))
    tensor = Tensor(shape, ((0,), (1,)))
    nodes = (Node("u", "test", axes, (), (tensor,), terms), Node("v", "test", axes, (tensor,), (tensor,)))
    return ShardGraph("two", nodes, (Edge(0, 1),))


@pytest.mark.parametrize(
    ("source", "target", "words", "originally"),
    [
        ((1, 1), (1, 1), 0, 0),
        ((4, 1), (4, 1), 0, 0),
        ((4, 1), (1, 1), 32 * 3 / 4, 2 * 32 * 3 / 4),  # gathered forward; each has its part of the gradient
        ((1, 1), (4, 1), 32 * 3 / 4, 2 * 32 / 4),  # each has all forward; the gradient is gathered. Originally only one has all
        ((4, 1), (1, 4), 2 * (8 - 2), 2 * (8 - 2)),  # all to all, both ways
        ((2, 1), (2, 2), 8, 2 * 8),
    ],
)
def test_what_moving_a_tensor_takes(source: tuple[int, int], target: tuple[int, int], words: float, originally: float) -> None:
    for original, expected in ((False, words), (True, originally)):
        tables = build_tables(two_nodes((8, 4)), Machine(devices=4), original=original)
        choice = tables.choice([source, target])
        assert tables.edge_costs(choice) == [pytest.approx(WORD * expected)]


def test_overlap_hides_gradients_behind_the_backward_pass() -> None:
    terms = (Compute(3e4, (0, 1)), AllReduce(10.0, (1,), (0,), "weight gradient", hides=True))
    graph = two_nodes((8, 4), terms)
    for split, hidden in (((4, 1), False), ((1, 4), True)):
        compute = 3e4 * 8
        gradient = cost(terms[1], split, (8, 4))
        choice = build_tables(graph, Machine(devices=4)).choice([split, split])
        plain, overlapped = (build_tables(graph, Machine(devices=4, overlap=o)).costs[0][choice[0]] for o in (False, True))
        assert plain == pytest.approx(compute + gradient)
        assert overlapped == pytest.approx(compute + max(gradient - compute * 2 / 3, 0.0))
        assert (gradient == 0) is hidden


@given(
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    devices=st.integers(1, 40),
    smallest=st.sampled_from((1, 4)),
    contiguous=st.booleans(),
)
def test_configurations_are_all_there_are(sizes: list[int], devices: int, smallest: int, contiguous: bool) -> None:
    node = Node("n", "test", tuple(Axis(f"a{i}", size, smallest=smallest) for i, size in enumerate(sizes)), (), (), contiguous=contiguous)

    def allowed(size: int) -> list[int]:
        return [d for d in range(1, size + 1) if size % d == 0 and size / d >= smallest] or [1]

    def whole(row: tuple[int, ...]) -> bool:
        partial = next((i for i, (d, size) in enumerate(zip(row, sizes, strict=True)) if d != size), len(row))
        return all(d == 1 for d in row[partial + 1 :])

    rows = [row for row in product(*map(allowed, sizes)) if prod(row) <= devices and (whole(row) or not contiguous)]
    assert [tuple(map(int, row)) for row in configurations(node, devices)] == rows


def test_what_a_device_holds() -> None:
    """Parameter, gradient and one number of state; the output once. All in words of 4 bytes."""
    node = next(n for n in network("alexnet", 128).nodes if n.name == "linear_11")
    rows = np.array([[1, 1, 1], [8, 1, 1], [1, 2, 4]])
    held = node_bytes(node, rows, Machine(devices=8))
    weights, output = 4096 * 4096, 128 * 4096
    assert held == pytest.approx([4 * (3 * weights + output), 4 * (3 * weights + output / 8), 4 * (3 * weights / 8 + output / 2)])
    assert node_bytes(node, rows[:1], Machine(devices=8, optimizer_words=2))[0] == pytest.approx(4 * (4 * weights + output))


def test_the_default_model_mends_the_originals_quirks() -> None:
    """64 devices share a batch of 128; batch normalizations sum channels; input gradients are input-sized; lookups multiply nothing."""
    models = ("default", "original")
    default, original = ({g: build_tables(network(g, 128, cost_model=m), PLAIN) for g in ("resnet101", "rnnlm")} for m in models)

    def at(tables: object, name: str, **splits: int) -> float:
        v = next(i for i, node in enumerate(tables.graph.nodes) if node.name == name)
        row = tuple(splits.get(axis.name, 1) for axis in tables.graph.nodes[v].axes)
        return float(tables.costs[v][int(np.flatnonzero((tables.spaces[v] == np.array(row)).all(axis=1))[0])])

    at(default["resnet101"], "conv_5", batch=64)
    with pytest.raises(IndexError):
        at(original["resnet101"], "conv_5", batch=64)
    elements, channels = 128 * 64 * 57 * 57, 64
    assert at(default["resnet101"], "batch_norm_4", channels=8) == pytest.approx(16 * elements / 8)
    statistics = 2 * 2500 * (2 * channels / 8) * 2 * 7
    assert at(default["resnet101"], "batch_norm_4", batch=8) == pytest.approx(16 * elements / 8 + statistics)
    alone, split = (at(default["resnet101"], "conv_5", channels=parts) for parts in (1, 8))
    assert split - alone / 8 == pytest.approx(2500 * elements / 8 * 2 * 7)
    alone, split = (at(original["resnet101"], "conv_5", channels=parts) for parts in (1, 8))
    assert split - alone / 8 == pytest.approx(2500 * 9 * elements / 8 * 2 * 7)
    assert at(default["rnnlm"], "embedding_0") == 2 * 128 * 256 * 2048
    assert at(original["rnnlm"], "einsum_0") == 3 * 128 * 256 * 2048 * 100_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Node("n", "t", (Axis("a", 2),), (Tensor((2,), ((1,),)),), ()), "n: .* does not fit 1 axes"),
        (lambda: Node("n", "t", (Axis("a", 2),), (Tensor((2, 2), ((0,),)),), ()), "n: .* does not fit 1 axes"),
        (lambda: Node("n", "t", (Axis("a", 0),), (), ()), "have to be 1 or longer"),
        (lambda: Node("n", "t", (Axis("a", 2), Axis("a", 2)), (), ()), "two axes of one name"),
        (lambda: ShardGraph("g", (), ()), "graph g has no nodes"),
        (lambda: ShardGraph("g", (two_nodes((2, 2)).nodes[0],) * 2, ()), "2 nodes of 1 names"),
        (lambda: ShardGraph("g", two_nodes((2, 2)).nodes, (Edge(1, 0),)), "an edge from node 1 to 0 of 2"),
        (lambda: ShardGraph("g", two_nodes((2, 2)).nodes, (Edge(0, 1, 1, 0),)), "no such tensor"),
        (lambda: Machine(devices=0), "0 devices"),
        (lambda: Machine(devices=1, tera_flops=float("inf")), "--flops is inf"),
        (lambda: network("alexnet", 0), "a batch of 0"),
        (lambda: build_tables(two_nodes((2, 2)), Machine(devices=2)).choice([(2, 2), (1, 1)]), r"u can't be split as \(2, 2\) on 2"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        make()


def test_names_cannot_end_a_string_of_a_graphviz_file() -> None:
    evil = 'x"]; y [label="\\'
    text = dot(ShardGraph(evil, (Node(evil, "layer", (Axis("rows", 2),), (), (Tensor((4,), ((0,),)),), ()),), ()))
    strings = re.findall(r'"(?:[^"\\]|\\.)*"', text)
    assert [json.loads(one) for one in strings] == [evil, f"{evil}\nrows 2"]
    assert re.sub(r'"(?:[^"\\]|\\.)*"', "S", text) == "digraph S {\n  node [shape=box];\n  0 [label=S];\n}\n"
