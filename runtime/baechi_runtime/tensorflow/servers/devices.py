"""Devices of TensorFlow's: a tf.distribute.Server process each, or logical devices or GPUs of this process.

A server has a core of its own and one intra-op thread; the order in a placed graph keeps it to one op at a time, as a device of a plan.
It ends with the process that started it, whatever happens to that: it reads its stdin until there is no one at the other end, and where
the main thread has started it the kernel kills it besides.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.errors import ExecutionError, MissingBackendError, OptionError
from baechi_ext.python_process import command_of, surroundings
from baechi_runtime.host.interrupts import signal_name
from baechi_runtime.host.listeners import LOOPBACK, Network, own_networks
from baechi_runtime.host.processor import available_cores
from baechi_runtime.tensorflow.servers.server_process import FAILED, NO_LIBRARY

_TRIES = 3
"""Attempts to start, each with other ports, where somebody took one between our choice and the server's start."""
_LAST_WORDS_SECONDS, _POLL_SECONDS = 2.0, 0.1
_END_SECONDS = 10.0
"""Time to end in, by itself and once it was killed."""
_LOOK_SECONDS = 2.0
"""Time between two looks whether the servers of other machines still listen."""
_MIB = 1024 * 1024
_START_SECONDS = 120.0
_INTER_OP_THREADS = 4
"""One computes. Requests of peers for tensors are answered by the same pool: with one thread they would wait until the device is idle."""
_CLOCK_OF_PROCESS = 2
"""Linux's number for the clock of the time that a process's threads spend on cores."""


class Server:
    """A running server, and the last line it wrote."""

    def __init__(self, task: int, host: str, process: subprocess.Popen[str]) -> None:
        self.task, self.host, self.process = task, host, process
        self._last = "it said nothing"
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        with contextlib.suppress(ValueError):  # closed under us
            for line in map(str.strip, self.process.stderr or ()):
                self._last = line or self._last

    def last_words(self) -> str:
        """The last line that it wrote, when it has ended."""
        self._listening.join(timeout=_LAST_WORDS_SECONDS)
        return self._last

    def ended(self, planned_bytes: Sequence[float] = ()) -> str | None:
        """Says how it ended, with what to look at then; None while it runs."""
        how = self.how_it_ended(planned_bytes)
        return how and f"{how}; check whether the machine ran out of memory"

    def how_it_ended(self, planned_bytes: Sequence[float] = ()) -> str | None:
        """The exit code or, after a signal, that and what the plan takes on the device; None while it runs."""
        code, server = self.process.poll(), f"the server of device {self.task} ({self.host})"
        if code is None:
            return None
        taken = f" (its part of the plan takes {planned_bytes[self.task]:.0f} bytes)" if planned_bytes else ""
        return f"{server} ended with exit code {code}" if code >= 0 else f"{server} was killed by {signal_name(-code)}{taken}"

    def end(self, within_seconds: float = 0.0) -> None:
        """Kills it, unless it ends by itself in that time. What the kernel cannot end at once, in the midst of a call, is left to it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=within_seconds)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_END_SECONDS)

    def cpu_ns(self) -> int:
        """Nanoseconds on cores of the process with all the threads it ever had; 0 where the system does not say."""
        try:
            return time.clock_gettime_ns((~self.process.pid << 3) | _CLOCK_OF_PROCESS)
        except OSError:
            return 0


class Devices:
    """Devices that run the ops of a placed graph, by default in this process. As a context it ends them whatever happens inside."""

    kind = "cpu"
    """Their name in reports and pins, before the number."""
    target = ""
    """The target that a session connects to."""
    shared_memory = False
    """True if one allocator serves them all."""
    limited = False
    """True if their allocators have a limit, and oneDNN, which ends a process that runs out of memory, is off."""
    several_hosts = False
    servers: Sequence[Server] = ()
    """Those that this process started."""
    planned_bytes: Sequence[float] = ()
    """Peak bytes that the plan takes on each device; empty before one is loaded."""

    def __init__(self, names: Iterable[str], timeout_seconds: float) -> None:
        """`names` are TensorFlow's, in the order of the plan's devices."""
        self.names = tuple(names)
        self.timeout_seconds = timeout_seconds
        self._closers: list[Callable[[], None]] = []

    @property
    def short_names(self) -> list[str]:
        """As reports and pins call them: cpu:0, cpu:1, ..."""
        return [f"{self.kind}:{i}" for i in range(len(self.names))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at_end(self, close: Callable[[], None]) -> None:
        """Has `close` called before the devices end: a session without its servers may hang."""
        self._closers.append(close)

    def not_at_end(self, close: Callable[[], None]) -> None:
        """Forgets what was to be called, which has been."""
        if close in self._closers:
            self._closers.remove(close)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()

    def config(self) -> Any:
        """The ConfigProto of a session: nothing rewrites the graph, so that what was profiled op by op is what runs, and no call blocks
        for longer than the time-out."""
        config = tensorflow().compat.v1.ConfigProto(operation_timeout_in_ms=int(self.timeout_seconds * 1000))
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = -1  # L0
        return config

    def gone(self, within_seconds: float = 0.0) -> str | None:
        """Which device is gone, and how; None where none is seen to be within that time: peers miss a server before it is seen dead."""
        return None


class Logical(Devices):
    """Logical CPU devices of this process. They share its threads: what keeps a device to one op at a time is the order in the graph."""

    shared_memory = True

    def __init__(self, num_devices: int, *, timeout_seconds: float = 300.0) -> None:
        super().__init__((f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(num_devices)), timeout_seconds)

    def config(self) -> Any:
        """One inter-op thread per device; the intra-op threads are those of the first session of this process."""
        config = super().config()
        config.device_count["CPU"] = len(self.names)
        config.intra_op_parallelism_threads = 1
        config.session_inter_op_thread_pool.add(num_threads=len(self.names))
        return config


class Gpus(Devices):
    """`count` GPUs; with `part_bytes` the first GPU as `count` logical devices, each with so much of its memory.

    To be made before TensorFlow's first use of a GPU. Raises MissingBackendError where there are too few.
    """

    kind = "gpu"

    def __init__(self, count: int, *, part_bytes: int | None = None, timeout_seconds: float = 300.0) -> None:
        super().__init__((f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(count)), timeout_seconds)
        self._part_mib = None if part_bytes is None else part_bytes // _MIB
        tf = tensorflow()
        found = tf.config.list_physical_devices("GPU")
        needed = count if part_bytes is None else 1
        if len(found) < needed:
            raise MissingBackendError(
                f"--num_gpus={count} asks for {needed} GPU{'s' * (needed > 1)} and TensorFlow finds {len(found)}; use "
                f"--num_devices={count} for CPU workers, or install the GPU build: pip install 'tensorflow[and-cuda]'"
            )
        if self._part_mib is not None:
            part = tf.config.LogicalDeviceConfiguration(memory_limit=self._part_mib)
            try:
                tf.config.set_logical_device_configuration(found[0], [part] * count)
            except RuntimeError as e:
                raise OptionError(f"the GPU is in use already and can't be split any more ({e}); split it when the program begins") from e

    def config(self) -> Any:
        """Ops without a kernel for GPUs run on the host; memory is taken as it is needed, up to a part's limit."""
        config = super().config()
        config.allow_soft_placement = True
        config.gpu_options.allow_growth = True
        if self._part_mib is not None:
            parts = config.gpu_options.experimental.virtual_devices.add()
            parts.memory_limit_mb.extend([float(self._part_mib)] * len(self.names))
        return config


class Servers(Devices):
    """One server process per device; it starts them as a context.

    With `hosts` (host:port each, the devices' order) the cluster is made of these, of which this process starts number `task` alone;
    the others have to be started by themselves. `memory_limits` (bytes a device, None: no limit) hold for the servers started here.
    """

    def __init__(
        self,
        num_devices: int,
        memory_limits: Sequence[int | None] | None = None,
        *,
        hosts: Sequence[str] = (),
        task: int = 0,
        timeout_seconds: float = 300.0,
    ) -> None:
        super().__init__((f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(num_devices)), timeout_seconds)
        if hosts and (len(hosts) != num_devices or not 0 <= task < num_devices):
            raise OptionError(f"{len(hosts)} hosts and task {task} do not make {num_devices} devices; name one host:port per device")
        self._memory_limits = memory_limits or [None] * num_devices
        self.limited = any(self._memory_limits)
        self.several_hosts = bool(hosts)
        self._tasks = [task] if hosts else range(num_devices)
        self._hosts = tuple(hosts)
        self.servers: list[Server] = []
        self._looked = 0.0

    def __enter__(self) -> Self:
        try:
            for further in reversed(range(1 if self.several_hosts else _TRIES)):
                try:
                    self._start()
                    break
                except _PortTakenError:
                    if not further:
                        raise
                    self._kill()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Closes what was opened here, and ends the servers. They keep nothing that would have to be written, so they are just killed;
        those that were stopped go on first, since sessions are closed with them."""
        for server in self.servers:
            server.process.send_signal(signal.SIGCONT)
        super().close()
        self._kill()

    def _kill(self) -> None:
        for server in self.servers:
            server.process.kill()
        for server in self.servers:
            server.end()
            for stream in filter(None, (server.process.stdin, server.process.stdout, server.process.stderr)):
                with contextlib.suppress(OSError):
                    stream.close()
        self.servers.clear()

    def _start(self) -> None:
        self._hosts = self._hosts if self.several_hosts else _free_addresses(len(self.names))
        self.target = f"grpc://{self._hosts[0]}"
        """The first device's server is the master of all sessions."""
        for task in self._tasks:
            self.servers.append(self._started(task))
        within_seconds = max(_START_SECONDS, self.timeout_seconds)
        deadline = time.monotonic() + within_seconds
        for server in self.servers:
            _await(server, deadline, within_seconds)

    def _started(self, task: int) -> Server:
        cores = available_cores()
        networks = list(map(str, self._networks(task)))
        # A thread that ends before this process does would take the server with it.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        definition = self._definition(task).SerializeToString().hex()
        request = {"server": definition, "core": cores[task % len(cores)], "networks": networks, "parent": parent}
        process = subprocess.Popen(
            command_of("baechi_runtime.tensorflow.servers.server_process", json.dumps(request)),
            env={**surroundings(), "CUDA_VISIBLE_DEVICES": "", **_limited(self._memory_limits[task])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",  # a library may write any bytes
            process_group=0,  # an interrupt at the terminal is for us
        )
        return Server(task, self._hosts[task], process)

    def _networks(self, task: int) -> tuple[Network, ...]:
        """The addresses at which the server takes connections. Raises ExecutionError where none is found."""
        if not self.several_hosts:
            return LOOPBACK
        own, *others = (host.rpartition(":")[0].strip("[]") for host in (self._hosts[task], *self._hosts))
        if found := own_networks(own, others):
            return found
        raise ExecutionError(f"{own} is no address of this machine, and none leads there; check --cluster_hosts and --task_index")

    def _definition(self, task: int) -> Any:
        """The ServerDef: one thread inside ops, and some between them."""
        tf = tensorflow()
        cluster = tf.train.ClusterSpec({"worker": self._hosts}).as_cluster_def()
        definition = tf.train.ServerDef(cluster=cluster, job_name="worker", task_index=task, protocol="grpc")
        definition.default_session_config.inter_op_parallelism_threads = _INTER_OP_THREADS
        definition.default_session_config.intra_op_parallelism_threads = 1
        return definition

    def await_hosts(self) -> None:
        """Returns once every device's server listens. Raises ExecutionError for those that do not in time."""
        deadline = time.monotonic() + self.timeout_seconds
        while waiting := [host for host in self._hosts if not listens(host)]:
            if time.monotonic() > deadline:
                raise ExecutionError(
                    f"{' and '.join(waiting)} did not answer within {self.timeout_seconds:g} s; start there the same command with its "
                    "--task_index, and check whether the address is right and the port open"
                )
            time.sleep(_POLL_SECONDS)

    def gone(self, within_seconds: float = 0.0) -> str | None:
        deadline = time.monotonic() + within_seconds
        while True:
            dead = [how for server in self.servers if (how := server.ended(self.planned_bytes))]
            if not dead and self.several_hosts and time.monotonic() > self._looked + _LOOK_SECONDS:
                self._looked = time.monotonic()
                dead = [f"the server of device {i} ({host}) is gone" for i, host in enumerate(self._hosts) if not listens(host)]
            if dead or time.monotonic() > deadline:
                return "; ".join(dead) or None
            time.sleep(_POLL_SECONDS)


class _PortTakenError(ExecutionError):
    pass


def _await(server: Server, deadline: float, within_seconds: float) -> None:
    """Returns once the server serves; the deadline is so long after its start."""
    with selectors.DefaultSelector() as ready:
        ready.register(server.process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
        if not ready.select(max(0.0, deadline - time.monotonic())):
            raise ExecutionError(
                f"the server of device {server.task} ({server.host}) did not start within {within_seconds:g} s; check whether the "
                "machine is busy"
            )
    if server.process.stdout.readline():  # type: ignore[union-attr]
        return
    server.end(_END_SECONDS)  # its stdout is closed, so it is about to
    code, last = server.process.returncode, server.last_words()
    if code == FAILED and "Could not start gRPC server" in last:
        raise _PortTakenError(
            f"the server of device {server.task} cannot listen at {server.host}: the port is taken, or the address is not of this "
            "machine; choose another one, or end what uses it"
        )
    if code == NO_LIBRARY:
        advice = "pip install 'tensorflow-cpu==2.21.*'"
        raise MissingBackendError(f"this TensorFlow has no libtensorflow_cc, which the servers need; {advice}")
    raise ExecutionError(f"{server.how_it_ended()} before it served: {last}")


def _limited(memory_bytes: int | None) -> dict[str, str]:
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
