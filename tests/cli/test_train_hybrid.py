"""`--placement_method=hybrid` as a user calls it."""

import json
from pathlib import Path

import pytest

from baechi_ext.hybrid.plan import HybridPlan, load_plan
from baechi_ext.ir import Cluster, Device, Link, OpGraph
from baechi_runtime.cli.main import main

SIZES = ["--num_layers=1", "--d_model=64", "--num_heads=4", "--vocab_size=64", "--max_seq_length=16", "--batch_size=8"]
SMALL = ["train", "--model_name=gpt2", *SIZES, "--num_steps=2", "--time_limit=0.5"]
METHOD = "--placement_method=hybrid"


def cluster_of_four(folder: Path) -> str:
    Cluster(tuple(Device(f"d{i}") for i in range(4)), Link()).save(folder / "cluster.json")
    return f"--cluster={folder / 'cluster.json'}"


def test_a_plan_on_groups_is_kept_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [METHOD, "--num_devices=4", cluster_of_four(tmp_path), f"--out={tmp_path / 'run'}"]
    assert main([*SMALL, *flags]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("error: the best plan has 1 group of 4 devices and a predicted step of ")
    assert "placement alone" in shown
    assert "run --placement_method=auto, or --sharding=pase" in shown
    graph = OpGraph.load(tmp_path / "run" / "graph.json")
    plan = load_plan(tmp_path / "run" / "plan.json", graph)
    assert isinstance(plan, HybridPlan)
    split = plan.shard[graph.index["addmm"]]
    assert split.node == "addmm"
    assert split.compute_share == 0.25
    files = [str(tmp_path / "run" / name) for name in ("graph.json", "plan.json")]
    assert main(["simulate", *files, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["makespan_us"] == pytest.approx(plan.predicted_step_us)
    assert (len(report["busy_us"]), report["violations"]) == (1, [])
    assert main(["simulate", *files, f"--device_memory={int(plan.peak_memory_bytes[0] / 2)}", "--json"]) == 0
    assert "d0+d1+d2+d3" in json.loads(capsys.readouterr().out)["violations"][0]
    assert main(["simulate", *files, "--comm_cost_coeffs=1,1"]) == 1
    assert "not on other devices or links" in capsys.readouterr().err
    assert main(["export-device-map", *files]) == 1
    assert "groups of devices" in capsys.readouterr().err


def test_where_nothing_pays_it_runs_the_plain_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Cluster((Device("a"), Device("b")), Link(us_per_byte=1.0, latency_us=1e6)).save(tmp_path / "cluster.json")
    flags = ["--num_devices=2", f"--cluster={tmp_path / 'cluster.json'}", "--json"]
    assert main([*SMALL, METHOD, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == "hybrid"
    assert report["parity"]["passed"]
    assert any("neither placing nor sharding pays" in note for note in report["notes"])


def test_a_graph_file_says_nothing_of_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    OpGraph.from_json({"nodes": [{"id": "a", "compute_us": 1.0}], "edges": []}).save(tmp_path / "graph.json")
    assert main(["place", str(tmp_path / "graph.json"), "--num_devices=2", METHOD]) == 2
    assert "baechi train --model_name=... plans so, and baechi pase --model_name=... shards alone" in capsys.readouterr().err
    assert main(["place", str(tmp_path / "graph.json"), "--num_devices=2", METHOD, "--traversal_order=topo"]) == 2
    assert "--traversal_order is only for methods" in capsys.readouterr().err
