"""The checks between stages."""

import pytest

from baechi_ext.errors import PlanError
from baechi_ext.ir.plan import memory_violations, placement_violations, verify_placement
from tests.build import cluster_of, graph_of

GRAPH = graph_of({"a": 1, "b": 1, "c": 1}, colocation={"a": "g", "c": "g"})


def test_a_legal_placement() -> None:
    assert placement_violations(GRAPH, cluster_of(2), (1, 0, 1)) == []
    verify_placement(GRAPH, cluster_of(2), (1, 0, 1), "here")


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ((0, 0), "the placement has 2 entries for 3 ops"),
        ((0, 2, 0), "op 'b' is placed on device 2; expected 0 to 1"),
        ((0, -1, 0), "op 'b' is placed on device -1; expected 0 to 1"),
        ((0, 0, 1), "colocation group 'g' is split over devices 0, 1"),
    ],
)
def test_a_broken_rule_is_named_with_its_stage(placement: tuple[int, ...], message: str) -> None:
    assert placement_violations(GRAPH, cluster_of(2), placement) == [message]
    with pytest.raises(PlanError, match=f"^expand: {message}"):
        verify_placement(GRAPH, cluster_of(2), placement, "expand")


def test_memory() -> None:
    assert memory_violations(cluster_of(2, memory_bytes=10), (10, 11)) == ["device 'device:1' needs 11 bytes and has 10"]
    assert memory_violations(cluster_of(2), (10**18, 10**18)) == []
