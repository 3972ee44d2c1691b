"""Search times of captured models: a row holds what was found, and the tables show it."""

from baechi_runtime.models.registry import ModelOptions
from benchmarks import pase_captured

SMALL = ModelOptions(batch_size=4, vocab_size=64, rnn_units=16, max_seq_length=8, rnn_chunk=4)


def test_a_model_is_captured_and_searched() -> None:
    found = pase_captured.sample("rnnlm", [2, 4], 2, SMALL)
    assert found["calls"] > 4
    assert found["unknown"] == {}
    assert [row["devices"] for row in found["rows"]] == [2, 4]
    for row, free in zip(found["rows"], found["untied"], strict=True):
        assert (row["status"], len(row["cpu_seconds"])) == ("optimal", 2)
        assert row["data_parallel"] >= 1
        assert free["cost_flop"] <= row["cost_flop"] * (1 + 1e-9)
    text = pase_captured.report({"models": [found]})
    assert f"{found['rows'][1]['data_parallel']:.2f}" in text
    assert "cost, alike / free" in text
