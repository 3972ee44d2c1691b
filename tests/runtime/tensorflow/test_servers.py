"""Servers that cannot start, that die, that run out of memory: one clear error each, soon, and nothing is left running."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import baechi_ext
from baechi_ext.errors import ExecutionError, OptionError
from baechi_runtime.tensorflow.calls import placing
from baechi_runtime.tensorflow.servers import blocking_calls, devices
from baechi_runtime.tensorflow.servers.blocking_calls import Calls
from baechi_runtime.tensorflow.servers.devices import Logical, Servers
from tests.processes import ended, runs
from tests.runtime.forked import Forked, python
from tests.runtime.tensorflow.steps import branches, endless, greedy

ROOT = Path(__file__).parents[3]
SOON = 60.0
"""Seconds; generous, since the machine may be busy."""


def test_an_interrupt_comes_when_the_call_under_way_has_ended() -> None:
    """A script that takes it, and saves its model, finds that whole, and is answered."""
    calls, interrupted, ended = Calls(lambda: None, SOON), threading.Event(), []

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait()
        ended.append(1)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            calls(step)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended, calls(lambda: 2)) == ([1], 2)
    calls.end()


def test_after_an_interrupt_the_next_call_waits_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """So whoever takes it in a long step can still save the model."""
    monkeypatch.setattr(blocking_calls, "_INTERRUPTED_SECONDS", 0.1)
    calls, goes_on, ended = Calls(lambda: None, SOON), threading.Event(), []

    def step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait()
        ended.append(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            calls(step)
    finally:
        signal.signal(signal.SIGINT, before)
    threading.Timer(0.3, goes_on.set).start()
    assert (calls(lambda: 2), ended) == (2, [1])
    with pytest.raises(ExecutionError, match="did not answer within 0.1 s"):
        calls(threading.Event().wait, 0.1)
    with pytest.raises(ExecutionError, match="nothing more is asked of it"):
        calls(lambda: 2)


def test_all_threads_of_a_server_take_short_turns() -> None:
    with Servers(1) as servers:
        states = [path.read_text() for path in Path(f"/proc/{servers.servers[0].process.pid}/task").glob("*/sched")]
    turns_ns = [int(found[1]) for state in states if (found := re.search(r"^se\.slice\s*:\s*(\d+)$", state, re.MULTILINE))]
    if not turns_ns:
        pytest.skip("this kernel does not say how long a thread's turn is")
    assert len(turns_ns) > 4
    assert set(turns_ns) == {100_000}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_is_killed_in_mid_step(victim: int) -> None:
    """Server 0 is the master of the session, server 1 a worker in the loop."""
    step = endless()
    with Servers(2, timeout_seconds=SOON) as servers:
        pids = [server.process.pid for server in servers.servers]
        session = step.session(servers, [1] * len(step.captured.graph))
        threading.Timer(0.4, os.kill, (pids[victim], signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(ExecutionError, match=rf"the server of device {victim} \(127.0.0.1:\d+\) was killed by SIGKILL"):
            session.run()
        assert time.monotonic() - began < SOON
        with pytest.raises(ExecutionError):
            session.run()
    assert not any(map(runs, pids))


def test_a_server_that_stands_still_is_given_up() -> None:
    step = endless()
    with Servers(2, timeout_seconds=2.0) as servers:
        session = step.session(servers, [1] * len(step.captured.graph))
        with pytest.raises(ExecutionError, match="a device did not answer within 2 s; check whether it still runs, or raise --timeout"):
            session.run()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_servers_end_with_their_parent(kind: signal.Signals) -> None:
    """However it ends, in mid-step or not."""
    code = (
        "import sys\nfrom tests.runtime.tensorflow.steps import endless\nfrom baechi_runtime.tensorflow.servers.devices import Servers\n"
        "with Servers(2) as servers:\n"
        "    step = endless()\n    session = step.session(servers, [1] * len(step.captured.graph))\n"
        "    print(*(s.process.pid for s in servers.servers), flush=True)\n    session.run()\n"
    )
    parent = Forked(["-c", code], os.environ, "tensorflow")
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(kind)
    parent.wait(timeout=SOON)
    parent.communicate()
    assert ended(pids, SOON)


def test_servers_outlive_the_thread_that_started_them() -> None:
    servers = Servers(1)
    starter = threading.Thread(target=servers.__enter__)
    starter.start()
    starter.join()
    try:
        assert servers.gone(within_seconds=1.0) is None
    finally:
        servers.close()


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    with Servers(1) as servers:
        os.kill(servers.servers[0].process.pid, signal.SIGRTMIN + 1)
        assert f"was killed by signal {signal.SIGRTMIN + 1};" in str(servers.gone(within_seconds=SOON))


def test_a_server_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_END_SECONDS", 0.5)
    code = "import os, time\nos.close(1)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process, pytest.raises(ExecutionError, match=r"was killed by SIGKILL before it served"):
        devices._await(devices.Server(0, "localhost:1", process), time.monotonic() + SOON, SOON)


def test_a_program_whose_server_died_ends() -> None:
    """The client, too: TensorFlow's own would wait for the dead server before python ends."""
    code = (
        "import os, signal, threading\nfrom baechi_ext.errors import ExecutionError\n"
        "from tests.runtime.tensorflow.steps import endless\nfrom baechi_runtime.tensorflow.servers.devices import Logical, Servers\n"
        "with Servers(2) as servers:\n"
        "    step = endless()\n    session = step.session(servers, [1] * len(step.captured.graph))\n"
        "    threading.Timer(0.4, os.kill, (servers.servers[0].process.pid, signal.SIGKILL)).start()\n"
        "    try:\n        session.run()\n    except ExecutionError as e:\n        print(e)\n"
    )
    done = python("-c", code, framework="tensorflow")
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL" in done.stdout


BABBLE = """
import os, sys
if any("server_process" in word for word in sys.orig_argv):
    os.write(2, (b"caf\\xe9" + b"x" * 75 + b"\\n") * 1000)
"""
"""More than a pipe holds, and no text."""


def test_a_server_serves_whatever_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(BABBLE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(devices, "_START_SECONDS", SOON)
    with Servers(1, timeout_seconds=SOON) as servers:
        assert servers.gone() is None


def test_a_port_that_is_taken(listener: socket.socket) -> None:
    host = f"127.0.0.1:{listener.getsockname()[1]}"
    servers = Servers(2, hosts=[host, "127.0.0.1:1"])
    with pytest.raises(ExecutionError, match=f"the server of device 0 cannot listen at {host}: the port is taken, or the address"), servers:
        pass


def test_hosts_that_do_not_answer() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{unused.getsockname()[1]}"
    servers = Servers(2, hosts=[own, "127.0.0.1:1"], timeout_seconds=2.0)
    with pytest.raises(ExecutionError, match=re.escape(f"{own} and 127.0.0.1:1 did not answer within 2 s; start there")):
        servers.await_hosts()
    with servers, pytest.raises(ExecutionError, match=r"^127.0.0.1:1 did not answer within 2 s; start there"):
        servers.await_hosts()


def test_a_host_that_answers_but_is_no_server(listener: socket.socket) -> None:
    """It takes connections, and says nothing."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{unused.getsockname()[1]}"
    hosts = [own, f"127.0.0.1:{listener.getsockname()[1]}"]
    step = branches()
    with Servers(2, hosts=hosts, timeout_seconds=2.0) as servers:
        servers.await_hosts()
        with pytest.raises(ExecutionError, match="a device did not answer within 2 s"):
            step.session(servers, [1] * len(step.captured.graph))


def test_a_memory_limit_is_kept_and_the_server_lives_on() -> None:
    large, small = greedy(3000), branches()
    with Servers(2, [None, 16 * 2**20]) as servers:
        session = large.session(servers, [0] * len(large.captured.graph))
        session.run()
        session.close()
        session = large.session(servers, [1] * len(large.captured.graph))
        with pytest.raises(ExecutionError, match=r"out of memory on device 1 in op 'far_too_large' for a float tensor of 3000,3000"):
            session.run()  # TensorFlow waits ten seconds for others to give memory back
        fitting = small.session(servers, [1] * len(small.captured.graph))
        assert float(fitting.run()[0]) == pytest.approx(small.unplaced()[0], rel=1e-5)


def test_hosts_that_do_not_make_the_devices() -> None:
    with pytest.raises(OptionError, match="1 hosts and task 0 do not make 2 devices"):
        Servers(2, hosts=["alpha:1"])


def test_a_training_goes_on_in_the_program_whose_server_died(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placing, "_devices", {})  # other tests have some, too
    weight = tf.Variable(tf.ones((8, 8)))
    checkpoint = tf.train.Checkpoint(weight=weight).save(tmp_path / "checkpoint")

    def step(x: tf.Tensor) -> tf.Tensor:
        loss = tf.reduce_sum(tf.tanh(x @ weight))
        weight.assign_sub(0.1 * x)
        return loss

    def place() -> Any:
        return baechi_ext.parallelize(step, framework="tensorflow", method="round_robin", keep_placed=True)

    placed, other, x = place(), place(), tf.ones((8, 8))
    for _ in range(3):
        placed(x)
    other(x)
    (devices,) = {d for pair in placing._devices.values() for d in pair}
    devices.servers[1].process.kill()
    with pytest.raises(ExecutionError, match="server of device 1"):
        placed(x)
    placed.unplace()
    with pytest.raises(ExecutionError, match="go on from a checkpoint"):
        weight.numpy()
    tf.train.Checkpoint(weight=weight).restore(checkpoint)
    placed = place()
    expected = [float(tf.reduce_sum(tf.tanh(x @ tf.constant(value, shape=(8, 8))))) for value in (1.0, 0.9, 0.8)]
    assert [float(placed(x)) for _ in range(3)] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ExecutionError, match="the devices that had the variables are gone"):
        other(x)
    placed.unplace()


def test_a_session_that_cannot_be_made_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise tf.errors.InvalidArgumentError(None, None, "no such device")

    step, here = branches(), Logical(2)
    before = set(threading.enumerate())
    monkeypatch.setattr(tf.compat.v1, "Session", fail)
    with pytest.raises(ExecutionError, match="no such device"):
        step.session(here, [0] * len(step.captured.graph))
    for left in set(threading.enumerate()) - before:
        left.join(SOON)
        assert not left.is_alive()
    assert here._closers == []
