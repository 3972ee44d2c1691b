"""`baechi probe-links`: lines as Baechi prints them, samples kept, and a cluster file that other commands read."""

import json
import re
from pathlib import Path

import pytest

from baechi_ext.cost import bend_bytes
from baechi_ext.ir import Cluster
from baechi_runtime.cli.main import main
from baechi_runtime.host.host_memory import usable_bytes
from tests.runtime import forked


def test_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, samples = tmp_path / "cluster.json", tmp_path / "samples.json"
    assert main(["probe-links", "--max_exponent=6", f"--out={cluster}", f"--samples={samples}", "--num_devices=3"]) == 0
    out = capsys.readouterr().out
    lines = re.findall(r"^Communication cost function: (\S+) x \+ (\S+)$", out, re.MULTILINE)
    assert len(lines) == 6
    assert out.count("  tensors are handed over, not copied") == 6
    assert "r2" not in out
    loaded = Cluster.load(cluster)
    assert [d.name for d in loaded.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert {d.memory_bytes for d in loaded.devices} == {usable_bytes() // 3}
    assert loaded.parallel_transfers
    kept = json.loads(samples.read_text())
    assert [len(p["samples_us"]) for p in kept["pairs"]] == [7] * 6
    for (slope, latency), pair in zip(lines, kept["pairs"], strict=True):
        assert float(slope) == pair["one_way"]["us_per_byte"] == 0
        assert float(latency) == pytest.approx(pair["one_way"]["latency_us"], rel=1e-4)
        link = loaded.pairs[pair["source"], pair["target"]]
        assert link.latency_us == pair["latency_us"]


def test_processes_charge_the_devices(tmp_path: Path) -> None:
    """Where other programs come between too often to tell, as they do beside other tests, that is said of the link instead."""
    cluster = tmp_path / "cluster.json"
    done = forked.run("probe-links", "--workers=process", "--max_exponent=10", f"--out={cluster}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Communication cost function:") == 2
    loaded = Cluster.load(cluster)
    assert not loaded.parallel_transfers
    charged = [link for link in loaded.pairs.values() if link.send_us or link.send_us_per_byte]
    assert len(charged) + done.stdout.count("so it is counted as none") == len(loaded.pairs) == 2
    for link in charged:
        assert link.send_us + link.send_us_per_byte * 2**12 > 1
        assert link.receive_us + link.receive_us_per_byte * 2**12 > 1


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--num_devices=1"], 2, "a link has two ends"),
        (["--max_exponent=40"], 2, "not a whole number from 3 to 29"),
        (["--out=/nowhere/c.json"], 1, "cannot write '/nowhere/c.json'"),
        (["--num_gpus=99"], 1, "--num_gpus=99 asks for 99 CUDA devices"),
        (["--num_gpus=99", "--workers=process"], 1, "--num_gpus=99 asks for 99 CUDA devices"),
    ],
)
def test_bad_input(flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe-links", *flags]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error:") == 1
    assert message in captured.err


def test_a_bend_is_where_another_line_begins() -> None:
    sizes = [2**i for i in range(2, 24)]
    assert bend_bytes([(s, 30 + 0.001 * s) for s in sizes]) is None
    bent = [(s, 30 + 0.0001 * s if s < 2**16 else 30 + 0.0001 * s + 0.01 * (s - 2**16)) for s in sizes]
    assert 2**15 <= bend_bytes(bent) <= 2**18
