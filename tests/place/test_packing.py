"""Conflicts: what does not fit is found, is really too much, and is no larger than it has to be."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, Device, OpGraph
from baechi_ext.place import feasibility
from baechi_ext.place.feasibility import conflict
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of

SIZES = {f"o{i}": size for i, size in enumerate((6, 2, 6, 1, 6, 1))}


def graph_with(sizes: dict[str, int], **fields: dict[str, object]) -> OpGraph:
    return graph_of(dict.fromkeys(sizes, 1), persistent_bytes=sizes, **fields)


def names(graph: OpGraph, cluster: Cluster) -> tuple[set[str], bool]:
    found = conflict(graph, cluster)
    assert found is not None
    return {item.name for item in found.items}, found.minimal


def test_three_large_ops_on_two_devices() -> None:
    """22 bytes in all and 22 bytes of memory; but no device takes two of the three ops of 6."""
    assert names(graph_with(SIZES), cluster_of(2, memory_bytes=11)) == ({"o0", "o2", "o4"}, True)


def test_the_sum_is_too_much() -> None:
    """3 + 3 + 3 > 8, and two of them fit on one device."""
    assert names(graph_with({"a": 3, "b": 3, "c": 3}), cluster_of(1, memory_bytes=8)) == ({"a", "b", "c"}, True)


def test_a_group_is_one_item() -> None:
    graph = graph_with({"a": 3, "b": 4, "c": 5, "d": 1}, colocation={"a": "g", "b": "g"})
    assert names(graph, Cluster((Device("x", 7), Device("y", 4)))) == ({"g", "c"}, True)


def test_what_an_op_needs_while_it_runs_counts() -> None:
    graph = graph_of({"a": 1, "b": 1}, persistent_bytes={"a": 6, "b": 1}, temporary_bytes={"b": 4})
    assert names(graph, cluster_of(1, memory_bytes=10)) == ({"a", "b"}, True)
    assert conflict(graph, cluster_of(1, memory_bytes=11)) is None


def test_a_perfect_packing_is_found() -> None:
    """7 + 3, 6 + 4, 5 + 5: the largest first would also do, 5 + 4 + ... would not."""
    graph = graph_with(dict(zip("abcdef", (7, 6, 5, 5, 4, 3), strict=True)))
    assert conflict(graph, cluster_of(3, memory_bytes=10)) is None


def test_nothing_is_said_of_unlimited_devices() -> None:
    assert conflict(graph_with(SIZES), Cluster((Device("x", 1), Device("y", None)))) is None


def packs(sizes: tuple[int, ...], limits: tuple[int, ...]) -> bool:
    """By trying everything."""
    return any(
        all(sum(s for s, d in zip(sizes, devices, strict=True) if d == e) <= limit for e, limit in enumerate(limits))
        for devices in product(range(len(limits)), repeat=len(sizes))
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.lists(st.integers(3, 14), min_size=1, max_size=3))
def test_against_all_packings(sizes: list[int], limits: list[int]) -> None:
    graph = graph_with({f"o{i}": size for i, size in enumerate(sizes)})
    found = conflict(graph, Cluster(tuple(Device(f"d{i}", limit) for i, limit in enumerate(limits))))
    assert (found is None) == packs(tuple(sizes), tuple(limits))
    if found is not None:
        assert found.minimal
        chosen = [int(item.persistent_bytes) for item in found.items]
        assert not packs(tuple(chosen), tuple(limits))
        assert all(packs(tuple(chosen[:i] + chosen[i + 1 :]), tuple(limits)) for i in range(len(chosen)))


def test_what_fits_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, fits = [], feasibility._Packing.fits
    monkeypatch.setattr(feasibility._Packing, "fits", lambda packing, items: asked.append(len(items)) or fits(packing, items))
    assert conflict(graph_with({f"o{v}": 1 for v in range(100)}), cluster_of(2, memory_bytes=50)) is None
    assert asked == [100]


@pytest.mark.parametrize("num_devices", [2, 8])
def test_many_ops_end_soon(num_devices: int) -> None:
    """Sizes that pack badly, up to the brim: an answer may be missing, never wrong."""
    sizes = {f"o{i}": 1000 + (i * 7919) % 997 for i in range(400)}
    room = sum(sizes.values()) // num_devices
    graph = graph_with(sizes)
    found = conflict(graph, cluster_of(num_devices, memory_bytes=room - 1))
    assert found is not None
    assert sum(item.persistent_bytes for item in found.items) > num_devices * (room - 1)
    assert conflict(graph, cluster_of(num_devices, memory_bytes=room + 400)) is None


@pytest.mark.parametrize("method", ["contiguous", "m_topo", "m_etf", "m_sct", "exact"])
def test_methods_name_what_does_not_fit(method: str) -> None:
    with pytest.raises(InfeasibleError, match=r"'o0' \(6 bytes\), 'o2' \(6 bytes\), 'o4' \(6 bytes\) do not fit") as e:
        place(method, graph_with(SIZES), cluster_of(2, memory_bytes=11))
    assert (e.value.status, e.value.conflict, e.value.minimal) == ("infeasible", ("o0", "o2", "o4"), True)
    assert e.value.to_json()["conflict"] == ["o0", "o2", "o4"]
