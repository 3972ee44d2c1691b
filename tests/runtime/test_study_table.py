"""Conclusions from a study's runs: tests of hypotheses by hand, a study whose outcome was planted, and its files."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from baechi_ext.errors import FileError
from baechi_runtime.placeto.study_table import (
    CONTROLS,
    NAMES,
    Point,
    Run,
    StudyTable,
    append,
    bootstrapped,
    holm,
    near,
    permutation_test,
    read_runs,
    sign_flip_test,
)

SETTINGS = {"orders": ["topo", "bfs", "alpha"], "split": "train", "repeats": 2, "episodes": 10, "cluster": {"devices": [{}, {}, {}]}}


def points(*best_us: float) -> list[Point]:
    """A run with a point every 5 episodes."""
    return [Point(5 * i, us, us, 100 * i, float(i)) for i, us in enumerate(best_us)]


def planted(gains: dict[str, float]) -> dict[Run, list[Point]]:
    """8 graphs of one source, 4 of another: runs begin at 100 us; every graph has its own noise, and each order and control its gain."""
    draw = np.random.default_rng(0)
    found = {}
    for source, graphs in (("deep", 8), ("wide", 4)):
        for graph in range(graphs):
            ease = draw.uniform(0.5, 0.9)
            for order, gain in {**gains, **dict.fromkeys(CONTROLS, 1.0)}.items():
                for repeat in range(2):
                    end = 100 * ease * gain * draw.uniform(0.99, 1.01)
                    found[Run(source, f"g{graph}", order, repeat)] = points(100.0, end * 1.005, end)
    return found


def test_signs_by_hand() -> None:
    """Two of the 8 sums of 1, 2 and 3 with signs reach 6; of those of 1, -2 and 3, 6 reach 2 (4 are 2 or more apart from 0 and 2 are 6)."""
    assert sign_flip_test(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert sign_flip_test(np.array([1.0, -2.0, 3.0])) == 6 / 8
    assert sign_flip_test(np.zeros(4)) == 1.0


def test_signs_by_lot() -> None:
    assert sign_flip_test(np.ones(30)) == pytest.approx(1 / 10_001)
    assert sign_flip_test(np.array([1.0, -1.0] * 15)) == 1.0


def test_permutations() -> None:
    """Two columns, of which the second is always greater: as far apart are 2 of 2^6 ways to order 6 rows."""
    matrix = np.array([[0.0, 1.0]] * 6)
    assert permutation_test(matrix) == pytest.approx(2 / 64, abs=0.01)
    assert permutation_test(np.zeros((5, 3))) == 1.0


def test_tests_find_nothing_where_nothing_is() -> None:
    """With noise alone, p-values below 0.2 are about as rare as they say."""
    draw = np.random.default_rng(1)
    assert sum(sign_flip_test(draw.normal(size=9)) < 0.2 for _ in range(100)) < 35
    assert sum(permutation_test(draw.normal(size=(6, 3))) < 0.2 for _ in range(20)) < 10


def test_holm_by_hand() -> None:
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}


def test_intervals_hold_the_mean() -> None:
    values = np.random.default_rng(2).normal(5.0, 1.0, size=50)
    low, high = bootstrapped(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(50), rel=0.1)


def test_near_the_end() -> None:
    assert near(points(100, 60.5, 60)) == 5
    assert near(points(100, 61, 60)) == 10
    assert near(points(60, 60, 60)) == 0


def test_a_planted_order_is_found() -> None:
    table = StudyTable(SETTINGS, planted({"topo": 1.0, "bfs": 0.8, "alpha": 1.0}))
    assert table.sources == ("deep", "wide", "all")
    rows = {(row.source, row.order): row for row in table.rows}
    assert len(rows) == 3 * (3 + len(CONTROLS))
    for source in table.sources:
        bfs, alpha, topo = (rows[source, order] for order in ("bfs", "alpha", "topo"))
        assert bfs.over_reference == pytest.approx(0.8, rel=0.02)
        assert alpha.over_reference == pytest.approx(1.0, rel=0.02)
        assert (topo.over_reference, topo.p) == (None, None)
        assert bfs.low < bfs.ratio < bfs.high
        assert bfs.ratio == pytest.approx(0.8 * topo.ratio, rel=0.02)
        assert alpha.p > 0.05
        assert (bfs.episodes, bfs.seconds) == (5, 2)
    assert rows["deep", "bfs"].p < 0.05
    assert rows["wide", "bfs"].p == 4 * 2 / 16  # no four graphs tell more
    assert table.p_of_sources["deep"] < 0.01
    text = "\n".join(table.lines())
    assert "| deep | `bfs` | 0." in text
    assert "deep: the order makes a difference (p = 0.0" in text
    assert "12 graphs (train split), 2 repeats of 10 episodes, 3 devices." in text


def test_equal_orders_are_not_told_apart() -> None:
    table = StudyTable(SETTINGS, planted({"topo": 1.0, "bfs": 1.0, "alpha": 1.0}))
    assert all(p > 0.05 for p in table.p_of_sources.values())
    assert "was not shown to make a difference" in "\n".join(table.lines())


def test_graphs_that_lack_an_order_are_left_out_of_comparisons_with_it() -> None:
    runs = planted({"topo": 1.0, "bfs": 0.8, "alpha": 1.0})
    part = {run: found for run, found in runs.items() if (run.graph, run.order) != ("g0", "bfs")}
    assert StudyTable(SETTINGS, part).matrix("deep", ("topo", "bfs")).shape == (7, 2)
    assert StudyTable(SETTINGS, {}).rows == []


# Files


def test_runs_are_read_back(tmp_path: Path) -> None:
    """Where a run was cut off and made again, the second one counts; one that has not come to its end is not there."""
    path, first, second = tmp_path / "runs.csv", Run("deep", "g0", "topo", 0), Run("deep", "g0", "bfs", 1)
    assert read_runs(path, 10) == {}
    append(path, first, points(100.0, 90.0, 80.0)[:2])
    assert read_runs(path, 10) == {}
    append(path, first, points(100.0, 90.0, 80.0))
    append(path, second, points(1 / 3, 0.25, 0.125))
    found = read_runs(path, 10)
    assert found[first] == points(100.0, 90.0, 80.0)
    assert [point.best_us for point in found[second]] == [0.3333333, 0.25, 0.125]
    assert len(path.read_text().splitlines()) == 1 + 2 + 3 + 3


@pytest.mark.parametrize("length", range(1, 300, 13))
def test_a_file_that_was_cut_off_goes_on(tmp_path: Path, length: int) -> None:
    """As a full disk, or a power cut, leaves it: in mid-row, in the line of names, empty."""
    path, first, second = tmp_path / "runs.csv", Run("deep", "g0", "topo", 0), Run("deep", "g0", "bfs", 1)
    append(path, first, points(100.0, 90.0, 80.0))
    append(path, second, points(50.0, 40.0, 30.0))
    whole = path.read_bytes()
    os.truncate(path, max(len(whole) - length, 0))
    left = read_runs(path, 10)
    assert second not in left
    for run, steps in ((first, (100.0, 90.0, 80.0)), (second, (50.0, 40.0, 30.0))):
        if run not in left:
            append(path, run, points(*steps))
    assert read_runs(path, 10) == {first: points(100.0, 90.0, 80.0), second: points(50.0, 40.0, 30.0)}


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ",".join(NAMES) + "\nx,y,z,0,5,fast,1,1,1\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(FileError, match="is not a file of runs"):
        read_runs(tmp_path / "runs.csv", 10)
