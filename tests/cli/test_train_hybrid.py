"""`--placement_method=hybrid` as a user calls it."""

import json
from pathlib import Path

import pytest

from baechi_ext.hybrid.plan import HybridPlan, load_plan
from baechi_ext.ir import Cluster, Device, Link, OpGraph
from runtime.cli import main
from runtime.report_page.data import page_data
from runtime.run_folder import RunFolder
from tests.runtime.chrome_trace import problems_of

SIZES = ["--num_layers=1", "--d_model=64", "--num_heads=4", "--vocab_size=64", "--max_seq_length=16", "--batch_size=8"]
SMALL = ["train", "--model_name=gpt2", *SIZES, "--num_steps=2", "--time_limit=0.5"]
METHOD = "--placement_method=hybrid"


def cluster_of_four(folder: Path) -> str:
    Cluster(tuple(Device(f"d{i}") for i in range(4)), Link()).save(folder / "cluster.json")
    return f"--cluster={folder / 'cluster.json'}"


def test_threads_plan_and_keep_what_they_do_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [METHOD, "--workers=thread", "--num_devices=4", cluster_of_four(tmp_path), f"--out={tmp_path / 'run'}"]
    assert main([*SMALL, *flags]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("error: the best plan has 1 group of 4 devices and a predicted step of ")
    assert "placement alone" in shown
    assert "add --workers=process" in shown
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
    costs = f"--cost_path={tmp_path / 'run' / 'profile.json'}"
    assert main([*SMALL, *flags, costs, "--train_steps=2", f"--checkpoint={tmp_path / 'kept'}"]) == 2
    assert "drop --checkpoint" in capsys.readouterr().err


def test_processes_run_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [METHOD, "--num_devices=4", cluster_of_four(tmp_path), f"--out={tmp_path / 'run'}", "--json"]
    assert main([*SMALL, *flags]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["parity"]["passed"]
    assert report["parity"]["tolerance"] == 1e-8
    assert (report["method"], report["executor"], report["num_devices"]) == ("hybrid", "process", 4)
    assert len(report["measured_step_us"]["placed"]["samples"]) == 2
    assert report["predicted_step_us"]["placed"] < report["predicted_step_us"]["single"]
    assert report["sent_bytes"]["between_groups"] == 0
    assert report["sent_bytes"]["inside_groups"] > 0
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    run = RunFolder.load(tmp_path / "run")
    measured = run.require_measured()
    assert {op.id for op in measured.ops} == {op.id for op in run.graph.ops if op.op != "input"}
    assert {op.device for op in measured.ops} == {0}  # the group of all four
    assert main(["trace", str(run.path)]) == 0
    assert problems_of(json.loads((run.path / "trace.json").read_text())) == []
    assert page_data(run)["measured"]["step_us"] == measured.wall_us
    assert capfd.readouterr().out.startswith("the trace is")


def test_where_nothing_pays_it_runs_the_plain_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Cluster((Device("a"), Device("b")), Link(us_per_byte=1.0, latency_us=1e6)).save(tmp_path / "cluster.json")
    flags = ["--workers=thread", "--num_devices=2", f"--cluster={tmp_path / 'cluster.json'}", "--json"]
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
