"""Starting `baechi` as a process of its own, and looking after its workers."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(*flags: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "baechi_ext", *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(*flags: str, options: Sequence[str] = ("--standalone",)) -> subprocess.Popen:
    """Two workers as torchrun starts them."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node=2", "-m", "baechi_ext", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, timeout: float = 240) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def workers_of(parent: int) -> dict[int, int]:
    """Rank -> process id of the live workers below a launcher. Those that are forked have it for a name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            said = [*(path / "environ").read_text(errors="replace").split("\0"), (path / "comm").read_text().strip()]
        except OSError:
            continue
        rank = next((int(e[5:]) for e in said if e.startswith("RANK=")), None)
        if rank is not None and int(fields[1]) == parent and fields[0] != "Z":
            found[rank] = int(path.name)
    return found


def only_error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


def wait_for_line(process: subprocess.Popen, start_of_line: str) -> None:
    for line in process.stderr:
        if line.startswith(start_of_line):
            return
    raise AssertionError(f"{start_of_line!r} was never said")


def command_line(process: Path) -> str:
    """The command line of /proc/PID; nothing where it has ended."""
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def threads_of_a_group() -> list[str]:
    """The names of this process's threads that belong to a process group over gloo."""
    names = []
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # one that has ended meanwhile
            names.append((path / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]
