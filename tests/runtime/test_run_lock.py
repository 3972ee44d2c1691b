"""Locks on folders: a second run is told at once, what killed runs left is taken over, and nothing stays."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baechi_ext.errors import FileError
from baechi_ext.ir import OpGraph
from baechi_runtime.cli.main import main
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.host.run_lock import NAME, locked
from tests.runtime.forked import start, torchrun
from tests.runtime.trainings import STEP, costs_of, losses_of
from tests.runtime.workers import finish, only_error

HOLDER = """
import sys
from baechi_runtime.host.run_lock import locked
with locked({"--out": sys.argv[1]}):
    print("locked", flush=True)
    sys.stdin.read()
"""
SECONDS = 120.0
TORCHRUN_SECONDS = 30.0
"""After which torchrun kills a worker that SIGTERM has not ended."""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def refused(folder: Path) -> str:
    with pytest.raises(FileError) as refusal, locked({"--out": str(folder)}):
        pass
    return str(refusal.value)


@pytest.mark.parametrize("text", ["x", "[1, {}]", "{}", "[" * 100_000])
def test_a_variable_that_somebody_else_has_set_holds_no_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setenv("BAECHI_LOCKED", text)
    with locked({"--out": str(tmp_path / "run")}):
        assert (tmp_path / "run" / NAME).exists()
        assert json.loads(os.environ["BAECHI_LOCKED"]) == [str(tmp_path / "run")]
    assert os.environ["BAECHI_LOCKED"] == text


def test_what_a_run_started_has_its_lock_as_long_as_it_lasts(
    holder: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv("BAECHI_LOCKED", json.dumps([str(folder)]))
    with locked({"--out": str(folder)}):
        assert json.loads((folder / NAME).read_text())["pid"] == holder.pid
    assert (folder / NAME).exists()
    holder.communicate(timeout=SECONDS)
    with locked({"--out": str(folder)}):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()


def test_the_second_is_told_who_writes_there(holder: subprocess.Popen, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = refused(folder)
    assert f"another run, process {holder.pid} on {os.uname().nodename}, writes into --out={folder}; wait until it ends" in said
    assert "choose another --out" in said
    (folder / NAME).write_text("[1")
    assert f"another run writes into --out={folder}" in refused(folder)
    holder.communicate(timeout=SECONDS)
    assert not folder.exists(), "the folder was made for the lock"


def test_a_killed_runs_lock_is_taken_over(holder: subprocess.Popen, tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    folder = tmp_path / "run"
    assert (folder / NAME).exists()
    with locked({"--out": str(folder)}):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
    assert list(folder.iterdir()) == []


def test_one_of_many_gets_a_stale_lock(tmp_path: Path) -> None:
    """Sixteen processes find what a killed one left."""
    code = (
        "import sys, time\nfrom baechi_ext.errors import FileError\nfrom baechi_runtime.host.run_lock import locked\nsys.stdin.readline()\n"
        "try:\n    with locked({'--out': sys.argv[1]}):\n        print('got it')\n        sys.stdout.flush()\n        sys.stdin.read()\n"
        "except FileError:\n    print('told')\n"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NAME).write_text('{"pid": 1, "host": "elsewhere"}')
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(16)]
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.stdout.readline().strip() for process in started]
    for process in started:
        process.communicate(timeout=SECONDS)
    assert sorted(said) == ["got it", *["told"] * 15]
    assert list((tmp_path / "run").iterdir()) == []


def test_two_flags_may_name_one_folder(tmp_path: Path) -> None:
    with locked({"--out": str(tmp_path), "--checkpoint": f"{tmp_path}/../{tmp_path.name}", "--else": None}):
        assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_what_a_run_starts_has_its_lock(tmp_path: Path) -> None:
    with locked({"--out": str(tmp_path)}):
        done = subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.DEVNULL, timeout=SECONDS)
        assert done.returncode == 0
        assert (tmp_path / NAME).exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot write" in refused(tmp_path)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may write into."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def by_another_user(folder: Path) -> str:
    """Locks a folder for a moment, as somebody who is not root; the last line of what went wrong."""
    become = "import os\nif os.geteuid() == 0:\n    os.seteuid(65534)\n"
    command = [sys.executable, "-c", HOLDER.replace("with locked", f"{become}with locked"), str(folder)]
    said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS).stderr
    return (said.splitlines() or [""])[-1]


def test_what_another_users_killed_run_left(shared: Path) -> None:
    """Who may write into the folder may remove it."""
    (shared / NAME).write_text("{}")
    (shared / NAME).chmod(0o444)
    assert by_another_user(shared) == ""
    assert list(shared.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes another user")
def test_what_another_users_killed_run_left_where_it_stays(shared: Path) -> None:
    (shared / NAME).touch(0o644)
    shared.chmod(0o1777)
    assert by_another_user(shared).endswith(f"cannot write '{shared / NAME}': Operation not permitted; choose another --out")


def test_what_another_users_run_holds(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    with locked({"--out": str(shared)}):
        monkeypatch.delenv("BAECHI_LOCKED")
        (shared / NAME).chmod(0o444)
        assert f"another run, process {os.getpid()} on" in by_another_user(shared)
        assert (shared / NAME).exists()


@pytest.mark.parametrize("workers", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_two_trainings_into_one_checkpoint(tmp_path: Path, workers: str) -> None:
    """The second one ends at once, and the first one's losses are those of an undisturbed run."""
    costs = costs_of(tmp_path)
    flags = (*STEP, costs, f"--checkpoint={tmp_path / 'kept'}", "--checkpoint_every=1", "--resume", f"--workers={workers}")
    first = start(*flags, "--train_steps=1000000")
    try:
        while not list(tmp_path.glob("kept/step_0000000[2-9]/checkpoint.json")):
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)  # each step that it trains meanwhile is trained twice more below
        code, _, err = finish(start(*flags, "--train_steps=4"))
        assert code == 1
        assert f"another run, process {first.pid} on" in only_error(err)
        assert f"writes into --checkpoint={tmp_path / 'kept'}; wait until it ends, or choose another --checkpoint" in only_error(err)
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGCONT)
        first.send_signal(signal.SIGINT)
        code, _, err = finish(first)
    assert code == 130, err
    assert not (tmp_path / "kept" / NAME).exists()
    steps = max(int(path.name.removeprefix("step_")) for path in tmp_path.glob("kept/step_*")) + 1
    here = (f"--train_steps={steps}", f"--checkpoint={tmp_path / 'kept'}", "--resume")
    assert losses_of(costs, *here) == losses_of(costs, f"--train_steps={steps}")


def test_two_runs_into_one_folder(tmp_path: Path) -> None:
    """Config, graph and plan stay those of the first one, and all workers of the second end soon."""
    flags = (*STEP, f"--out={tmp_path / 'run'}")
    first = start(*flags, "--num_steps=100000")
    try:
        for line in first.stderr:
            if line.startswith("measuring"):
                break
        begin = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
        second = [f"--out={tmp_path / 'run'}", "train", "--model_name=alexnet"]
        assert main([*second[1:], second[0]]) == 1
        began = time.monotonic()
        code, _, err = finish(torchrun("train", "--model_name=alexnet", "--workers=process", second[0]))
        assert code == 1
        assert time.monotonic() - began < TORCHRUN_SECONDS, "worker 1, which waited for worker 0, did not end when it was told to"
        assert f"error: another run, process {first.pid} on" in err
        assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == begin
    finally:
        first.send_signal(signal.SIGINT)
        finish(first)
    assert not (tmp_path / "run" / NAME).exists()
    assert OpGraph.load(tmp_path / "run" / "graph.json").fingerprint == RunFolder.load(tmp_path / "run").graph.fingerprint
