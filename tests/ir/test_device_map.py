"""Device maps: which name counts for which op, what is refused, and the map that is nearest to a placement."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import FileError, GraphError
from baechi_ext.ir import Op, OpGraph
from baechi_ext.ir.hints import DeviceMap, nearest_map
from tests.build import graph_of

NAMES = ["cpu:0", "cpu:1", "cpu:2"]
LAYERS = {"embed": ["embed"], "blocks.0": ["blocks.0.a", "blocks.0.b"], "blocks.1": ["blocks.1.a", "blocks.1.b"], "head": ["head"]}


def model(**device_of: int) -> tuple[OpGraph, list[int]]:
    """A step whose modules have a forward op, an update and maybe a residual add between submodules; and a placement by module."""
    ops, placement = [Op("input_0")], [0]
    for block, parts in LAYERS.items():
        for part in parts:
            group = {"module": part, "colocation": f"{part}.weight"}
            ops += [Op(part, compute_us=2, **group), Op(f"update.{part}.weight", phase="update", persistent_bytes=8, **group)]
            placement += [device_of.get(part.replace(".", "_"), 0)] * 2
        if len(parts) > 1:
            ops.append(Op(f"add.{block}", compute_us=1, module=block))
            placement.append(placement[-1])
    ops += [Op("scale", compute_us=1, module=""), Op("loss", compute_us=1)]
    edges = [(a.id, b.id, 1, "") for a, b in zip(ops, ops[1:], strict=False)]
    return OpGraph.from_edges(ops, edges), [*placement, placement[-1], placement[-1]]


def mapped(devices: dict[str, int | str], graph: OpGraph | None = None) -> dict[str, int | None]:
    graph = graph or model()[0]
    return dict(zip(graph.index, DeviceMap("map.json", devices).hints(graph, NAMES), strict=True))


def test_the_most_specific_name_counts() -> None:
    found = mapped({"": 0, "blocks": 1, "blocks.1": 2, "blocks.1.b.weight": 0, "head": "cpu:2"})
    assert {name: found[name] for name in ("embed", "blocks.0.a", "add.blocks.0", "blocks.1.a", "head", "scale")} == {
        "embed": 0, "blocks.0.a": 1, "add.blocks.0": 1, "blocks.1.a": 2, "head": 2, "scale": 0,
    }  # fmt: skip
    assert found["blocks.1.b"] == found["update.blocks.1.b.weight"] == 0
    assert found["loss"] is None
    hinted = DeviceMap("map.json", {"": 0, "head": 2}).apply(model()[0], NAMES)
    assert (hinted.ops[-1].id, hinted.ops[-1].expert) == ("loss", 0)  # it follows the last op that it reads from


def test_all_on_one_device() -> None:
    assert set(mapped({"": "1"}).values()) == {1, None}


def test_modules_without_ops_of_their_own_may_be_named() -> None:
    graph = OpGraph.from_json(model()[0].to_json() | {"graph": {"modules": ["identity"]}})
    assert graph.modules == ("identity",)
    assert OpGraph.from_json(graph.to_json()).modules == ("identity",)
    assert mapped({"": 1, "identity": 2}, graph)["head"] == 1


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({"": 0, "blocks.2": 1}, r"no module or parameter 'blocks.2'; its modules are 'blocks', 'embed', 'head' and what is in them"),
        ({"": 0, "block": 1}, "no module or parameter 'block'"),
        ({"embed": 0, "blocks": 1}, "no device for parameter 'head.weight'; name its module"),
        ({"": 3}, "'' goes to 3, and there are only the devices 0 to 2: cpu:0, cpu:1, cpu:2"),
        ({"": 0, "head": -1}, "'head' goes to -1, and there are only"),
        ({"": 0, "head": "cuda:0"}, "'head' goes to 'cuda:0', and there are only"),
        ({"": 0, "head": "cpu"}, "'head' goes to 'cpu', and accelerate fetches such parameters"),
        ({"": 0, "head": "disk"}, "'head' goes to 'disk', and accelerate fetches such parameters"),
    ],
)
def test_what_is_refused(devices: dict[str, int | str], message: str) -> None:
    with pytest.raises(FileError, match=rf"map.json: .*{message}"):
        mapped(devices)


def test_a_device_may_be_called_as_accelerate_calls_main_memory() -> None:
    assert DeviceMap("m", {"": "cpu"}).hints(model()[0], ["cpu", "cuda:0"])[1] == 0


@pytest.mark.parametrize("value", [1.5, True, None, [0]])
def test_files_with_other_values(tmp_path: Path, value: object) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"head": value}))
    with pytest.raises(FileError, match=r"the device of 'head' is .*; expected its index or its name"):
        DeviceMap.load(path)


def test_graphs_that_know_no_modules() -> None:
    with pytest.raises(GraphError, match="don't say which modules they come from"):
        mapped({"": 0}, graph_of({"a": 1}))


@pytest.mark.parametrize(
    ("device_of", "expected"),
    [
        ({}, {"": 0}),
        (dict.fromkeys(("blocks_1_a", "blocks_1_b", "head"), 1), {"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1}),
        ({"blocks_1_b": 1}, {"embed": 0, "blocks.0": 0, "blocks.1.a": 0, "blocks.1.b": 1, "head": 0}),
        (dict.fromkeys(("blocks_0_a", "blocks_0_b", "blocks_1_a", "blocks_1_b"), 2), {"embed": 0, "blocks": 2, "head": 0}),
    ],
)
def test_the_nearest_map_of_a_placement_by_modules_is_that(device_of: dict[str, int], expected: dict[str, int]) -> None:
    assert nearest_map(*model(**device_of)) == expected


def test_a_module_goes_where_most_of_it_is() -> None:
    graph, placement = model()
    placement[graph.index["embed"]] = 1
    assert nearest_map(graph, placement) == {"": 0}  # its parameter is larger than its op is long


def test_parameters_beside_submodules_have_names_of_their_own() -> None:
    ops = [Op("update.scale", phase="update", persistent_bytes=1, module="")]
    ops += [Op(name, compute_us=1, module=name) for name in "ab"]
    assert nearest_map(OpGraph.from_edges(ops, []), (1, 0, 1)) == {"scale": 1, "a": 0, "b": 1}


@given(st.data())
def test_what_is_exported_is_what_is_read(data: st.DataObject) -> None:
    """Placements by leaf modules come back as they were; names never cover one another, as accelerate wants it."""
    parts = [part for parts in LAYERS.values() for part in parts]
    device_of = {part: data.draw(st.integers(0, 2)) for part in parts}
    graph, placement = model(**{part.replace(".", "_"): d for part, d in device_of.items()})
    found = nearest_map(graph, placement)
    hints = mapped(found, graph)
    assert {part: hints[part] for part in parts} == device_of
    assert not any(a != b and (a == "" or b.startswith(f"{a}.")) for a in found for b in found)
