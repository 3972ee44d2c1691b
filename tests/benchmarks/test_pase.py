"""The benchmark of searches: cells in processes of their own, and its tables."""

from benchmarks import pase
from benchmarks.pase import Cell


def test_cells_are_searched_in_their_own_processes() -> None:
    rows = pase.measured([Cell("alexnet", 8, "original"), Cell("transformer", 2, "default", 1)], 2)
    assert rows[0]["cost_flop"] == 97_098_296_512
    assert all(row["status"] == "optimal" and len(row["seconds"]) == 2 for row in rows)
    assert all(0 < row["imports_bytes"] <= min(row["peak_bytes"]) for row in rows)
    text = pase.report({"rows": rows, "others": pase.compared(2, "default")})
    assert "97,098,296,512" in text
    assert "1 + 1" in text
    assert "one weird trick" in text


def test_others_cost_no_less() -> None:
    for row in pase.compared(4, "original"):
        assert min(row["others"].values()) >= 1 - 1e-9
