"""`baechi train` as a user calls it: a real run in a process of its own, its files, and its errors."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_ext.ir import OpGraph, Plan
from baechi_runtime.cli.flags.train import OPTIMIZERS
from baechi_runtime.cli.main import main
from baechi_runtime.files.run_folder import RunFolder
from tests.processes import children_of
from tests.runtime.chrome_trace import problems_of
from tests.runtime.forked import start
from tests.runtime.workers import finish, only_error, wait_for_line

Run = Callable[..., tuple[int, str, str]]

SMALL = ["--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--num_steps=2", "--device_speeds=1"]
KEYS = {
    "model",
    "method",
    "executor",
    "num_devices",
    "parity",
    "predicted_step_us",
    "measured_step_us",
    "speedup",
    "peak_memory_bytes",
    "lower_bound_us",
    "load_of_others",
    "conclusive",
}


def baechi(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """The command in a process of its own, with as many threads as a user's has."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "runtime")])}
    environment.pop("OMP_NUM_THREADS", None)
    return subprocess.run(
        [sys.executable, "-m", "baechi_ext", *args], capture_output=True, text=True, timeout=240, cwd=cwd or root, env=environment
    )


def test_a_run_reports_and_keeps_its_files(run: Run, tmp_path: Path) -> None:
    done = baechi("train", *SMALL, "--placement_method=m_etf", "--json", f"--out={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) >= KEYS
    assert (report["model"], report["method"], report["executor"], report["num_devices"]) == ("wide_towers", "m_etf", "thread", 2)
    assert report["parity"] == {**report["parity"], "passed": True, "max_abs_diff": 0.0, "max_rel_diff": 0.0}
    for variant in ("single", "placed"):
        assert report["predicted_step_us"][variant] > 0
        measured = report["measured_step_us"][variant]
        assert 0 < measured["min"] <= measured["median"]
        assert len(measured["samples"]) == 2
    assert 0 < report["lower_bound_us"] <= report["predicted_step_us"]["placed"]
    assert len(report["peak_memory_bytes"]["predicted"]) == len(report["peak_memory_bytes"]["measured"]) == 2
    assert report["conclusive"] is False  # two steps prove nothing, and it says so
    assert any("fewer than 6 steps" in doubt for doubt in report["doubts"])
    graph = OpGraph.load(tmp_path / "run" / "graph.json")
    plan = Plan.load(tmp_path / "run" / "plan.json", graph)
    assert plan.predicted_step_us == report["predicted_step_us"]["placed"]
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == report
    assert report["command"] == ["baechi", "train", *SMALL, "--placement_method=m_etf", "--json", f"--out={tmp_path / 'run'}"]
    kept = RunFolder.load(tmp_path / "run")
    assert kept.timeline.makespan_us == plan.predicted_step_us
    assert kept.profile is not None
    assert {op.id for op in kept.measured.ops} == set(graph.index)
    assert len(kept.measured.transfers) == report["transfers"]
    assert main(["trace", str(tmp_path / "run")]) == 0
    assert problems_of(json.loads((tmp_path / "run" / "trace.json").read_text())) == []
    _, simulated, _ = run("simulate", tmp_path / "run" / "graph.json", tmp_path / "run" / "plan.json", "--json")
    assert json.loads(simulated)["makespan_us"] == pytest.approx(plan.predicted_step_us)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])
    assert data["headline"]["verdict"]["tone"] == "doubt"
    assert data["headline"]["command"] == shlex.join(report["command"])
    assert data["predicted"]["step_us"] == pytest.approx(plan.predicted_step_us)
    assert data["measured"]["step_us"] > 0


def test_costgen_writes_costs_that_a_later_run_reads_and_another_graph_refuses(run: Run, tmp_path: Path) -> None:
    cost = tmp_path / "cost.pkl"
    code, out, err = run("train", *SMALL[:3], "--costgen", f"--cost_path={cost}")
    assert code == 0, err
    assert "ops written to" in out
    assert json.loads(cost.read_text())["clock"] == "thread_cpu"
    code, out, err = run("train", *SMALL, f"--cost_path={cost}", "--num_devices=1", "--placement_method=single")
    assert code == 0, err
    assert "profiling" not in err
    assert "parity" in out
    code, out, err = run("train", *SMALL[:2], "--batch_size=3", f"--cost_path={cost}")
    assert (code, out) == (1, "")
    assert "the profile is of another graph: the first op that differs is" in only_error(err)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--model_name=vgg"], 2, "choose one of inception_v3, wide_towers"),
        (["--optimizer=lion"], 2, "choose one of sgd, momentum, rmsprop, adagrad, adadelta, adam, adamw"),
        (["--optimizer=ftrl"], 2, "ftrl is TensorFlow's alone; choose adagrad"),
        (["--workers=fork"], 2, "choose one of thread"),
        (["--placement_method=best"], 2, "choose one of auto, refine, single, "),
        (["--num_devices=0"], 2, "'0' is not a whole number from 1"),
        (["--image_size=1"], 2, "--image_size=1 is too small for wide_towers"),
        (["--vocab_size=9"], 2, "--vocab_size is not an option of wide_towers; it is one of gnmt_v2"),
        (["--rnn_unit_type=rnn"], 2, "choose one of lstm, gru"),
        (["--encoder_type=bert"], 2, "choose one of gnmt, bi, uni"),
        (["--cost_path=/nowhere/cost.json"], 1, "cannot read profile file '/nowhere/cost.json'"),
        (["--costgen", "--cost_path=/nowhere/cost.json"], 1, "cannot write '/nowhere/cost.json'"),
        (["--cluster=/nowhere/cluster.json"], 1, "cannot read cluster file '/nowhere/cluster.json'"),
        (["--comm_cost_coeffs=1"], 2, "is not two numbers a,b"),
        (["--num_steps=2", "--costgen"], 2, "--num_steps is how many steps are timed, and --costgen times none; drop one of them"),
        (["--num_steps=2", "--train_steps=4"], 2, "--train_steps times none; drop one of them"),
        (["--num_steps=2", "--hardware=h100"], 2, "--hardware times none; drop one of them"),
        (["--num_gpus=99"], 1, "--num_gpus=99 asks for 99 CUDA devices and this machine has"),
        (["--workers=process", "--num_gpus=99"], 1, "--num_gpus=99 asks for 99 CUDA devices and this machine has"),
        (["--device_memory=1KiB", "--comm_cost_coeffs=0.001,50"], 1, "1024"),
    ],
)
def test_bad_input(flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL[:3], "--device_speeds=1", *flags]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in only_error(captured.err)


def test_a_model_that_does_not_fit_is_said_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--device_memory=1KiB", "--comm_cost_coeffs=0.001,50", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "infeasible"
    assert "1024" in only_error(captured.err)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read expert file"), ("a poem", "is not valid JSON"), ('{"a": "x"}', "the device of 'a' is 'x'; expected its index")],
)
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_bad_expert_file_is_told_before_torch_is_loaded(tmp_path: Path, content: str | None, message: str, workers: str) -> None:
    path = tmp_path / "expert.json"
    if content is not None:
        path.write_text(content)
    flags = ["train", *SMALL, "--placement_method=expert", f"--expert_file={path}", f"--workers={workers}"]
    code = f"import sys; from baechi_runtime.cli.main import main; code = main({flags!r}); sys.exit(77 if 'torch' in sys.modules else code)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in only_error(done.stderr)


@pytest.mark.parametrize(
    ("model", "names", "code", "message"),
    [
        ("alexnet", None, 2, "the graph has no expert hints; give some with --expert_file=FILE"),
        ("wide_towers", ["model.towers.*", "nowhere"], 1, "no op and no colocation group of the graph is called 'nowhere'; take names"),
    ],
)
def test_missing_hints_are_told_before_the_profile(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    names: list[str] | None,
    code: int,
    message: str,
) -> None:
    from baechi_runtime.torch import backend

    monkeypatch.setattr(backend, "profile_step", None)  # whoever calls it now gets a TypeError
    flags = [f"--model_name={model}", "--image_size=75", "--batch_size=2", "--placement_method=expert"]
    if names is not None:
        (tmp_path / "expert.json").write_text(json.dumps(dict.fromkeys(names, 0)))
        flags.append(f"--expert_file={tmp_path / 'expert.json'}")
    assert main(["train", *flags]) == code
    assert message in only_error(capsys.readouterr().err)


def test_num_devices_wins_over_num_gpus() -> None:
    from baechi_runtime.cli.flags.train import train_request
    from baechi_runtime.cli.main import make_parser

    request = train_request(make_parser().parse_args(["train", "--num_gpus=4", "--num_devices=3"]))
    assert (request.num_devices, request.cuda) == (3, False)
    assert train_request(make_parser().parse_args(["train", "--num_gpus=4"])).cuda


def test_the_flags_list_the_runtimes_optimizers() -> None:
    from baechi_runtime.models.training_step import OPTIMIZERS as REAL

    assert tuple(REAL) == OPTIMIZERS


@pytest.mark.parametrize(
    ("command", "kept"),
    [("train", ""), ("train", "plan.json is kept"), ("compare", "plan.json is kept, and so are plan_m_etf.json, plan_single.json")],
)
def test_ctrl_c_ends_a_run_at_once_and_says_which_plan_is_kept(tmp_path: Path, command: str, kept: str) -> None:
    flags = [f"--out={tmp_path}"] if kept else []
    flags += ["--placement_methods=single,m_etf"] if command == "compare" else ["--time_limit=0.5"]
    process = start(command, *SMALL[:3], *flags, "--num_steps=100000", "--comm_cost_coeffs=0.001,50")
    try:
        for line in process.stderr:
            if line.startswith("measuring"):
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert only_error(err) == f"error: interrupted{f'; {tmp_path}/{kept}' if kept else ''}"
    if kept:
        Plan.load(tmp_path / "plan.json", OpGraph.load(tmp_path / "graph.json"))


@pytest.mark.parametrize(("method", "workers"), [("auto", "thread"), ("refine", "process")])
def test_ctrl_c_in_a_search_keeps_its_best_plan(tmp_path: Path, method: str, workers: str) -> None:
    """For worker processes, too: only rank 0, which the user did not start, has the plan."""
    kept = tmp_path / "run"
    flags = [*SMALL, f"--placement_method={method}", f"--workers={workers}", "--num_devices=3", "--time_limit=3600", f"--out={kept}"]
    flags += ["--comm_cost_coeffs=0.001,50"]
    process = start("train", *flags)
    wait_for_line(process, "  best ")
    started = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, timeout=120)
    assert (code, out) == (130, "")
    assert only_error(err) == f"error: interrupted; the best plan found until then is {kept / 'plan.json'}"
    assert len(started) == (3 if workers == "process" else 0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    plan = Plan.load(kept / "plan.json", OpGraph.load(kept / "graph.json"))
    assert (plan.method, plan.status) == (method, "feasible")


GNMT = ["--model_name=gnmt_v2", "--vocab_size=40", "--max_seq_length=6", "--rnn_units=8", "--num_layers=2", "--residual", "--rnn_chunk=3"]


def test_costs_are_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    assert main(["train", *GNMT, "--costgen", "--json", f"--cost_path={path}"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"] == json.loads(path.read_text())["ops"]


def test_the_expert_places_gnmt(run: Run, tmp_path: Path) -> None:
    """In Baechi's own words: all flags of its example but the size, and its expert's placement, for real."""
    flags = [*GNMT, "--batch_size=4", "--rnn_unit_type=gru", "--encoder_type=gnmt", "--num_steps=2", "--num_devices=3"]
    code, out, err = run("train", *flags, "--placement_method=expert", "--json", f"--out={tmp_path / 'run'}")
    assert code == 0, err
    report = json.loads(out)
    assert (report["parity"]["passed"], report["parity"]["max_abs_diff"]) == (True, 0.0)
    graph = OpGraph.load(tmp_path / "run" / "graph.json")
    plan = Plan.load(tmp_path / "run" / "plan.json", graph)
    where = {name: plan.placement[members[0]] for name, members in graph.groups.items()}
    assert (where["encoder.forward_layers.0.weight"], where["encoder.layers.0.weight"], where["decoder.layers.1.weight"]) == (0, 1, 1)
    assert where["projection.weight"] == 2  # with more devices than layers it has one of its own


def test_the_models_flags_become_its_options() -> None:
    from baechi_runtime.cli.flags.train import train_request
    from baechi_runtime.cli.main import make_parser
    from baechi_runtime.models.registry import ModelOptions

    given = [*GNMT, "--rnn_unit_type=gru", "--encoder_type=bi", "--batch_size=7", "--seed=3", "--num_gpus=5"]
    expected = ModelOptions(7, None, 3, 5, 40, 6, 8, "gru", 2, "bi", True, 3)
    assert train_request(make_parser().parse_args(["train", *given])).model_options == expected
    assert train_request(make_parser().parse_args(["train"])).model_options == ModelOptions(num_devices=2)


def test_the_flags_list_the_models_choices() -> None:
    from baechi_runtime.models.options.gnmt_v2 import UNIT_TYPES
    from baechi_runtime.models.torch import rnn

    assert tuple(rnn.UNIT_TYPES) == UNIT_TYPES
