"""One device of a group of servers: `python -m baechi_runtime.tensorflow.servers.server_process '{"server": "0a1b...", "core": 3,
"networks": ["127.0.0.0/8"]}'`, with a ServerDef as hexadecimal digits. TensorFlow listens on all interfaces; what was sent to an
address outside of these networks is kept from it.

Says "ready" on stdout once it serves, and ends as soon as its stdin does: with the process that started it, however that ended. It is made
by TensorFlow's C interface: the Python package would take ten times as long to load, and twice the memory.
"""

import ctypes
import ipaddress
import json
import os
import platform
import signal
import struct
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from baechi_ext.die_with_parent import die_with_parent
from baechi_runtime.host.listeners import Network, keep_listeners_to

FAILED, NO_LIBRARY = 3, 4
"""Exit codes: the server does not start; TensorFlow has no such library."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SLICE_NS = 100_000


def library() -> Path | None:
    """TensorFlow's, with all its kernels."""
    found = find_spec("tensorflow")
    folders = [] if found is None else found.submodule_search_locations or []
    return next((path for folder in folders for path in Path(folder).glob("libtensorflow_cc.*")), None)


def take_short_turns() -> None:
    """From now on this thread, and those it starts, give way to each other after 0.1 ms, where the kernel can do that (Linux 6.12).

    Threads that receive, and answer peers, share the core with the one that computes. It has it for some ms at a time otherwise, and a
    transfer waits as long.
    """
    call = _SCHED_SETATTR.get(platform.machine())
    if call is None or sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    # struct sched_attr: its size, policy, flags, niceness, priority, runtime, deadline, period, two clamps
    wanted = struct.pack("=IIQiIQQQII", 56, os.SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, _SLICE_NS, 0, 0, 0, 0)
    ctypes.CDLL(None).syscall(call, 0, wanted, 0)


def _why_open(networks: Sequence[Network]) -> str:
    """Why others might reach the server; empty once nobody does, but at these addresses."""
    try:
        stranger = keep_listeners_to(networks)
    except OSError as e:
        return f"this system can't keep others out of TensorFlow's servers ({e.strerror}); run with --workers=thread"
    return stranger and f"{stranger} connected to it before others were kept out; run the command again"


def main(request: str) -> int:
    """Serves until stdin ends; returns before where it cannot, with what TensorFlow says on stderr."""
    wanted = json.loads(request)
    if wanted["parent"] is not None:
        die_with_parent(wanted["parent"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {wanted["core"]})
    take_short_turns()
    for number in (signal.SIGTERM, signal.SIGHUP):  # Slurm, and a terminal, send it to all processes of a job
        signal.signal(number, signal.SIG_IGN)  # ours ends with the one that started it
    path = library()
    if path is None:
        return NO_LIBRARY
    tensorflow = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    tensorflow.TF_NewStatus.restype = pointer
    tensorflow.TF_NewServer.restype = pointer
    tensorflow.TF_NewServer.argtypes = [ctypes.c_char_p, ctypes.c_size_t, pointer]
    tensorflow.TF_ServerStart.argtypes = [pointer, pointer]
    tensorflow.TF_GetCode.argtypes = tensorflow.TF_Message.argtypes = [pointer]
    tensorflow.TF_Message.restype = ctypes.c_char_p
    definition, status = bytes.fromhex(wanted["server"]), tensorflow.TF_NewStatus()
    server = tensorflow.TF_NewServer(definition, len(definition), status)
    if not tensorflow.TF_GetCode(status):  # it listens, and answers nobody yet
        if why := _why_open([ipaddress.ip_network(network) for network in wanted["networks"]]):
            sys.stderr.write(why + "\n")
            return FAILED
        tensorflow.TF_ServerStart(server, status)
    if tensorflow.TF_GetCode(status):
        sys.stderr.write(tensorflow.TF_Message(status).decode(errors="replace") + "\n")
        return FAILED
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # TensorFlow's threads are not waited for
