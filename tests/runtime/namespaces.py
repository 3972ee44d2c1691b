"""File systems and networks of a test's own, in user namespaces: nothing of the machine changes, and no right is needed.

    python -m tests.runtime.namespaces small_disk FOLDER SIZE COMMAND...     COMMAND where FOLDER is a disk of SIZE
    python -m tests.runtime.namespaces two_nodes REQUEST                     see `two_nodes`
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

MODULE = "tests.runtime.namespaces"
OWN = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Addresses of the two nodes, from the range for private networks; they see nothing else."""


@functools.cache
def refusal() -> str | None:
    """Why namespaces can't be used here; None where they can."""
    if os.environ.get("CI") and hasattr(os, "geteuid") and os.geteuid() == 0:
        return "namespaces are not used as root in continuous integration"
    try:
        command = [*OWN, "unshare", "--net", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"no namespaces: {e}"
    return None if done.returncode == 0 else f"the kernel refuses namespaces: {done.stderr.strip()}"


def require_namespaces() -> None:
    """Skips the test where they can't be used."""
    why = refusal()
    if why is not None:
        pytest.skip(why)


def small_disk(folder: Path, size: str) -> tuple[str, ...]:
    """Words to put before a command so that `folder` is an empty disk of that size for it."""
    return (*OWN, sys.executable, "-m", MODULE, "small_disk", str(folder), size)


def _two_nodes(request: dict) -> list[dict]:
    """Runs `commands`, one on each of two nodes of a network of their own, which is cut once the file `cut` is there. What each said."""
    keepers = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in ADDRESSES]
    time.sleep(0.5)
    ends = [f"node{i}" for i in range(2)]
    _do("ip", "link", "add", ends[0], "netns", str(keepers[0].pid), "type", "veth", "peer", "name", ends[1], "netns", str(keepers[1].pid))
    inside = [("nsenter", "--target", str(keeper.pid), "--net") for keeper in keepers]
    for enter, end, address in zip(inside, ends, ADDRESSES, strict=True):
        _do(*enter, "ip", "address", "add", f"{address}/24", "dev", end)
        _do(*enter, "ip", "link", "set", end, "up")
        _do(*enter, "ip", "link", "set", "lo", "up")
    running = [
        subprocess.Popen([*enter, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for enter, command in zip(inside, request["commands"], strict=True)
    ]
    cut = None
    if request.get("cut"):
        while cut is None and all(process.poll() is None for process in running):
            if Path(request["cut"]).exists():
                _do(*inside[1], "ip", "link", "set", ends[1], "down")
                cut = time.monotonic()
            time.sleep(0.05)
    said = [process.communicate(timeout=request["timeout"]) for process in running]
    seconds = None if cut is None else time.monotonic() - cut
    left = [path.name for path in Path("/proc").glob("[0-9]*") if b"baechi_ext" in _command_line(path)]
    for keeper in keepers:
        keeper.kill()
    outcome = [{"code": p.returncode, "out": out, "err": err} for p, (out, err) in zip(running, said, strict=True)]
    return [{**node, "seconds": seconds, "left": left} for node in outcome]


def two_nodes(commands: Sequence[Sequence[str]], *, cut: Path | None = None, timeout: float = 240) -> list[dict]:
    """For each node: "code", "out", "err" of its command, "seconds" that both took to end after the cut, and "left": the processes of this
    project that were left over then."""
    request = json.dumps({"commands": commands, "cut": None if cut is None else str(cut), "timeout": timeout})
    command = [*OWN, "unshare", "--net", sys.executable, "-m", MODULE, "two_nodes", request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout + 30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


def _command_line(process: Path) -> bytes:
    own = str(os.getpid())
    try:
        return b"" if process.name == own else (process / "cmdline").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    if sys.argv[1] == "small_disk":
        _do("mount", "-t", "tmpfs", "-o", f"size={sys.argv[3]}", "tmpfs", sys.argv[2])
        os.execvp(sys.argv[4], sys.argv[4:])
    sys.stdout.write(json.dumps(_two_nodes(json.loads(sys.argv[2]))))
