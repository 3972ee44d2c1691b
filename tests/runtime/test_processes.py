"""Devices as processes: real workers over gloo, their results, their memory, and their deaths."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baechi_ext.errors import ExecutionError
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.torch.processes.crash_log import CrashLog
from baechi_runtime.torch.processes.launch import Worker, _cause, run_workers
from baechi_runtime.torch.processes.words import Words
from tests.processes import ended, runs
from tests.runtime import workers as anew
from tests.runtime.forked import start, torchrun
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.last_words import BABBLE
from tests.runtime.workers import ROOT, finish, only_error, wait_for_line, workers_of

PROBED = ["train", "--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--workers=process", "--num_steps=2"]
SMALL = [*PROBED, "--comm_cost_coeffs=0.001,100", "--device_speeds=1"]
"""No link to probe, which takes longer than all else that a worker does."""
ENDLESS = [*SMALL, "--num_steps=100000", "--placement_method=m_etf"]


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_parity(workers: ForkedWorkers, num_devices: int) -> None:
    """Two are started by `baechi` itself, and probe their link."""
    method = "single" if num_devices == 1 else "contiguous"
    flags = [f"--num_devices={num_devices}", f"--placement_method={method}", "--optimizer=momentum", "--json"]
    if num_devices == 2:
        code, out, err = finish(start(*PROBED, *flags))
        assert code == 0, err
    else:
        out = workers.run("baechi_on_processes", num_devices, *SMALL, *flags)
    report = json.loads(out)
    assert (report["executor"], report["num_devices"]) == ("process", num_devices)
    assert report["parity"]["passed"]
    assert report["parity"]["max_abs_diff"] == 0.0
    assert report["transfers"] > 0 or num_devices == 1
    assert len(report["peak_memory_bytes"]["measured"]) == num_devices


def test_dropout_draws_the_same_numbers_wherever_it_runs(tmp_path: Path, workers: ForkedWorkers) -> None:
    """On device 1, which is another process than the one whose random state the caller seeded."""
    flags = ["train", "--model_name=rnnlm", "--vocab_size=20", "--rnn_units=8", "--max_seq_length=4", "--rnn_chunk=2", "--batch_size=2"]
    flags += ["--workers=process", "--num_steps=1", "--comm_cost_coeffs=0.001,100", "--placement_method=single", "--pin=native_dropout*=1"]
    out = workers.run("baechi_on_processes", 2, *flags, f"--out={tmp_path}", "--json")
    assert json.loads(out)["parity"] == {**json.loads(out)["parity"], "passed": True, "max_abs_diff": 0.0}
    run = RunFolder.load(tmp_path)
    draws = [op.phase == "forward" and "dropout" in op.id for op in run.graph.ops]
    assert {device for device, draw in zip(run.timeline.placement, draws, strict=True) if draw} == {1}


def test_a_worker_that_reads_late_that_it_is_to_stop_finds_the_store(workers: ForkedWorkers) -> None:
    workers.run("late_on_processes", 2)


def test_torchrun_starts_the_same_workers() -> None:
    """In new interpreters."""
    code, out, err = finish(anew.torchrun(*SMALL, "--time_limit=0.5", "--json"))
    assert code == 0, err
    report = json.loads(out)
    assert report["parity"]["max_abs_diff"] == 0.0
    assert report["executor"] == "process"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_worker_killed_in_mid_step_ends_all_with_its_name(rank: int) -> None:
    process = start(*ENDLESS)
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    assert set(workers) == {0, 1}
    os.kill(workers[rank], signal.SIGKILL)
    code, out, err = finish(process, timeout=30)
    assert (code, out) == (1, "")
    assert f"the worker of device {rank} was killed by SIGKILL" in only_error(err)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


def test_an_abort_is_told_with_its_last_words() -> None:
    said = r"device 1 was killed by SIGABRT; .* \(it ended with: terminate called after throwing an instance of 'X' what\(\):  the cause\)$"
    with pytest.raises(ExecutionError, match=said):
        run_workers(["abort"], 2, module="tests.runtime.last_words")


def test_bytes_that_are_no_text_do_not_hold_up_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_workers(["babble"], 2, module="tests.runtime.last_words") == 0
    assert capsys.readouterr().err == "caf\\xe9\n" + BABBLE


def test_a_worker_goes_on_where_nobody_reads_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), open(writing, "w") as nobody:
        monkeypatch.setattr("sys.stderr", nobody)
        assert run_workers(["babble"], 2, module="tests.runtime.last_words") == 0


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_worker_has_started_ends_with_it_unless_it_ended_well(tmp_path: Path, code: int) -> None:
    assert run_workers(["children", str(tmp_path), str(code)], 2, module="tests.runtime.last_words") == code
    children = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert code == 0 or ended(children, 10)
    left = [pid for pid in children if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert bool(left) == (code == 0)


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    command = [sys.executable, "-c", "import os, signal\nos.kill(os.getpid(), signal.SIGRTMIN + 1)"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        worker = Worker(0, process, Words(process.stderr, "a mark", shown=True))
        process.wait()
        assert f"the worker of device 0 was killed by signal {signal.SIGRTMIN + 1};" in str(_cause([worker], CrashLog.make(1)))


def test_sets_have_the_same_order_in_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert run_workers([str(tmp_path)], 4, module="tests.runtime.set_order") == 0
    assert len({path.read_text() for path in tmp_path.iterdir()}) == 1


def test_workers_import_nothing_from_where_they_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "pathlib.py").write_text("raise SystemExit('of a person')")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run_workers([str(tmp_path / "out")], 2, module="tests.runtime.set_order") == 0


@pytest.mark.parametrize("safely", [False, True])
def test_a_script_finds_what_is_beside_it_and_the_path_is_whole(tmp_path: Path, *, safely: bool) -> None:
    """As in workers, whose Python leaves out the folder that they are started in."""
    (tmp_path / "script.py").write_text("import sys, beside\nprint(*sys.path[:2], sep='\\n')\n")
    (tmp_path / "beside.py").touch()
    code = "import sys, pathlib\nfrom baechi_runtime.host.as_main import run_as_main\nrun_as_main(pathlib.Path(sys.argv[1]), ())"
    command = [sys.executable, *["-P"] * safely, "-c", code, str(tmp_path / "script.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert (done.stdout.splitlines(), done.stderr) == ([str(tmp_path), str(ROOT)], "")


def test_a_worker_that_never_answers_is_named_after_the_time_out() -> None:
    process = start(*ENDLESS, "--timeout=3")
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    os.kill(workers[1], signal.SIGSTOP)
    begin = time.monotonic()
    code, _, err = finish(process, timeout=60)
    assert code == 1
    assert "device 1" in only_error(err)
    assert time.monotonic() - begin < 40
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_torchrun_ends_all_where_a_worker_is_killed(rank: int) -> None:
    process = torchrun(*ENDLESS, "--timeout=3")
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    assert set(workers) == {0, 1}
    os.kill(workers[rank], signal.SIGKILL)
    code, out, err = finish(process, timeout=90)
    assert (code, out) == (1, "")
    assert f"Signal 9 (SIGKILL) received by PID {workers[rank]}" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


@pytest.mark.slow
def test_torchrun_ends_all_where_a_worker_never_answers() -> None:
    """Slow since torchrun gives a worker that is stopped 30 s to end, which no setting of its makes shorter."""
    process = torchrun(*ENDLESS, "--timeout=3")
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    os.kill(workers[1], signal.SIGSTOP)
    code, out, err = finish(process, timeout=90)
    assert (code, out) == (1, "")
    said = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(said) == 1
    assert "device 1" in said[0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


def test_torchrun_with_a_port_already_taken() -> None:
    """torchrun itself finds it, before there are workers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ("--master-addr=127.0.0.1", f"--master-port={taken.getsockname()[1]}")
        code, out, err = finish(anew.torchrun(*SMALL, options=options), timeout=90)
    assert (code, out) == (1, "")
    assert "EADDRINUSE" in err


def test_ctrl_c_ends_every_worker() -> None:
    process = start(*ENDLESS)
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, timeout=30)
    assert (code, only_error(err)) == (130, "error: interrupted")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


def test_an_interrupt_of_rank_0_alone_is_one_of_the_run() -> None:
    """As of a script that interrupts itself."""
    process = start(*ENDLESS)
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    os.kill(workers[0], signal.SIGINT)
    code, _, err = finish(process, timeout=30)
    assert (code, only_error(err)) == (130, "error: interrupted")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


def test_a_port_already_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start(*SMALL, "--num_devices=1", "--timeout=5", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        code, _, err = finish(process, timeout=60)
    assert code == 1
    assert f"could not meet at 127.0.0.1:{port}" in only_error(err)


def test_what_only_a_worker_can_find_wrong_in_the_flags_is_a_usage_error() -> None:
    code, out, err = finish(start(*SMALL, "--placement_method=m_etf", "--vocab_size=9"), timeout=60)
    assert (code, out) == (2, "")
    assert only_error(err).startswith("error: --vocab_size is not an option of wide_towers")


def test_another_number_of_workers_than_devices_is_refused() -> None:
    process = start(*SMALL, "--num_devices=3", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    code, _, err = finish(process, timeout=60)
    assert code == 1
    assert "1 workers were started for --num_devices=3" in only_error(err)
