"""The comparison of predicted and measured memory says how far the worst prediction is off."""

from benchmarks import memory


def test_lines() -> None:
    rows = [
        {"method": "m_etf", "device": 0, "predicted_bytes": 105 * 2**20, "measured_bytes": 100 * 2**20},
        {"method": "m_etf", "device": 1, "predicted_bytes": 46 * 2**20, "measured_bytes": 50 * 2**20},
    ]
    text = memory.report({"command": "python -m benchmarks.memory", "models": [{"model": "gpt2", "rows": rows}]})
    *table, _, worst = [" ".join(line.split()) for line in text.splitlines()]
    assert table[2] == "| gpt2 | m_etf | 0 | 105 MiB | 100 MiB | +5.0% |"
    assert table[3] == "| gpt2 | m_etf | 1 | 46 MiB | 50 MiB | -8.0% |"
    assert worst == "The worst is 8.0% off. `python -m benchmarks.memory`"
