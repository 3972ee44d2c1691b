"""The benchmark of searches: cells in processes of their own, and its tables."""

import pytest

from benchmarks import pase


def test_cells_are_searched_in_their_own_processes(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [pase.cell_name("alexnet", 8, "original"), pase.cell_name("transformer", 2, "default", 1)]
    rows = pase.measured(cells, 2)
    assert rows[0]["cost_flop"] == 97_098_296_512
    assert all(row["status"] == "optimal" and len(row["seconds"]) == 2 for row in rows)
    assert all(0 < row["imports_bytes"] <= min(row["peak_bytes"]) for row in rows)
    pase.show(rows, pase.compared(2, "default"))
    out = capsys.readouterr().out
    assert "97,098,296,512" in out
    assert "1 + 1" in out
    assert "one weird trick" in out


def test_others_cost_no_less() -> None:
    for row in pase.compared(4, "original"):
        assert min(row["others"].values()) >= 1 - 1e-9
