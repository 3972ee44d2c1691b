"""Devices of TensorFlow's: a tf.distribute.Server process each, or logical devices of this process.

A server has a core of its own and one intra-op thread; the order in a placed graph keeps it to one op at a time, as a device of a plan.
It ends with the process that started it, whatever happens to that: it reads its stdin until there is no one at the other end, and the
kernel kills it besides.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.errors import ExecutionError, MissingBackendError, OptionError
from baechi_runtime.host.die_with_parent import die_with_parent
from baechi_runtime.host.listeners import LOOPBACK, Network, own_networks
from baechi_runtime.tensorflow.servers.server_process import FAILED, NO_LIBRARY

_TRIES = 3
"""Attempts to start, each with other ports, where somebody took one between our choice and the server's start."""
_LAST_WORDS_SECONDS, _POLL_SECONDS = 2.0, 0.1
_LOOK_SECONDS = 2.0
"""Time between two looks whether the servers of other machines still listen."""
_MIB = 1024 * 1024
_START_SECONDS = 120.0
_INTER_OP_THREADS = 4
"""One computes. Requests of peers for tensors are answered by the same pool: with one thread they would wait until the device is idle."""


class Devices(Protocol):
    """Devices that run the ops of a placed graph."""

    names: tuple[str, ...]
    """TensorFlow's names for them, in the order of the plan's devices."""
    timeout_seconds: float
    shared_memory: bool
    """True if one allocator serves them all."""

    @property
    def target(self) -> str:
        """The target that a session connects to."""

    @property
    def servers(self) -> "Sequence[Server]":
        """Those that this process started."""

    planned_bytes: Sequence[float]
    """Peak bytes that the plan takes on each device; empty before one is loaded."""

    def config(self) -> Any:
        """The ConfigProto of a session: nothing rewrites the graph, and no call blocks for longer than the time-out."""

    def at_end(self, close: Callable[[], None]) -> None:
        """Has `close` called before the devices end: a session without its servers may hang."""

    def gone(self, within_seconds: float = 0.0) -> str | None:
        """Which device is gone, and how; None where none is seen to be within that time: peers miss a server before it is seen dead."""


class Sessions:
    """Those that are open on some devices."""

    servers: "Sequence[Server]" = ()
    planned_bytes: Sequence[float] = ()

    def __init__(self) -> None:
        self._closers: list[Callable[[], None]] = []

    def at_end(self, close: Callable[[], None]) -> None:
        self._closers.append(close)

    def close_sessions(self) -> None:
        while self._closers:
            self._closers.pop()()


def session_config(timeout_seconds: float) -> Any:
    """A ConfigProto with all rewriting of the graph off: what was profiled op by op is what runs."""
    config = tensorflow().compat.v1.ConfigProto(operation_timeout_in_ms=int(timeout_seconds * 1000))
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1  # L0
    return config


@dataclass
class Server:
    """A running server, and the last lines it wrote."""

    task: int
    host: str
    process: subprocess.Popen[str]
    said: deque[str] = field(default_factory=lambda: deque(maxlen=50))
    ready: "queue.Queue[str]" = field(default_factory=queue.Queue)

    def watch(self) -> None:
        """Starts taking in what it says."""
        streams = (self.process.stdout, self.ready.put), (self.process.stderr, self.said.append)
        self._threads = [threading.Thread(target=_pass_on, args=pair, daemon=True) for pair in streams]
        for thread in self._threads:
            thread.start()

    def last_words(self) -> str:
        """The last line that it wrote, when it has ended."""
        for thread in self._threads:
            thread.join(timeout=_LAST_WORDS_SECONDS)
        return next((line for line in reversed(self.said) if line), "it said nothing")

    def ended(self, planned_bytes: Sequence[float] = ()) -> str | None:
        """How, and what the plan takes on each device where a signal ended it; None while it runs."""
        code, server = self.process.poll(), f"the server of device {self.task} ({self.host})"
        if code is None or code >= 0:
            return None if code is None else f"{server} ended with exit code {code}"
        taken = f" (its part of the plan takes {planned_bytes[self.task]:.0f} bytes)" if planned_bytes else ""
        return f"{server} was killed by {signal.Signals(-code).name}{taken}; check whether the machine ran out of memory"


def _pass_on(stream: Any, take: Callable[[str], None]) -> None:
    with contextlib.suppress(ValueError):  # closed under us
        for line in stream:
            take(line.rstrip("\n"))
        take("")


class Servers(Sessions):
    """One server process per device. As a context it starts them, and ends them whatever happens inside.

    With `hosts` (host:port each, the devices' order) the cluster is made of these, of which this process starts number `task` alone;
    the others have to be started by themselves. `memory_limits` (bytes a device, None: no limit) hold for the servers started here.
    """

    shared_memory = False

    def __init__(
        self,
        num_devices: int,
        memory_limits: Sequence[int | None] | None = None,
        *,
        hosts: Sequence[str] | None = None,
        task: int = 0,
        timeout_seconds: float = 300.0,
    ) -> None:
        super().__init__()
        if hosts is not None and (len(hosts) != num_devices or not 0 <= task < num_devices):
            raise OptionError(f"{len(hosts)} hosts and task {task} do not make {num_devices} devices; name one host:port per device")
        self.timeout_seconds = timeout_seconds
        self.memory_limits = tuple(memory_limits or [None] * num_devices)
        self.names = tuple(f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(num_devices))
        self.cores = available_cores()
        self._given = None if hosts is None else tuple(hosts)
        self._task = task
        self.hosts: tuple[str, ...] = self._given or ()
        self.servers: list[Server] = []
        self._looked = 0.0

    @property
    def target(self) -> str:
        """The address of the first device's server, which is the master of all sessions."""
        return f"grpc://{self.hosts[0]}"

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(f"grpc://{host}" for host in self.hosts)

    def core(self, device: int) -> int:
        """The core that a device is bound to."""
        return self.cores[device % len(self.cores)]

    def __enter__(self) -> "Servers":
        try:
            if self._given is not None:
                self._start([self._task])
                return self
            for left in reversed(range(_TRIES)):
                self.hosts = _free_addresses(len(self.names))
                with contextlib.nullcontext() if left == 0 else contextlib.suppress(_PortTakenError):
                    self._start(range(len(self.names)))
                    return self
                self._kill()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes what was opened here, and ends the servers. They keep nothing that would have to be written, so they are just killed;
        those that were stopped go on first, since sessions are closed with them."""
        for server in self.servers:
            server.process.send_signal(signal.SIGCONT)
        self.close_sessions()
        self._kill()

    def _kill(self) -> None:
        for server in self.servers:
            server.process.kill()
        for server in self.servers:
            server.process.wait()
            for stream in filter(None, (server.process.stdin, server.process.stdout, server.process.stderr)):
                with contextlib.suppress(OSError):
                    stream.close()
        self.servers = []

    def _start(self, tasks: Sequence[int]) -> None:
        for task in tasks:
            self.servers.append(self._started(task))
        deadline = time.monotonic() + max(_START_SECONDS, self.timeout_seconds)
        for server in self.servers:
            self._await(server, deadline)

    def _started(self, task: int) -> Server:
        networks = list(map(str, self._networks(task)))
        request = {"server": self._definition(task).SerializeToString().hex(), "core": self.core(task), "networks": networks}
        process = subprocess.Popen(
            [sys.executable, "-m", "baechi_runtime.tensorflow.servers.server_process", json.dumps(request)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **limited(self.memory_limits[task])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # an interrupt at the terminal is for us
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, no locks
        )
        server = Server(task, self.hosts[task], process)
        server.watch()
        return server

    def _networks(self, task: int) -> tuple[Network, ...]:
        """The addresses at which the server takes connections. Raises ExecutionError where none is found."""
        if self._given is None:
            return LOOPBACK
        own, *others = (host.rpartition(":")[0].strip("[]") for host in (self.hosts[task], *self.hosts))
        if found := own_networks(own, others):
            return found
        raise ExecutionError(f"{own} is no address of this machine, and none leads there; check --cluster_hosts and --task_index")

    def _definition(self, task: int) -> Any:
        """The ServerDef: one thread inside ops, and some between them."""
        tf = tensorflow()
        cluster = tf.train.ClusterSpec({"worker": self.hosts}).as_cluster_def()
        definition = tf.train.ServerDef(cluster=cluster, job_name="worker", task_index=task, protocol="grpc")
        definition.default_session_config.inter_op_parallelism_threads = _INTER_OP_THREADS
        definition.default_session_config.intra_op_parallelism_threads = 1
        return definition

    def _await(self, server: Server, deadline: float) -> None:
        try:
            said = server.ready.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise ExecutionError(
                f"the server of device {server.task} ({server.host}) did not start within {_START_SECONDS:g} s; check whether the "
                "machine is busy"
            ) from None
        if said == "ready":
            return
        code = server.process.wait()  # its stdout is closed, so it is about to end
        last = server.last_words()
        if code == FAILED and "Could not start gRPC server" in last:
            raise _PortTakenError(
                f"the server of device {server.task} cannot listen at {server.host}: the port is taken, or the address is not of this "
                "machine; choose another one, or end what uses it"
            )
        if code == NO_LIBRARY:
            advice = "pip install 'tensorflow-cpu==2.21.*'"
            raise MissingBackendError(f"this TensorFlow has no libtensorflow_cc, which the servers need; {advice}")
        raise ExecutionError(f"{server.ended()} before it served: {last}")

    def await_hosts(self) -> None:
        """Returns once every device's server listens. Raises ExecutionError for those that do not in time."""
        deadline = time.monotonic() + self.timeout_seconds
        waiting = list(self.hosts)
        while waiting := [host for host in waiting if not listens(host)]:
            if time.monotonic() > deadline:
                raise ExecutionError(
                    f"{' and '.join(waiting)} did not answer within {self.timeout_seconds:g} s; start there the same command with its "
                    "--task_index, and check whether the address is right and the port open"
                )
            time.sleep(_POLL_SECONDS)

    def config(self) -> Any:
        return session_config(self.timeout_seconds)

    def gone(self, within_seconds: float = 0.0) -> str | None:
        deadline = time.monotonic() + within_seconds
        while True:
            dead = [how for server in self.servers if (how := server.ended(self.planned_bytes))]
            if not dead and self._given and time.monotonic() > self._looked + _LOOK_SECONDS:
                self._looked = time.monotonic()
                dead = [f"the server of device {i} ({host}) is gone" for i, host in enumerate(self.hosts) if not listens(host)]
            if dead or time.monotonic() > deadline:
                return "; ".join(dead) or None
            time.sleep(_POLL_SECONDS)

    def cpu_seconds(self) -> tuple[float, ...]:
        """CPU seconds that each server started here has used."""
        return tuple(_cpu_seconds(server.process.pid) for server in self.servers)


class Logical(Sessions):
    """Logical CPU devices of this process. They share its threads: what keeps a device to one op at a time is the order in the graph."""

    target = ""
    shared_memory = True

    def __init__(self, num_devices: int, *, timeout_seconds: float = 300.0) -> None:
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self.names = tuple(f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(num_devices))

    def __enter__(self) -> "Logical":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_sessions()

    def config(self) -> Any:
        """One inter-op thread per device; the intra-op threads are those of the first session of this process."""
        config = session_config(self.timeout_seconds)
        config.device_count["CPU"] = len(self.names)
        config.intra_op_parallelism_threads = 1
        config.session_inter_op_thread_pool.add(num_threads=len(self.names))
        return config

    def gone(self, within_seconds: float = 0.0) -> None:
        """They end with this process alone."""


class _PortTakenError(ExecutionError):
    pass


def limited(memory_bytes: int | None) -> dict[str, str]:
    """The environment in which a process of TensorFlow's allocates this many bytes at most: its BFC allocator counts, and oneDNN, which
    dies where memory ends, is left out."""
    if memory_bytes is None:
        return {}
    return {
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(max(1, memory_bytes // _MIB)),
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }


def listens(host: str) -> bool:
    """True if anything takes connections there."""
    name, _, port = host.rpartition(":")
    try:
        with socket.create_connection((name.strip("[]"), int(port)), timeout=1.0):
            return True
    except OSError:
        return False


def _free_addresses(count: int) -> tuple[str, ...]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)


def available_cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
