"""`baechi train --framework=tensorflow` as a user calls it: real runs of small models on real servers, and what is refused."""

import json
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from baechi_ext.cost import Profile
from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.made_by import MadeBy
from baechi_runtime.cli.main import parsed
from baechi_runtime.tensorflow import cluster
from tests.cli.test_train import KEYS
from tests.runtime import forked
from tests.runtime.namespaces import refusal

Run = Callable[..., tuple[int, str, str]]

TRAIN = ("train", "--framework=tensorflow")
SMALL = ("--model_name=wide_towers", "--batch_size=2", "--image_size=2", "--d_model=8", "--num_layers=1", "--num_steps=2")
LINK = "--comm_cost_coeffs=0.001,50"
_FLAGS = (
    "--optimizer=adam --batch_size=2 --model_name=gnmt_v2 --vocab_size=40 --max_seq_length=2 --rnn_unit_type=lstm --rnn_units=8 "
    "--num_layers=2 --encoder_type=gnmt --num_gpus=4 --num_devices=2 --residual --colocate_grads_with_ops --only_forward"
)
README = _FLAGS.split()
"""The flags of Baechi's README, with smaller sizes, on CPU workers."""


def test_a_run_reports_and_keeps_its_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is probed by messages of two sizes."""
    monkeypatch.setattr(cluster, "probe_link", partial(cluster.probe_link, sizes=(4, 65536)))
    code, out, err = run(*TRAIN, *SMALL, "--placement_method=round_robin", "--json", f"--out={tmp_path / 'run'}")
    assert code == 0, err
    report = json.loads(out)
    assert set(report) >= KEYS
    assert (report["method"], report["executor"], report["num_devices"]) == ("round_robin", "servers", 2)
    assert report["parity"] == {**report["parity"], "passed": True, "tolerance": 1e-5}
    assert report["parity"]["max_rel_diff"] <= 1e-5
    assert report["transfers"] > 0
    for variant in ("single", "placed"):
        assert report["predicted_step_us"][variant] > 0
        assert len(report["measured_step_us"][variant]["samples"]) == 2
    assert all(us > 0 for us in report["busy_us"]["measured"])
    assert len(report["peak_memory_bytes"]["measured"]) == 2
    assert report["peak_memory_bytes"]["measured_by"] == "allocator"
    assert report["link_probe"]["receive_us"] > 0
    graph = OpGraph.load(tmp_path / "run" / "graph.json")
    plan = Plan.load(tmp_path / "run" / "plan.json", graph)
    assert plan.predicted_step_us == report["predicted_step_us"]["placed"]
    assert plan.made_by == MadeBy(tuple(report["command"]), report["versions"])
    assert set(report["versions"]) >= {"baechi", "python", "tensorflow"}
    assert Profile.load(tmp_path / "run" / "profile.json", graph).clock == "run_metadata"


def test_logical_devices_and_a_search_that_does_not_split(run: Run) -> None:
    """With links that cost seconds nothing is moved: all is on one device, and it says so, but for ops that share no tensor with others."""
    code, out, err = run(*TRAIN, *SMALL, "--workers=thread", "--comm_cost_coeffs=1000,1000000", "--time_limit=0.5")
    assert code == 0, err
    assert re.search(r"transferred +0 tensors", out)
    whole = "splitting does not pay" in out or "whether splitting pays is not known: the time limit" in out
    assert whole == bool(re.search(r"cpu:[01] +0 +0%", out))
    assert re.search(r"tf.function, (one thread|\d+ threads|a thread a core) +- ", out)  # others of this process may have chosen
    assert "peak computed" in out


def test_baechis_readme(run: Run, tmp_path: Path) -> None:
    """Profile, measure the links, place with fusion: flag by flag."""
    costs, cluster = tmp_path / "cost.json", tmp_path / "cluster.json"
    code, out, err = run(*TRAIN, "--costgen", f"--cost_path={costs}", *README)
    assert code == 0, err
    assert out.startswith(f"costs of {len(json.loads(costs.read_text())['ops'])} ops written to {costs}\n")
    code, out, err = run("probe-links", "--framework=tensorflow", "--num_gpus=4", "--num_devices=2", "--max_exponent=3", f"--out={cluster}")
    assert code == 0, err
    assert out.count("Communication cost function: ") == 2
    assert len(Cluster.load(cluster)) == 2
    placing = "--placement_method=m_etf --placer_type=fusion --grouper=coplace --comm_cost_coeffs=0.0001754,134 --memory_fraction=1.0"
    code, out, err = run(*TRAIN, f"--cost_path={costs}", *README, *placing.split(), "--num_steps=1", "--json", f"--out={tmp_path / 'run'}")
    assert code == 0, err
    report = json.loads(out)
    assert report["parity"]["passed"]
    graph = OpGraph.load(tmp_path / "run" / "graph.json")
    plan = Plan.load(tmp_path / "run" / "plan.json", graph)
    where = dict(zip(graph.index, plan.placement, strict=True))
    assert all(where[op.id] == where[op.forward_op] for op in graph.ops if op.forward_op is not None)
    code, _, err = run(*TRAIN, f"--cost_path={costs}", *SMALL)
    assert (code, err.count("error:")) == (1, 1)


def free_port(address: str) -> int:
    with socket.socket() as each:
        each.bind((address, 0))
        return each.getsockname()[1]


@pytest.mark.skipif(refusal() is None, reason="test_several_hosts has two nodes for that")
def test_two_hosts() -> None:
    """Two addresses of this machine, the same command for each; the one that serves ends with the one that drives."""
    hosts = ",".join(f"{address}:{free_port(address)}" for address in ("127.0.0.1", "127.0.0.2"))
    flags = [*TRAIN, *SMALL, "--placement_method=round_robin", LINK, f"--cluster_hosts={hosts}", "--json"]
    serving = forked.start(*flags, "--task_index=1")
    driving = forked.run(*flags)
    out, err = serving.communicate(timeout=120)
    assert driving.returncode == 0, driving.stderr
    assert (serving.returncode, out) == (0, ""), err
    report = json.loads(driving.stdout)
    assert (report["parity"]["passed"], report["executor"], report["num_devices"]) == (True, "servers of several hosts", 2)
    assert "error:" not in driving.stderr + err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--cluster_hosts=127.0.0.1:{taken}"], 1, "the port is taken, or the address is not of this machine"),
        (["--cluster_hosts=127.0.0.1:{free},127.0.0.1:1", "--timeout=1"], 1, "127.0.0.1:1 did not answer within 1 s; start there"),
        (["--cluster_hosts=127.0.0.1:1,127.0.0.1:{free}", "--task_index=1", "--timeout=1"], 1, "127.0.0.1:1, which drives, did not come"),
        (["--cluster_hosts=alpha"], 2, "'alpha' is not host:port"),
        (["--cluster_hosts=alpha:1,alpha:1"], 2, "'alpha:1' appears twice"),
        (["--cluster_hosts=alpha:1,beta:1", "--task_index=2"], 2, "--task_index=2 is not a place in --cluster_hosts; its 2 places"),
        (["--cluster_hosts=alpha:1,beta:1", "--num_devices=3"], 2, "names 2 devices; drop --num_devices"),
        (["--cluster_hosts=alpha:1,beta:1", "--workers=thread"], 2, "drop --workers=thread"),
        (["--task_index=0"], 2, "give that as well"),
        (["--relaxed_random"], 2, "--relaxed_random is for --framework=torch"),
        (["--num_gpus=64"], 1, "--num_gpus=64 asks for 64 GPUs and TensorFlow finds"),
        (["--split_gpu=2"], 2, "give --device_memory=SIZE"),
        (["--model_name=alexnet"], 2, "unknown model 'alexnet'; choose one of"),
        (["--rnn_units=8"], 2, "--rnn_units is not an option of wide_towers"),
    ],
)
def test_what_is_refused(run: Run, flags: list[str], code: int, said: str) -> None:
    """In one line."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ports = {"free": free_port("127.0.0.1"), "taken": listener.getsockname()[1]}
        found, out, err = run(*TRAIN, *SMALL, *(flag.format(**ports) for flag in flags))
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert (found, out, len(errors)) == (code, "", 1), err
    assert said in errors[0]


@pytest.mark.parametrize(
    ("flag", "said"),
    [("--model_name=alexnet", "unknown model"), ("--rnn_units=8", "is not an option"), ("--task_index=0", "give that as well")],
)
def test_what_is_wrong_with_flags_is_said_before_servers_start(flag: str, said: str) -> None:
    args = parsed([*TRAIN, flag])
    with pytest.raises(OptionError, match=said):
        args.does.request(args)


def test_a_memory_limit_that_is_too_small(run: Run) -> None:
    code, out, err = run(*TRAIN, *SMALL, LINK, "--device_memory=100")
    assert (code, out, err.count("error:")) == (1, "", 1)


def test_hosts_are_for_tensorflow(run: Run) -> None:
    code, _, err = run("train", "--cluster_hosts=alpha:1,beta:1")
    assert (code, err.splitlines()[-1].partition(";")[0]) == (2, "error: --cluster_hosts is for --framework=tensorflow")
