"""Making families, for real but small: files that load, the split, the same graphs for the same seed; and the recipes' full sizes."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from baechi_ext import datasets
from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.errors import FileError, OptionError
from baechi_ext.ir import OpGraph
from baechi_runtime.cli import main as cli
from baechi_runtime.datasets.making import coarse_graph, costed_graph, make_family, make_step
from baechi_runtime.datasets.recipes import (
    NMT,
    RECIPES,
    Lengths,
    architectures,
    build_network,
    build_translator,
    splits,
)
from baechi_runtime.models.torch import enas_cnn, enas_rnn
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.threads.executor import ThreadExecutor

SMALL_NMT = replace(NMT, vocab_size=20, rnn_units=8)
SMALL = {
    "cifar10": lambda layout: build_network(layout, enas_cnn.Sizes(batch_size=2, image_size=8, filters=4)),
    "ptb": lambda cell: enas_rnn.build(cell, enas_rnn.Sizes(batch_size=2, steps=2, units=8, vocab_size=12, chunk=2)),
    "nmt": lambda lengths: build_translator(Lengths(4, 2), SMALL_NMT),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes with small models: the same architectures."""
    for family, build in SMALL.items():
        monkeypatch.setitem(RECIPES, family, replace(RECIPES[family], build=build))


def test_every_family_has_a_recipe() -> None:
    assert list(RECIPES) == list(datasets.FAMILIES)


@pytest.mark.parametrize("family", RECIPES)
def test_architectures_are_drawn_from_the_seed(family: str) -> None:
    drawn = architectures(family, 32, 0)
    assert len(set(drawn)) == 32
    assert architectures(family, 32, 0) == drawn
    assert architectures(family, 8, 0) == drawn[:8]
    assert architectures(family, 32, 1) != drawn


def test_a_family_has_only_so_many_graphs() -> None:
    with pytest.raises(OptionError, match="--graphs=86 is more than the family nmt has different graphs"):
        architectures("nmt", 86, 0)


@pytest.mark.parametrize("family", RECIPES)
def test_half_of_the_graphs_are_for_testing(family: str) -> None:
    found = splits(family, 32, 0)
    assert (found.count("train"), found.count("test")) == (16, 16)
    assert splits(family, 32, 0) == found != splits(family, 32, 1)


def test_cifar10_has_both_spaces() -> None:
    kinds = [type(architecture) for architecture in architectures("cifar10", 8, 0)]
    assert kinds == [enas_cnn.Macro, *[enas_cnn.Micro] * 3] * 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", RECIPES)
def test_made_and_loaded(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["datasets", "make", family, f"--out={tmp_path}", "--graphs=2", "--seed=3"]) == 0
    assert capsys.readouterr().out == f"2 graphs of {family} are in {tmp_path / family}, 2 of them new\n"
    index = datasets.read_index(family, tmp_path)
    assert (index["seed"], index["command"]) == (3, f"baechi datasets make {family} --graphs=2 --seed=3")
    graphs = datasets.load(family, folder=tmp_path)
    assert len(datasets.load(family, "train", tmp_path)) == len(datasets.load(family, "test", tmp_path)) == 1
    for graph, entry in zip(graphs, index["graphs"], strict=True):
        assert (len(graph), sum(len(t.readers) for t in graph.tensors)) == (entry["nodes"], entry["edges"])
        assert len(graph) <= min(200, entry["captured_ops"] // 3)
        assert 0 < entry["longest_path_us"] <= entry["compute_us"] == graph.total_compute_us()
        assert graph.framework == "torch"
    assert cli.main(["datasets", "list", family, f"--folder={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == [family, "1", "1"]


@pytest.mark.usefixtures("small")
def test_memory_is_that_of_the_captured_step() -> None:
    """The bytes that a step holds all the time are kept, and no tensor that leaves a node is lost."""
    step = make_step("cifar10", architectures("cifar10", 1, 0)[0], 0)
    with ThreadExecutor(cpu_devices(1)) as executor:
        fine = costed_graph(executor, step)
    coarse = coarse_graph(fine)
    slots = 1 + step.optimizer.slots
    state = sum(p.nbytes * slots for p in step.module.parameters()) + sum(b.nbytes for b in step.module.buffers())
    assert sum(op.persistent_bytes for op in coarse.ops) == sum(op.persistent_bytes for op in fine.ops) == state
    assert coarse.total_compute_us() == pytest.approx(fine.total_compute_us(), rel=1e-3)
    for v, op in enumerate(coarse.ops):
        assert op.output_bytes >= sum(coarse.tensors[t].bytes for t in coarse.outputs[v])


@pytest.mark.usefixtures("small")
def test_the_same_seed_gives_the_same_graphs() -> None:
    def graph() -> OpGraph:
        step = make_step("nmt", architectures("nmt", 2, 0)[1], 1)
        return capture_joint(step.module, step.inputs, CaptureOptions(), step.name)[0]

    assert graph().fingerprint == graph().fingerprint


def test_equal_costs_give_equal_data() -> None:
    torch.manual_seed(0)
    module, inputs = SMALL["cifar10"](enas_cnn.Micro.sample(Random(0)))
    graph, _ = capture_joint(module, inputs, CaptureOptions())
    graph = graph.replace_ops([replace(op, compute_us=1.23456 * (v % 7)) for v, op in enumerate(graph.ops)])
    assert coarse_graph(graph).to_json() == coarse_graph(graph).to_json()
    assert {op.compute_us for op in coarse_graph(graph).ops} <= {float(f"{op.compute_us:.4g}") for op in coarse_graph(graph).ops}


class Building:
    """Builds small translators, and counts them; the one of a number is interrupted."""

    def __init__(self, interrupted: int) -> None:
        self.interrupted = interrupted
        self.built: list[Lengths] = []

    def __call__(self, lengths: Lengths) -> object:
        self.built.append(lengths)
        if len(self.built) == self.interrupted:
            raise KeyboardInterrupt
        return SMALL["nmt"](lengths)


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Building:
    found = Building(interrupted=2)
    monkeypatch.setitem(RECIPES, "nmt", replace(RECIPES["nmt"], build=found))
    return found


def test_an_interrupted_family_is_gone_on_with(building: Building, tmp_path: Path) -> None:
    """The second of three graphs is interrupted: there is no index of other files then, and the first graph is not made again."""
    folder = tmp_path / "nmt"
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps({"graphs": []}))
    with pytest.raises(KeyboardInterrupt):
        make_family("nmt", tmp_path, 4, 0)
    assert sorted(path.name for path in folder.iterdir()) == ["graph_00.json.gz", "unfinished.json"]
    first = (folder / "graph_00.json.gz").read_bytes()
    assert make_family("nmt", tmp_path, 4, 0) == 3
    assert (folder / "graph_00.json.gz").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == [*(f"graph_0{n}.json.gz" for n in range(4)), "index.json"]
    expected = architectures("nmt", 4, 0)
    assert building.built == [*expected[:2], *expected[1:]]
    sizes = [entry["architecture"]["max_seq_length"] for entry in datasets.read_index("nmt", tmp_path)["graphs"]]
    assert sizes == [lengths.max_seq_length for lengths in expected]


def test_what_is_there_is_not_made_again(building: Building, tmp_path: Path) -> None:
    building.interrupted = 0
    assert [make_family("nmt", tmp_path, 2, seed) for seed in (0, 0, 1)] == [2, 0, 2]
    (tmp_path / "nmt" / "graph_01.json.gz").unlink()
    assert make_family("nmt", tmp_path, 2, 1) == 2
    assert len(building.built) == 6


def test_fewer_graphs_leave_none_of_the_earlier_ones(building: Building, tmp_path: Path) -> None:
    building.interrupted = 0
    assert [make_family("nmt", tmp_path, graphs, 0) for graphs in (3, 1)] == [3, 1]
    assert sorted(path.name for path in (tmp_path / "nmt").iterdir()) == ["graph_00.json.gz", "index.json"]


def test_a_damaged_index_is_named(building: Building, tmp_path: Path) -> None:
    building.interrupted = 0
    make_family("nmt", tmp_path, 1, 0)
    path = tmp_path / "nmt" / "index.json"
    written = json.loads(path.read_text())
    for change in ({"graphs": None}, {"graphs": [{}]}, {"load_average": {}}):
        path.write_text(json.dumps(written | change))
        with pytest.raises(FileError, match="index.json' is not an index that datasets make wrote .*; remove it, or choose another --out"):
            make_family("nmt", tmp_path, 1, 0)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot make the folder .*: Not a directory; choose another --out"):
        make_family("ptb", tmp_path / "file", 2, 0)
