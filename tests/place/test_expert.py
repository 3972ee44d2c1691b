"""The expert's placement is what the hints say, and nothing else."""

import pytest

from baechi_ext.errors import InfeasibleError, OptionError
from baechi_ext.ir import Cluster, Link
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of


def layers(hints: dict[str, int], **fields: dict[str, object]):  # type: ignore[no-untyped-def]
    """Four layers in a row, and a parallel op without neighbours."""
    names = ["l0", "l1", "l2", "l3"]
    edges = [(a, b, 1) for a, b in zip(names, names[1:], strict=False)]
    return graph_of({**dict.fromkeys(names, 5), "alone": 1}, *edges, expert=hints, **fields)


@pytest.mark.parametrize(
    ("num_devices", "expected"), [(1, (0, 0, 0, 0, 0)), (2, (0, 1, 0, 1, 0)), (3, (0, 1, 2, 0, 0)), (4, (0, 1, 2, 3, 0))]
)
def test_layers_go_to_their_index_modulo_the_number_of_devices(num_devices: int, expected: tuple[int, ...]) -> None:
    graph = layers({f"l{i}": i for i in range(4)})
    assert place("expert", graph, cluster_of(num_devices)).plan.placement == expected


def test_ops_without_a_hint_follow() -> None:
    assert place("expert", layers({"l1": 1}), cluster_of(2)).plan.placement == (1, 1, 1, 1, 0)
    grouped = layers({"l0": 1, "l3": 0}, colocation={"l3": "g", "alone": "g", "l1": "h", "l2": "h"})
    assert place("expert", grouped, cluster_of(2)).plan.placement == (1, 1, 1, 0, 0)


def test_negative_indices_count_from_the_end() -> None:
    assert place("expert", layers({"l0": -1}), cluster_of(3)).plan.placement[0] == 2


def test_a_bad_expert_is_not_corrected() -> None:
    """Splitting a chain helps nobody; it is done all the same."""
    graph = layers({f"l{i}": i for i in range(4)})
    slow = Cluster.uniform(2, link=Link(0.0, 1000.0))
    result = place("expert", graph, slow)
    assert (result.plan.placement[:4], result.predicted_step_us) == ((0, 1, 0, 1), 3020)
    assert place("m_etf", graph, slow).predicted_step_us < 100


def test_the_order_is_chosen_well() -> None:
    """x is longer, but y's reader waits on the other device."""
    graph = graph_of({"x": 9, "y": 2, "z": 6}, ("y", "z", 4), expert={"x": 0, "y": 0, "z": 1})
    assert place("expert", graph, cluster_of(2)).predicted_step_us == 12


def test_without_hints_it_says_what_to_do() -> None:
    with pytest.raises(OptionError, match=r"the graph has no expert hints; give some with --expert_file=FILE, .* or choose another"):
        place("expert", layers({}), cluster_of(2))


def test_a_placement_that_does_not_fit_is_refused_and_not_repaired() -> None:
    graph = layers({f"l{i}": 0 for i in range(4)}, persistent_bytes={f"l{i}": 10 for i in range(4)})
    assert place("m_etf", graph, cluster_of(2, memory_bytes=25)).plan.placement
    with pytest.raises(InfeasibleError, match=r"'device:0' needs 4\d bytes and has 25; .* placement is taken as it is\)") as e:
        place("expert", graph, cluster_of(2, memory_bytes=25))
    assert e.value.status == "unknown"
