"""Devices as processes: real workers over gloo, their results, their memory, and their deaths."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["train", "--model_name=wide_towers", "--image_size=16", "--batch_size=2", "--workers=process", "--num_steps=2"]


def start(*flags: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "runtime", *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 240) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def workers_of(parent: int) -> dict[int, int]:
    """Rank -> process id of the live workers below a launcher."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((int(e[5:]) for e in environment if e.startswith(b"RANK=")), None)
        if rank is not None and int(fields[1]) == parent and fields[0] != "Z":
            found[rank] = int(path.name)
    return found


def only_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_parity(num_devices: int) -> None:
    before = shared_memory()
    method = "single" if num_devices == 1 else "m_etf"
    code, out, err = finish(start(*SMALL, f"--num_devices={num_devices}", f"--placement_method={method}", "--optimizer=momentum", "--json"))
    assert code == 0, err
    report = json.loads(out)
    assert (report["executor"], report["num_devices"]) == ("process", num_devices)
    assert report["parity"]["passed"]
    assert report["parity"]["max_abs_diff"] == 0.0
    assert report["transfers"] > 0 or num_devices == 1
    assert len(report["peak_memory_bytes"]["measured"]) == num_devices
    assert shared_memory() == before


def test_dropout_draws_the_same_numbers_wherever_it_runs() -> None:
    """Inception has dropout; its device is another process than the one whose random state the caller seeded."""
    flags = ["train", "--model_name=inception_v3", "--image_size=75", "--batch_size=2", "--workers=process", "--num_steps=1"]
    code, out, err = finish(start(*flags, "--placement_method=contiguous", "--json"))
    assert code == 0, err
    assert json.loads(out)["parity"] == {**json.loads(out)["parity"], "passed": True, "max_abs_diff": 0.0}


def test_torchrun_starts_the_same_workers() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "runtime", *SMALL, "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    code, out, err = finish(process)
    assert code == 0, err
    report = json.loads(out)
    assert report["parity"]["max_abs_diff"] == 0.0
    assert report["executor"] == "process"


def wait_for_line(process: subprocess.Popen, start_of_line: str) -> None:
    for line in process.stderr:
        if line.startswith(start_of_line):
            return
    raise AssertionError(f"{start_of_line!r} was never said")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_killed_in_mid_step_ends_all_with_its_name(rank: int) -> None:
    before = shared_memory()
    process = start(*SMALL[:-1], "--num_steps=100000", "--placement_method=m_etf")
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    assert set(workers) == {0, 1}
    os.kill(workers[rank], signal.SIGKILL)
    code, out, err = finish(process, timeout=30)
    assert (code, out) == (1, "")
    assert f"the worker of device {rank} was killed by SIGKILL" in only_error(err)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
    assert shared_memory() == before


def test_a_worker_that_never_answers_is_named_after_the_time_out() -> None:
    process = start(*SMALL[:-1], "--num_steps=100000", "--placement_method=m_etf", "--timeout=5")
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    os.kill(workers[1], signal.SIGSTOP)
    begin = time.monotonic()
    code, _, err = finish(process, timeout=60)
    assert code == 1
    assert "device 1" in only_error(err)
    assert time.monotonic() - begin < 40
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())


def test_ctrl_c_ends_every_worker() -> None:
    process = start(*SMALL[:-1], "--num_steps=100000", "--placement_method=m_etf")
    wait_for_line(process, "measuring")
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
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
