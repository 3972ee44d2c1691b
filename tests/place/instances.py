"""Small graphs on small clusters, with the optimum where a person can see it; and seeded random ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.place.registry import METHODS

RUNNABLE = [name for name in METHODS if name != "placeto" or find_spec("torch")]
"""Methods that can run here: all, except `placeto` where torch is not installed."""

Edge = tuple[str, str, float]


@dataclass(frozen=True)
class Instance:
    """A problem; `optimum_us` is worked out by hand (None: only the exhaustive search knows)."""

    name: str
    graph: OpGraph
    cluster: Cluster
    optimum_us: float | None = None
    with_orders: bool = True
    """True if the exhaustive search also tries every order of the ops."""
    transfers_rule: bool = False
    """True if a method that ignores transfer times can be as bad as it likes here."""


def make_graph(ops: Sequence[Op], edges: Sequence[Edge]) -> OpGraph:
    """Edges are (source, target, bytes); all readers of an op read the same tensor."""
    return OpGraph.from_edges(ops, [(s, d, size, "") for s, d, size in edges])


def ops_of(times: dict[str, float], **fields: object) -> list[Op]:
    return [Op(name, compute_us=us, **fields) for name, us in times.items()]  # type: ignore[arg-type]


def _chain() -> Instance:
    graph = make_graph(ops_of({"a": 10, "b": 10, "c": 10, "d": 10}), [("a", "b", 5), ("b", "c", 5), ("c", "d", 5)])
    return Instance("chain", graph, Cluster.uniform(2, link=Link(1, 1)), 40)


def _fork_join() -> Instance:
    """a 0-1, b 1-11 here, c 2-12 and d 3-13 elsewhere (one outgoing channel); e beside d 13-14, when c's output has arrived."""
    graph = make_graph(
        ops_of({"a": 1, "b": 10, "c": 10, "d": 10, "e": 1}),
        [("a", "b", 0), ("a", "c", 0), ("a", "d", 0), ("b", "e", 0), ("c", "e", 0), ("d", "e", 0)],
    )
    return Instance("fork_join", graph, Cluster.uniform(3, link=Link(0, 1)), 14)


def _two_towers() -> Instance:
    """A tower per device, 30; one transfer of 1 to the join, which takes 2."""
    graph = make_graph(
        ops_of({"a1": 10, "b1": 10, "a2": 10, "b2": 10, "a3": 10, "b3": 10, "join": 2}),
        [("a1", "a2", 0), ("a2", "a3", 0), ("b1", "b2", 0), ("b2", "b3", 0), ("a3", "join", 0), ("b3", "join", 0)],
    )
    return Instance("two_towers", graph, Cluster.uniform(2, link=Link(0, 1)), 33)


def _costly_diamond() -> Instance:
    graph = make_graph(
        ops_of({"a": 1, "b": 10, "c": 10, "d": 1}), [("a", "b", 100), ("a", "c", 100), ("b", "d", 100), ("c", "d", 100)]
    )
    return Instance("costly_diamond", graph, Cluster.uniform(2, link=Link(1, 1)), 22, transfers_rule=True)


def _colocation_temptation() -> Instance:
    """Alone, each op would start at once on a device of its own; the group needs 20 on one, and d's 20 fill the other."""
    ops = [
        Op("a", compute_us=10, colocation="g"),
        Op("b", compute_us=10, colocation="g"),
        Op("c", compute_us=10),
        Op("d", compute_us=10),
    ]
    return Instance("colocation_temptation", make_graph(ops, [("c", "d", 1)]), Cluster.uniform(2, link=Link(1, 1)), 20)


def _tied_backward() -> Instance:
    """Two towers, backward ops tied to their forward ops: 5 + 10 on each device, the loss, and a transfer each way."""
    ops = [Op("fa", compute_us=5, colocation="A"), Op("fb", compute_us=5, colocation="B"), Op("loss", compute_us=1)]
    ops += [Op("ba", phase="backward", compute_us=10, colocation="A"), Op("bb", phase="backward", compute_us=10, colocation="B")]
    edges = [("fa", "loss", 0), ("fb", "loss", 0), ("loss", "ba", 0), ("loss", "bb", 0)]
    return Instance("tied_backward", make_graph(ops, edges), Cluster.uniform(2, link=Link(0, 1)), 18)


def _memory_tight() -> Instance:
    """6 + 4 and 5 + 5 are the only halves that fit into 10 bytes; 20 microseconds each way."""
    ops = [Op(f"p{size}{i}", compute_us=10, persistent_bytes=size) for i, size in enumerate((6, 5, 5, 4))]
    return Instance("memory_tight", make_graph(ops, []), Cluster.uniform(2, memory_bytes=10), 20)


def _speeds() -> Instance:
    """40 of work for speeds 4 and 1: three ops (30 / 4) here, one (10) there."""
    graph = make_graph(ops_of({"a": 10, "b": 10, "c": 10, "d": 10}), [])
    return Instance("speeds", graph, Cluster((Device("fast", None, 4.0), Device("slow", None, 1.0)), Link(0, 1)), 10)


def _slow_pair() -> Instance:
    """b or c goes to the third device, over the links that are not slow: a 0-1, transfer 1-2, b 2-12."""
    link, slow = Link(0, 1), Link(0, 1000)
    pairs = {("x", "y"): slow, ("y", "x"): slow, ("y", "z"): slow, ("z", "y"): slow}
    graph = make_graph(ops_of({"a": 1, "b": 10, "c": 10}), [("a", "b", 0), ("a", "c", 0)])
    return Instance("slow_pair", graph, Cluster(tuple(map(Device, "xyz")), link, pairs), 12, transfers_rule=True)


def _zero_cost() -> Instance:
    graph = make_graph(ops_of({"a": 0, "b": 0, "c": 0}), [("a", "b", 8), ("a", "c", 8)])
    return Instance("zero_cost", graph, Cluster.uniform(2, memory_bytes=8, link=Link(1, 1)), 0)


def _device_charges() -> Instance:
    """Sending (3) and receiving (2) keep the devices busy: 20 on one device is the best."""
    graph = make_graph(ops_of({"a": 10, "b": 5, "c": 5}), [("a", "b", 1), ("a", "c", 1)])
    return Instance("device_charges", graph, Cluster.uniform(2, link=Link(0, 0, send_us=3, receive_us=2)), 20)


def _parallel_transfers() -> Instance:
    """As fork_join, without contention: c and d both run 2-12, their outputs arrive at 13, e 13-14."""
    cluster = Cluster.uniform(3, link=Link(0, 1), parallel_transfers=True)
    return Instance("parallel_transfers", _fork_join().graph, cluster, 14)


HAND_MADE = (
    _chain(),
    _fork_join(),
    _two_towers(),
    _costly_diamond(),
    _colocation_temptation(),
    _tied_backward(),
    _memory_tight(),
    _speeds(),
    _slow_pair(),
    _zero_cost(),
    _device_charges(),
    _parallel_transfers(),
    Instance("single_op", make_graph(ops_of({"a": 7}), []), Cluster.uniform(2), 7),
    Instance("empty", make_graph([], []), Cluster.uniform(2), 0),
    Instance("more_devices_than_ops", make_graph(ops_of({"a": 4, "b": 6}), []), Cluster.uniform(5), 6),
    Instance("one_device", _fork_join().graph, Cluster.uniform(1), 32),
)


def random_instance(seed: int) -> Instance:
    """Up to 7 ops on 2 or 3 devices: colocation groups, unequal speeds, slow pairs and memory limits, each in some of them."""
    rng = random.Random(seed)
    n, k = rng.randint(3, 7), 2 if seed % 2 else 3
    grouped = rng.random() < 0.5
    ops = [
        Op(
            f"o{v}",
            compute_us=rng.choice((0, 1, 3, 5, 8, 13)),
            persistent_bytes=rng.choice((0, 2, 4)),
            output_bytes=rng.choice((0, 4)),
            temporary_bytes=rng.choice((0, 0, 3)),
            colocation=rng.choice((None, "g", "h")) if grouped else None,
        )
        for v in range(n)
    ]
    sizes = [rng.choice((0, 1, 2, 6)) for _ in range(n)]
    edges = [(f"o{v}", f"o{w}", sizes[v]) for v in range(n) for w in range(v + 1, n) if rng.random() < 0.4]
    link = Link(rng.choice((0, 0.5, 2)), rng.choice((0, 1, 3)))
    memory = sum(op.persistent_bytes for op in ops) * 0.75 + 12 if rng.random() < 0.5 else None
    speeds = [rng.choice((1, 1, 2)) for _ in range(k)]
    devices = tuple(Device(f"d{i}", memory, float(speed)) for i, speed in enumerate(speeds))
    pairs = {("d0", "d1"): Link(3, 5)} if rng.random() < 0.3 else {}
    cluster = Cluster(devices, link, pairs, parallel_transfers=rng.random() < 0.3)
    return Instance(f"random_{seed}", make_graph(ops, edges), cluster, with_orders=n <= 5)


RANDOM = tuple(random_instance(seed) for seed in range(40))
