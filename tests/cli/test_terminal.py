"""Output at a terminal, and what Ctrl-C leaves there and in files; in a pseudo-terminal, as a shell would run it."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_ext.ir import OpGraph, Plan
from baechi_runtime.files.checkpoint_folder import CheckpointFolder
from tests.cli.files import ROOT, write
from tests.cli.test_search import tangle
from tests.runtime.trainings import STEP

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
SECONDS = 300


def at_terminal(argv: list[str], until: Callable[[bytes], bool], **environment: str) -> tuple[int, bytes]:
    """Exit code and all that the terminal got, of a command at whose terminal Ctrl-C is pressed as soon as `until` holds."""
    ours, theirs = pty.openpty()
    settings = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}", "TERM": "xterm-256color", **environment}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    command = [sys.executable, "-m", "baechi_ext", *argv]
    process = subprocess.Popen(command, cwd=ROOT, env=settings, preexec_fn=_own_terminal, **streams)
    os.close(theirs)
    seen, pressed, deadline = b"", False, time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    read = os.read(ours, 65536)
                except OSError:  # all who had the terminal are gone
                    break
                if not read:
                    break
                seen += read
            if not pressed and until(seen):
                os.write(ours, b"\x03")
                pressed = True
        return process.wait(timeout=SECONDS), seen
    finally:
        process.kill()
        os.close(ours)


def test_a_worker_prints_where_the_terminal_stops_what_does_so_in_the_background() -> None:
    """After `stty tostop`."""
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[3] |= termios.TOSTOP
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    code = "import sys\nfrom baechi_runtime.torch.processes.launch import run_workers\nsys.exit(run_workers([], 2, 'this'))"
    settings = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}"}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([sys.executable, "-c", code], env=settings, preexec_fn=_own_terminal, **streams)
    try:
        assert process.wait(timeout=60) == 0
        assert b"Explicit is better than implicit." in os.read(ours, 65536)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)


def _own_terminal() -> None:
    """The terminal is the process's own, as of a shell's foreground job: Ctrl-C there is its SIGINT."""
    import fcntl

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def tangled(tmp_path: Path) -> Path:
    return write(tmp_path / "tangle.json", tangle(400))


def test_ctrl_c_in_a_search_leaves_a_cursor_and_a_whole_plan(tangled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "plan.json"
    out.parent.mkdir()
    line = ["place", str(tangled), "--num_devices=4", "--time_limit=3600", f"--out={out}"]
    code, seen = at_terminal(line, lambda text: b": best " in text)
    assert code == 130, seen[-2000:]
    assert b"bound" in seen
    assert b"0:00:0" in seen  # the clock
    assert seen.count(HIDE) >= 1
    assert seen.rindex(SHOW) > seen.rindex(HIDE)
    assert seen.rstrip().endswith(b"error: interrupted; this is the best plan found until then")
    assert Plan.load(out, OpGraph.load(tangled)).predicted_step_us > 0
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("workers", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_a_training_whose_terminal_is_gone_keeps_its_checkpoint(tmp_path: Path, workers: str) -> None:
    flags = (f"--checkpoint={tmp_path}", "--checkpoint_every=1000000", "--train_steps=1000000", f"--workers={workers}")
    ours, theirs = pty.openpty()
    settings = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "baechi_ext", *STEP, *flags]
    process = subprocess.Popen(command, cwd=ROOT, env=settings, preexec_fn=_own_terminal, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        while not (tmp_path / "step_00000000" / "checkpoint.json").exists():
            assert process.poll() is None
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 65536)
        time.sleep(0.3)
        os.close(ours)
        assert process.wait(timeout=SECONDS) == 129
    finally:
        process.kill()
    assert CheckpointFolder(tmp_path).last().step > 0
    assert not [path.name for path in tmp_path.iterdir() if not path.name.startswith("step_")]


@pytest.mark.parametrize("line", [["doctor"], ["compare", "--model_name=wide_towers", "--image_size=8"]], ids=["doctor", "compare"])
def test_ctrl_c_while_a_spinner_turns(tmp_path: Path, line: list[str]) -> None:
    out = tmp_path / "out"
    code, seen = at_terminal([*line, *([f"--out={out}"] if line[0] == "compare" else [])], lambda text: HIDE in text, NO_COLOR="1")
    assert code == 130, seen[-2000:]
    assert seen.rindex(SHOW) > seen.rindex(HIDE)
    assert b"Traceback" not in seen
    assert b"\x1b[3" not in seen  # no colour
    assert seen.rstrip().endswith(b"error: interrupted")
    assert [p.name for p in out.glob("*")] in ([], ["config.toml"])


def test_ctrl_c_while_the_command_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'baechi_runtime.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
    )
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "baechi_ext", "doctor"]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_ctrl_c_while_torch_imports_numpy_is_not_lost(tmp_path: Path) -> None:
    """torch takes any error of that import for numpy's absence."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "class Pressed:\n"
        "    times = 0\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy.linalg' and not self.times:\n"
        "            self.times += 1\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Pressed())\n"
    )
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "baechi_ext", "compare", "--model_name=wide_towers", "--image_size=8"]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (130, "", "error: interrupted")
    assert "Traceback" not in done.stderr
