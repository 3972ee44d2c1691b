"""Captured graphs made smaller."""

from pathlib import Path

import pytest

from baechi_ext.ir import OpGraph
from benchmarks.captured import main
from tests.build import graph_of


def test_neighbours_are_merged(tmp_path: Path) -> None:
    chain = graph_of({f"n{i}": 10.0 for i in range(20)}, *((f"n{i}", f"n{i + 1}", 5) for i in range(19)))
    chain.save(tmp_path / "fine.json")
    main(["gnmt_v2", f"--graph={tmp_path / 'fine.json'}", "--most_ops=5", f"--out={tmp_path / 'coarse.json.gz'}"])
    coarse = OpGraph.load(tmp_path / "coarse.json.gz")
    assert len(coarse) == 5
    assert coarse.total_compute_us() == chain.total_compute_us()


def test_a_model_without_a_size(tmp_path: Path) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    with pytest.raises(SystemExit, match="no size for a model 'lenet'; choose one of inception_v3, "):
        main(["lenet", f"--out={tmp_path / 'graph.json'}"])
