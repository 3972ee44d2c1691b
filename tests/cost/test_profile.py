"""Profiles: their file, their graph, and how their costs get onto it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.cost import Contention, OpProfile, Profile, attach_costs
from baechi_ext.cost.profile import Host
from baechi_ext.errors import FileError, MismatchError, ProfileError
from baechi_ext.ir import Cluster, Op, OpGraph
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import place
from baechi_ext.simulate import lower_bound_us, simulate
from tests.build import graph_of

GRAPH = graph_of({"a": 0, "b": 0}, ("a", "b", 4))


def a_profile(graph: OpGraph = GRAPH) -> Profile:
    return Profile(
        graph_fingerprint=graph.fingerprint,
        op_digests=dict(zip(graph.index, graph.op_digests, strict=True)),
        clock="thread_cpu",
        warmup=2,
        ops={"a": OpProfile((3.0, 1.5, 9.0), 4, 2, 64), "b": OpProfile((7.0,))},
        metadata={"torch": "2", "threads": 1},
    )


def a_file(**fields: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(a_profile().to_json())), **fields}


def with_op(**fields: Any) -> dict[str, Any]:
    value = a_file()
    return {**value, "ops": {**value["ops"], "b": {**value["ops"]["b"], **fields}}}


def test_round_trip(tmp_path: Path) -> None:
    a_profile().save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json", GRAPH) == a_profile()


def test_the_file_tells_minimum_median_and_every_sample() -> None:
    assert a_file()["ops"]["a"] == {
        "compute_us": 1.5,
        "median_us": 3.0,
        "samples_us": [3.0, 1.5, 9.0],
        "output_bytes": 4,
        "temporary_bytes": 2,
        "persistent_bytes": 64,
    }


def test_costs_get_onto_the_graph_and_nothing_else_changes() -> None:
    costed = attach_costs(GRAPH, a_profile())
    assert [op.compute_us for op in costed.ops] == [1.5, 7.0]
    assert (costed.ops[0].output_bytes, costed.ops[0].temporary_bytes, costed.ops[0].persistent_bytes) == (4, 2, 64)
    assert costed.tensors == GRAPH.tensors
    assert costed.fingerprint == GRAPH.fingerprint
    assert [op.compute_us for op in GRAPH.ops] == [0, 0]


def test_an_op_without_a_profile() -> None:
    profile = replace(a_profile(), ops={"a": OpProfile((1.0,))})
    with pytest.raises(ProfileError, match="the profile has no op 'b'; profile this graph again"):
        attach_costs(GRAPH, profile)


def a_contended_profile() -> Profile:
    ops = {"a": OpProfile((1.0, 3.0), contended_us=(2.0, 4.0)), "b": OpProfile((7.0, 9.0), contended_us=(10.0, 8.0))}
    return replace(a_profile(), ops=ops, contention=Contention(2, (20.0, 15.0, 30.0)))


def test_a_contended_pass_is_as_long_as_it_was_by_the_wall() -> None:
    """Waits for what devices share are in no op's own samples (10 at least), but in the pass (20 typically)."""
    profile = a_contended_profile()
    assert [op.compute_us for op in attach_costs(GRAPH, profile, contended=True).ops] == [4.0, 16.0]
    assert [op.compute_us for op in attach_costs(GRAPH, profile).ops] == [1.25, 8.75]
    alone = replace(profile, contention=None)
    assert attach_costs(GRAPH, alone, contended=True) == attach_costs(GRAPH, alone)


def test_a_pass_that_is_not_the_sum_of_its_ops() -> None:
    """Kernels of one graph follow each other more closely than those given one by one, which take 10 in the typical pass."""
    profile = replace(a_contended_profile(), pass_us=(4.0, 2.0, 6.0))
    assert [op.compute_us for op in attach_costs(GRAPH, profile).ops] == [0.5, 3.5]
    assert [op.compute_us for op in attach_costs(GRAPH, profile, contended=True).ops] == [4.0, 16.0]


@pytest.mark.parametrize("pass_us", [(), (4.0, 2.5)])
def test_contention_comes_back_from_a_file(pass_us: tuple[float, ...], tmp_path: Path) -> None:
    profile = replace(a_contended_profile(), pass_us=pass_us)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json", GRAPH) == profile


REFUSED = [
    (a_file(ops=[]), 'the profile has no object "ops"'),
    (a_file(warmup=-1), "warmup is -1; expected at least 0"),
    (a_file(metadata=[1]), r'"metadata" is \[1\]; expected an object'),
    (a_file(ops={"a": {"samples_us": [1], "compute_us": 1}, "b": 5}), "the profile of op 'b' is 5; expected an object"),
    (with_op(samples_us=[]), "the profile of op 'b' has no \"samples_us\"; profile again"),
    (with_op(samples_us=3), "the profile of op 'b' has no \"samples_us\""),
    (with_op(compute_us=None), "the profile of op 'b' has no \"compute_us\"; profile again"),
    (with_op(compute_us=-5), "compute_us of op 'b' is -5; expected at least 0"),
    (with_op(compute_us=12345), "compute_us of op 'b' is 12345 and the least of its samples"),
    (with_op(samples_us=[1, -2]), "a sample of op 'b' is -2; expected at least 0"),
    (with_op(contended_us=4), "\"contended_us\" of op 'b' is 4; expected a list; profile again"),
    (a_file(contention={"devices": 2}), "\"contention\" is {'devices': 2}; expected an object with"),
    (a_file(contention={"devices": 2, "pass_us": [5]}), "the profile has \"contention\", but op 'a' has no \"contended_us\""),
    (a_file(pass_us=5), "\"pass_us\" of the profile is 5; expected a list; profile again"),
    (a_file(pass_us=[4, -1]), "a pass of the profile is -1; expected at least 0"),
    (with_op(output_bytes="x"), "output_bytes of op 'b' is 'x'; expected a number"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_a_broken_rule_is_named(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Profile.from_json(value, GRAPH)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (graph_of({"a": 0, "b": 0}, ("a", "b", 8)), "the profile is of another graph: the first op that differs is 'b' "),
        (graph_of({"x": 0, "b": 0}), "the first op that differs is 'x', which it lacks; make a new profile for this graph"),
        (graph_of({"a": 0}), "the first op that differs is 'b', which the graph lacks"),
    ],
)
def test_another_graphs_profile_is_refused(tmp_path: Path, graph: OpGraph, message: str) -> None:
    a_profile().save(tmp_path / "p.json")
    with pytest.raises(MismatchError, match=message):
        Profile.load(tmp_path / "p.json", graph)


def test_load_of_a_cut_off_file(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(a_file())[:-20])
    with pytest.raises(FileError, match="profile file .* is not valid JSON"):
        Profile.load(tmp_path / "p.json", GRAPH)


def test_costs_are_the_least_times_scaled_to_a_typical_pass() -> None:
    """Passes take 30, 24 and 60 us, the least times add up to 20: the median pass is 1.5 times that."""
    graph = OpGraph.from_edges([Op("a"), Op("b")], [("a", "b", 4, "a:0")])
    ops = {"a": OpProfile((20.0, 10.0, 50.0)), "b": OpProfile((10.0, 14.0, 10.0))}
    profile = Profile(graph.fingerprint, dict(zip(graph.index, graph.op_digests, strict=True)), "thread_cpu", 0, ops)
    assert [op.compute_us for op in attach_costs(graph, profile).ops] == [15.0, 15.0]


def test_samples_of_different_numbers_are_not_scaled() -> None:
    graph = OpGraph.from_edges([Op("a"), Op("b")], [("a", "b", 4, "a:0")])
    ops = {"a": OpProfile((20.0, 10.0)), "b": OpProfile((10.0,))}
    profile = Profile(graph.fingerprint, dict(zip(graph.index, graph.op_digests, strict=True)), "thread_cpu", 0, ops)
    assert [op.compute_us for op in attach_costs(graph, profile).ops] == [10.0, 10.0]


def test_what_a_thread_takes_to_give_ops_to_devices(tmp_path: Path) -> None:
    """One thread for all devices is a limit of the step; one for each, a limit of every op; with one launch for all there is none."""
    graph = graph_of({"a": 0, "b": 0, "c": 0}, ("a", "b", 4))
    ops = {"a": OpProfile((2.0,), issue_us=6.0), "b": OpProfile((7.0,), issue_us=6.0), "c": OpProfile((5.0,))}
    profile = replace(a_profile(graph), ops=ops)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json", graph) == profile
    steps = {}
    for host in ("none", "each", "one"):
        costed = attach_costs(graph, profile, host=host)
        assert OpGraph.from_json(costed.to_json()).ops == costed.ops
        steps[host] = [simulate(costed, Cluster.uniform(2), placement).makespan_us for placement in ([0, 0, 0], [0, 0, 1])]
    assert steps == {"none": [14.0, 9.0], "each": [18.0, 13.0], "one": [14.0, 12.0]}
    assert lower_bound_us(attach_costs(graph, profile, host="one"), Cluster.uniform(2)) == 12.0
    single = attach_costs(graph, replace(profile, ops={**ops, "c": OpProfile((5.0,), issue_us=40.0)}), host="one")
    assert not place("auto", single, Cluster.uniform(2), PlaceOptions(time_limit_seconds=1)).splits


def test_costs_of_graphs_are_for_graphs_alone() -> None:
    """Kernels of a graph follow each other more closely than those that a thread gives one by one."""
    graph = graph_of({"a": 1, "b": 1})
    ops = {"a": OpProfile((2.0, 2.0), issue_us=6.0), "b": OpProfile((6.0, 6.0), issue_us=7.0)}
    profile = replace(a_profile(graph), ops=ops, pass_us=(4.0,))

    def costs(host: Host, **fields: Any) -> list[tuple[float, float]]:
        return [(op.compute_us, op.issue_us) for op in attach_costs(graph, replace(profile, **fields), host=host).ops]

    assert costs("none") == [(1.0, 0.0), (3.0, 0.0)]
    assert costs("one") == [(2.0, 6.0), (6.0, 7.0)]
    assert costs("each") == [(6.0, 0.0), (7.0, 0.0)]
    assert costs("none", pass_us=()) == [(2.0, 0.0), (6.0, 0.0)]
    assert costs("none", pass_us=(), by_op=True) == costs("one")
    beside = {id_: replace(op, contended_us=(8.0,)) for id_, op in ops.items()}
    both = replace(profile, ops=beside, contention=Contention(2, (32.0,)))
    assert [op.compute_us for op in attach_costs(graph, both, contended=True).ops] == [16.0, 16.0]
    assert [op.compute_us for op in attach_costs(graph, both, contended=True, host="one").ops] == [2.0, 6.0]


def test_a_step_that_can_be_no_graph_comes_back_from_a_file(tmp_path: Path) -> None:
    profile = replace(a_profile(), by_op=True)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json", GRAPH) == profile
