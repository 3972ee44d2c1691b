"""A run on one node and a look at all its ports from the other one: see test_listeners.

    python -m tests.runtime.watched_run run FOLDER COMMAND...     python COMMAND, forked, until it was looked at; prints its ports
    python -m tests.runtime.watched_run look FOLDER ADDRESS       prints the ports of that address that take connections
"""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.runtime.fork_server import Fork

BEGUN = ("measuring", "training")
"""Beginnings of what a command says once all its processes are connected."""
_PORTS = range(1, 2**16)
_LISTENS = "0A"
_SECONDS = 240.0


def run(folder: Path, command: list[str]) -> dict:
    """The ports that the command listens at, and one besides that is open to everybody."""
    with socket.create_server(("0.0.0.0", 0)) as known:
        process = Fork(["python", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = []
        try:
            for line in process.stderr:
                said.append(line)
                if line.startswith(BEGUN):
                    break
            own = known.getsockname()[1]
            found = {"open": own, "listened": sorted(_listened() - {own}), "said": said[-5:]}
            running = [watched := psutil.Process(process.pid), *watched.children(recursive=True)]
            for each in running:
                each.suspend()  # the system takes connections, or does not; steps would only keep the cores from that
            (folder / "begun").touch()
            _await(folder / "looked")
            for each in running:
                each.resume()
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    return found


def look(folder: Path, address: str) -> list[int]:
    """All ports that take connections; what gives no answer is closed as well."""
    _await(folder / "begun")
    try:
        return [port for port in _PORTS if _takes(address, port)]
    finally:
        (folder / "looked").touch()


def _takes(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as peer:
        peer.settimeout(0.5)
        return peer.connect_ex((address, port)) == 0


def _listened() -> set[int]:
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == _LISTENS}


def _await(file: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    print(json.dumps(run(folder, sys.argv[3:]) if sys.argv[1] == "run" else look(folder, sys.argv[3])))
