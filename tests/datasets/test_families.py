"""Reading a family: its graphs in order, its splits, and what is wrong with a folder."""

import json
from pathlib import Path

import pytest

from baechi_ext import datasets
from baechi_ext.errors import FileError, GraphError, OptionError
from baechi_ext.ir import OpGraph
from tests.build import graph_of

SIZES = {"captured_ops": 9, "nodes": 2, "edges": 1, "compute_us": 3.0, "longest_path_us": 3.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with four graphs of ptb, which take 1 to 4 us in all; the second and third are for training."""
    (tmp_path / "ptb").mkdir()
    entries = []
    for i, split in enumerate(("test", "train", "train", "test")):
        graph_of({"a": i + 1.0, "b": 0.0}, ("a", "b", 8)).save(tmp_path / "ptb" / f"g{i}.json", compact=True)
        entries.append({"file": f"g{i}.json", "split": split, **SIZES})
    write_index(tmp_path, entries)
    return tmp_path


def write_index(folder: Path, entries: object) -> None:
    (folder / "ptb" / "index.json").write_text(json.dumps({"graphs": entries}))


def times(graphs: list[OpGraph]) -> list[float]:
    return [graph.total_compute_us() for graph in graphs]


def test_all_graphs_or_a_split(folder: Path) -> None:
    assert times(datasets.load("ptb", folder=folder)) == [1, 2, 3, 4]
    assert times(datasets.load("ptb", split="train", folder=folder)) == [2, 3]
    assert times(datasets.load("ptb", "test", str(folder))) == [1, 4]
    assert datasets.read_index("ptb", folder)["family"] == "ptb"


def test_unknown_names(folder: Path) -> None:
    with pytest.raises(OptionError, match="unknown family 'imagenet'; choose one of cifar10, ptb, nmt"):
        datasets.load("imagenet", folder=folder)
    with pytest.raises(OptionError, match="unknown split 'valid'; choose one of train, test, or None for all graphs"):
        datasets.load("ptb", "valid", folder)


def test_a_family_that_was_not_made(folder: Path) -> None:
    with pytest.raises(FileError, match="make it with `baechi datasets make nmt --out="):
        datasets.load("nmt", folder=folder)


def test_a_graph_file_that_is_missing_or_wrong(folder: Path) -> None:
    (folder / "ptb" / "g1.json").write_text('{"nodes": [{}], "edges": []}')
    with pytest.raises(GraphError, match='g1.json: node 0 has no "id"'):
        datasets.load("ptb", "train", folder)
    (folder / "ptb" / "g1.json").unlink()
    with pytest.raises(FileError, match="cannot read graph file .*g1.json"):
        datasets.load("ptb", "train", folder)
    assert times(datasets.load("ptb", "test", folder)) == [1, 4]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (None, 'has no list "graphs"; make the family again'),
        ([3], "graph 0 is 3; expected a file name and a split"),
        ([{"file": "g0.json", "split": "valid", **SIZES}], "expected a file name and a split"),
        ([{"file": "../g0.json", "split": "train", **SIZES}], "expected a file name and a split"),
        ([{"file": "g0.json", "split": "train", **SIZES, "nodes": "2"}], "nodes of g0.json is '2'; expected a number"),
    ],
)
def test_a_wrong_index(folder: Path, entries: object, message: str) -> None:
    write_index(folder, entries)
    with pytest.raises(FileError, match=message):
        datasets.load("ptb", folder=folder)


@pytest.mark.parametrize("family", datasets.FAMILIES)
@pytest.mark.skipif(not datasets.INSTALLED.exists(), reason="no graphs come with this checkout; `baechi datasets make` makes them")
def test_what_comes_with_the_package(family: str) -> None:
    index = datasets.read_index(family)
    train, test = (datasets.load(family, split) for split in datasets.SPLITS)
    assert (len(train), len(test)) == (16, 16)
    assert len({graph.fingerprint for graph in (*train, *test)}) == 32
    assert len({json.dumps(entry["architecture"]) for entry in index["graphs"]}) == 32
    for graph in (*train, *test):
        assert 50 <= len(graph) <= 200
        assert {op.phase for op in graph.ops} >= {"forward", "backward"}
        assert sum(op.persistent_bytes for op in graph.ops) > 0
    assert sum(path.stat().st_size for path in (datasets.INSTALLED / family).iterdir()) < 3_000_000
