"""Programs for shells that have `python` and `baechi` forked (`forked`): the commands of a script take no seconds to begin."""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.runtime.fork_server import LONGEST_MESSAGE
from tests.runtime.forked import server

PROGRAMS = {"python": ["python"], "baechi": ["python", "-m", "baechi_ext"]}
CLIENT = """#!{python} -IS
import json, os, socket, struct, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect({address!r})
    command = [{program!r} + sys.argv[1:], dict(os.environ), os.getcwd()]
    socket.send_fds(asked, [json.dumps(command).encode()], [1, 2])
    process, code = (struct.unpack("i", asked.recv(4))[0] for _ in range(2))
sys.exit(code if code >= 0 else 128 - code)
"""
"""A program as a file: it sends what the process that forks is asked for, and ends as the fork did."""


@contextmanager
def forked_programs(folder: Path) -> Iterator[Path]:
    """Makes a folder of programs, which work as long as this lasts."""
    folder.mkdir()
    address = str(folder / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        for name, program in PROGRAMS.items():
            (folder / name).write_text(CLIENT.format(python=sys.executable, address=address, program=program))
            (folder / name).chmod(0o755)
        threading.Thread(target=_attend, args=(listening,), daemon=True).start()
        yield folder
        listening.shutdown(socket.SHUT_RDWR)


def _attend(listening: socket.socket) -> None:
    """Hands on what is asked for, with the connection as the place where its exit code goes, until the socket is shut down."""
    with contextlib.suppress(OSError):
        while True:
            with listening.accept()[0] as asked:
                message, descriptors, *_ = socket.recv_fds(asked, LONGEST_MESSAGE, 2)
                socket.send_fds(server("torch"), [message], [*descriptors, asked.fileno()])
            for each in descriptors:
                os.close(each)
