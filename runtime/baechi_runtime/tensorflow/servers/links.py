"""Probing the link between two TensorFlow servers: one-way time, and what sending and receiving take from the devices themselves.

gRPC copies and parcels tensors on the devices' own cores, so that most of a transfer's cost falls on the ops of its two ends. One-way time
is that of a chain of transfers to and fro, with nothing else to do. What each end is charged is what its process spends on its core beyond
what it spends where the same ops exchange nothing: both compute meanwhile, as in a step, and a device has its core for itself.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.cost import LinkFit, fit_link
from baechi_ext.errors import ExecutionError, OptionError, first_line
from baechi_runtime.measure.link_probe import PROBE_BYTES, LinkProbe
from baechi_runtime.tensorflow.servers.blocking_calls import CLOSING_SECONDS, Calls, leave_open
from baechi_runtime.tensorflow.servers.devices import Devices, Server

T = TypeVar("T")

_WARMUP, _REPEATS = 1, 5
_TRIPS = 4
"""Round trips in a row."""
_TRANSFERS, _FEWEST_TRANSFERS, _BYTES_IN_ALL = 24, 4, 2**24
"""Bounds on the transfers of one size in a run that computes meanwhile."""
_SIDE = 128
"""Side of square matrices whose product takes some 0.04 ms."""
_UNITS, _WORK_PER_ONE_WAY = 4, 2
"""Products that make up the work beside a transfer. Larger ones, not more of them: building and starting thousands of ops takes seconds."""
_MOST_WORK_US = 100_000
"""Most work in one run."""
_EVERY = 3
"""Distance between the sizes whose charges are taken: they lie on a line."""
_FEWEST_REPEATS, _ENOUGH_SECONDS = 3, 0.5
"""Fewest runs of one size, and when they are enough: on a busy machine a run takes long, and more of them would not make it quiet."""
_LEAST_US = 0.1


def probe_link(servers: Devices, source: int, target: int, sizes: Sequence[int] = PROBE_BYTES) -> LinkProbe:
    """The link between two servers. What the devices are charged is None where a server runs on another machine.

    Raises ExecutionError where a server dies or does not answer, OptionError for a device with itself.
    """
    if source == target:
        raise OptionError(f"device {source} has no link with itself; probe two different devices")
    pair = _Pair(servers, source, target)
    one_way = {size: tuple(pair.one_way_us(size)) for size in sizes}
    # Other programs only ever add to a sample, so the least is nearest to what a quiet machine takes.
    fit = fit_link([(size, min(samples)) for size, samples in one_way.items()])
    ends = pair.ends()
    if not all(end.cpu_ns() for end in ends) or len(ends) < 2:
        return LinkProbe(one_way, fit)
    product_us = pair.product_us()
    charged = [size for size in sizes if size <= PROBE_BYTES[-1]] or [min(sizes)]
    loaded = sorted({*charged[::_EVERY], charged[-1]})
    expected = [fit.latency_us + size * fit.us_per_byte for size in loaded]
    charges = [pair.charges_us(size, us, product_us) for size, us in zip(loaded, expected, strict=True)]
    send, receive = (_line(loaded, [charge[end] for charge in charges], expected) for end in (0, 1))
    return LinkProbe(one_way, fit, send, receive)


def _line(sizes: Sequence[int], charges_us: Sequence[float], one_way_us: Sequence[float]) -> LinkFit:
    """Fits the line. Noise in a difference goes by the time of the transfer, not by what is left of it."""
    return fit_link(list(zip(sizes, (max(_LEAST_US, us) for us in charges_us), strict=True)), one_way_us)


@dataclass(frozen=True)
class _Pair:
    """Two servers, and graphs that are built for them and thrown away."""

    servers: Devices
    source: int
    target: int

    def one_way_us(self, size: int) -> list[float]:
        """Half a round trip, a sample a run."""
        tf = tensorflow()
        there, back = (self.servers.names[i] for i in (self.source, self.target))

        def chain(trips: int) -> Any:
            with tf.device(there):
                tensor = tf.ones((size // 4,)) * 1.0
            for _ in range(trips):
                for end in (back, there):
                    with tf.device(end):
                        tensor = tf.identity(tensor)
            return tensor.op

        with self._session(lambda: (chain(_TRIPS), chain(0))) as (long, short):
            taken = list(_repeated(lambda: (_wall_us(long), _wall_us(short))))
        call_us = min(short_us for _, short_us in taken)
        return [max(_LEAST_US, (long_us - call_us) / (2 * _TRIPS)) for long_us, _ in taken]

    def product_us(self) -> float:
        """A product of matrices of `_SIDE` on the source."""
        with self._session(lambda: tuple(_working(self.servers.names[self.source], n, _SIDE)[-1] for n in (33, 1))) as (many, one):
            return max(1.0, (min(_repeated(lambda: _wall_us(many))) - min(_repeated(lambda: _wall_us(one)))) / 32)

    def charges_us(self, size: int, one_way_us: float, product_us: float) -> tuple[float, float]:
        """Microseconds that a transfer of `size` bytes takes from the sender and from the receiver.

        The receiver computes a little more per transfer, so that it finds what it takes in already there.
        """
        tf = tensorflow()
        transfers = max(_FEWEST_TRANSFERS, min(_TRANSFERS, _BYTES_IN_ALL // size))
        wanted = min(_WORK_PER_ONE_WAY * one_way_us, _MOST_WORK_US / transfers)
        side = max(_SIDE, round(_SIDE * (wanted / _UNITS / product_us) ** (1 / 3)))
        near, far = (self.servers.names[i] for i in (self.source, self.target))

        def program(reader: str) -> Any:
            with tf.device(near):
                tensor = tf.ones((size // 4,)) * 1.0
            work = _working(near, _UNITS * transfers, side, [tensor.op])[_UNITS - 1 :: _UNITS]
            read = []
            for done in work:
                with tf.control_dependencies([done]), tf.device(near):
                    sent = tf.raw_ops.Reshape(tensor=tensor, shape=(size // 4,))
                with tf.device(reader):
                    read.append(tf.identity(sent).op)
            other = _working(far, (_UNITS + 1) * transfers, side, waits=read if reader == far else [])
            return tf.group(*read, other[-1])

        with self._session(lambda: (program(far), program(near))) as (apart, together):
            pairs = list(_repeated(lambda: (self._spent_us(apart), self._spent_us(together))))
        sender, receiver = (statistics.median((a[end] - b[end]) / transfers for a, b in pairs) for end in (0, 1))
        return sender, receiver

    def ends(self) -> list[Server]:
        """The two servers, as far as this process started them."""
        return [server for end in (self.source, self.target) for server in self.servers.servers if server.task == end]

    def _spent_us(self, run: Callable[[], None]) -> list[float]:
        ends = self.ends()
        before = [end.cpu_ns() for end in ends]
        run()
        return [(end.cpu_ns() - ns) / 1000 for end, ns in zip(ends, before, strict=True)]

    @contextmanager
    def _session(self, build: Callable[[], Sequence[Any]]) -> Iterator[list[Callable[[], None]]]:
        """Functions that run the ops that `build` makes, one each."""
        tf = tensorflow()
        calls = Calls(self.servers.gone, self.servers.timeout_seconds)
        with tf.Graph().as_default() as graph:
            ops = list(build())
        session: Any = None
        try:
            session = calls(lambda: tf.compat.v1.Session(self.servers.target, graph=graph, config=self.servers.config()))
            runs = [calls(partial(session.make_callable, op)) for op in ops]
            yield [partial(calls, run) for run in runs]
        except tf.errors.OpError as e:
            raise ExecutionError(self.servers.gone(1.0) or f"probing the link failed: {first_line(e)}") from e
        finally:
            if session is not None:
                try:
                    calls(session.close, CLOSING_SECONDS)
                except (ExecutionError, tf.errors.OpError):
                    leave_open(session)
            calls.end()


def _working(device: str, count: int, side: int, first: Sequence[Any] = (), waits: Sequence[Any] = ()) -> list[Any]:
    """Products of matrices in a row; evenly spread, one of them waits for each of `waits`."""
    tf = tensorflow()
    found = []
    with tf.device(device), tf.control_dependencies(list(first)):
        value = matrix = tf.ones((side, side)) * 1.0
    every = count // len(waits) if waits else count + 1
    for i in range(count):
        waited = [waits[i // every]] if i % every == every - 1 and i // every < len(waits) else []
        with tf.device(device), tf.control_dependencies(waited):
            value = tf.raw_ops.MatMul(a=matrix, b=value)
        found.append(value.op)
    return found


def _repeated(function: Callable[[], T]) -> Iterator[T]:
    """Yields what `function` returns, again and again, warm-up left out."""
    started = time.perf_counter()
    for repeat in range(_WARMUP + _REPEATS):
        if repeat >= _WARMUP + _FEWEST_REPEATS and time.perf_counter() - started > _ENOUGH_SECONDS:
            return
        value = function()
        if repeat >= _WARMUP:
            yield value


def _wall_us(run: Callable[[], None]) -> float:
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1000
