"""Links between TensorFlow servers are probed by real transfers."""

import threading

import pytest
import tensorflow as tf

from baechi_ext.errors import ExecutionError, OptionError
from baechi_runtime.tensorflow.servers import links
from baechi_runtime.tensorflow.servers.devices import Logical, Servers
from baechi_runtime.tensorflow.servers.links import probe_link

SIZES = (4, 65536, 4194304)


def test_a_link_costs_time_and_takes_some_of_it_from_both_devices() -> None:
    with Servers(2) as servers:
        probe = probe_link(servers, 0, 1, SIZES)
        assert set(probe.samples_us) == set(SIZES)
        assert all(us > 0 for samples in probe.samples_us.values() for us in samples)
        link = probe.to_link()
        assert link.receiving_us(4194304) > 1
        assert link.sending_us(4194304) > 0
        assert link.receiving_us(4194304) + link.sending_us(4194304) > link.receiving_us(4) + link.sending_us(4)
        with pytest.raises(OptionError, match="no link with itself"):
            probe_link(servers, 1, 1)
        servers.servers[1].process.kill()
        with pytest.raises(ExecutionError, match="server of device 1"):
            probe_link(servers, 0, 1, SIZES)


def test_an_interrupted_probe_closes_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(tf.compat.v1.Session, "close", lambda _: closed.append(threading.current_thread().name))
    pair = links._Pair(Logical(2), 0, 1)
    with pytest.raises(KeyboardInterrupt), pair._session(lambda: [tf.constant(1.0).op]):
        raise KeyboardInterrupt
    assert closed[0] == "calls into TensorFlow"  # this one need not wait for it
