"""File systems and networks of a test's own, in user namespaces: nothing of the machine changes, and no right is needed.

    python -m tests.runtime.namespaces try                       ends well where they can be used
    python -m tests.runtime.namespaces on_a_small_disk REQUEST   see `on_a_small_disk`
    python -m tests.runtime.namespaces two_nodes REQUEST         see `two_nodes`
"""

import ctypes
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from baechi_ext.die_with_parent import die_with_parent
from tests.runtime.fork_server import Fork
from tests.runtime.forked import Forked
from tests.runtime.workers import command_line, finish

MODULE = "tests.runtime.namespaces"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Addresses of the two nodes, from the range for private networks; they see nothing else."""
_MOUNT, _USER, _PROCESS, _NETWORK = 0x00020000, 0x10000000, 0x20000000, 0x40000000
"""Kinds of namespaces, as <linux/sched.h> has them."""


@functools.cache
def refusal() -> str | None:
    """Why namespaces can't be used here; None where they can."""
    if os.environ.get("CI") and hasattr(os, "geteuid") and os.geteuid() == 0:
        return "namespaces are not used as root in continuous integration"
    code, _, err = finish(Forked(["-m", MODULE, "try"], os.environ))
    return None if code == 0 else f"the kernel refuses namespaces: {err.strip().splitlines()[-1]}"


def require_namespaces() -> None:
    """Skips the test where they can't be used."""
    why = refusal()
    if why is not None:
        pytest.skip(why)


def on_a_small_disk(command: Sequence[str], disk: Path, size: str, *, before: str = ":", after: str = ":") -> Forked:
    """`python COMMAND`, forked, where that folder is a disk of this size (a number of bytes, or with a unit), between two lines of sh."""
    request = {"command": list(command), "disk": str(disk), "size": size, "before": before, "after": after}
    return Forked(["-m", MODULE, "on_a_small_disk", json.dumps(request)], os.environ)


def _enter(more: int = 0) -> None:
    """Goes on in a child that is root, and process 1, with file systems of its own, and `more` of the kinds of namespaces."""
    user, group = os.geteuid(), os.getegid()
    _called("unshare", _USER | _MOUNT | _PROCESS | more)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    die_with_parent()
    _do("mount", "--make-rprivate", "/")
    _do("mount", "-t", "proc", "proc", "/proc")


def _enter_network(process: int) -> None:
    with open(f"/proc/{process}/ns/net") as network:
        _called("setns", network.fileno(), _NETWORK)


def _called(name: str, *arguments: int) -> None:
    """Calls a function of the C library, which this Python has no name for."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _on_a_small_disk(request: dict) -> int:
    """Returns the command's exit code."""
    _do("mount", "-t", "tmpfs", "-o", f"size={request['size']}", "tmpfs", request["disk"])
    _do("sh", "-c", request["before"])
    code = Fork(["python", *request["command"]]).wait()
    _do("sh", "-c", request["after"])
    return code


def _two_nodes(request: dict) -> list[dict]:
    """Runs `commands`, one on each of two nodes of a network of their own, which is cut once the file `cut` is there. What each said."""
    keepers = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in ADDRESSES]
    while any(os.readlink(f"/proc/{keeper.pid}/ns/net") == os.readlink("/proc/self/ns/net") for keeper in keepers):
        time.sleep(0.005)
    ends = [f"node{i}" for i in range(2)]
    _do("ip", "link", "add", ends[0], "netns", str(keepers[0].pid), "type", "veth", "peer", "name", ends[1], "netns", str(keepers[1].pid))
    inside = [("nsenter", "--target", str(keeper.pid), "--net") for keeper in keepers]
    for enter, end, address in zip(inside, ends, ADDRESSES, strict=True):
        _do(*enter, "ip", "address", "add", f"{address}/24", "dev", end)
        _do(*enter, "ip", "link", "set", end, "up")
        _do(*enter, "ip", "link", "set", "lo", "up")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [
        Fork(["python", *command], preexec_fn=functools.partial(_enter_network, keeper.pid), **streams)
        for keeper, command in zip(keepers, request["commands"], strict=True)
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
    others = {str(process.pid) for process in (*keepers, *running)} | {str(os.getpid())}
    left = [path.name for path in Path("/proc").glob("[0-9]*") if path.name not in others and command_line(path)]
    for keeper in keepers:
        keeper.kill()
    outcome = [{"code": p.returncode, "out": out, "err": err} for p, (out, err) in zip(running, said, strict=True)]
    return [{**node, "seconds": seconds, "left": left} for node in outcome]


def two_nodes(commands: Sequence[Sequence[str]], *, cut: Path | None = None, timeout: float = 240) -> list[dict]:
    """For each node: "code", "out", "err" of its command, as what follows `python`; "seconds" that both took to end after the cut, and
    "left": processes that were left over then. All are forks (see `forked`)."""
    request = json.dumps({"commands": commands, "cut": None if cut is None else str(cut), "timeout": timeout})
    framework = "tensorflow" if "--framework=tensorflow" in commands[0] else "torch"
    process = Forked(["-m", MODULE, "two_nodes", request], os.environ, framework)
    code, out, err = finish(process, timeout + 30)
    assert code == 0, err
    return json.loads(out)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["on_a_small_disk", request]:
            _enter()
            sys.exit(_on_a_small_disk(json.loads(request)))
        case ["two_nodes", request]:
            _enter(_NETWORK)
            sys.stdout.write(json.dumps(_two_nodes(json.loads(request))))
        case _:
            _enter(_NETWORK)
            _do("unshare", "--net", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
