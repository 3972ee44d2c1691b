"""Random graphs and clusters, with many ties on purpose: times and sizes are small integers."""

from hypothesis import strategies as st

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph

SMALL = st.integers(0, 6)


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 10) -> OpGraph:
    """Up to `max_ops` ops with up to two tensors each; the file order is not a topological order."""
    n, hosted = draw(st.integers(1, max_ops)), draw(st.sampled_from([False, False, True]))
    order = draw(st.permutations(range(n)))
    ops = [
        Op(
            id=f"n{v}",
            compute_us=draw(SMALL),
            persistent_bytes=draw(SMALL),
            output_bytes=draw(SMALL),
            temporary_bytes=draw(SMALL),
            colocation=draw(st.sampled_from([None, None, None, "g", "h"])),
            resident=draw(st.sampled_from([False, False, True])),
            issue_us=float(draw(SMALL)) if hosted else 0.0,
        )
        for v in range(n)
    ]
    sizes = {(v, name): draw(SMALL) for v in range(n) for name in ("x", "y")}
    pairs = [(order[i], order[j]) for j in range(n) for i in range(j)]
    picked = draw(st.lists(st.sampled_from(pairs), max_size=3 * n)) if pairs else []
    names = draw(st.lists(st.sampled_from(["x", "y"]), min_size=len(picked), max_size=len(picked)))
    return OpGraph.from_edges(ops, [(f"n{s}", f"n{d}", sizes[s, name], name) for (s, d), name in zip(picked, names, strict=True)])


@st.composite
def clusters(draw: st.DrawFn, max_devices: int = 4) -> Cluster:
    """Up to `max_devices` devices; some with slow devices, some with links of their own, some that charge their devices."""
    n = draw(st.integers(1, max_devices))
    charges, hosted = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
    some = st.integers(0, 3)

    def link() -> Link:
        costs = [draw(some) for _ in range(6 if charges else 2)]
        return Link(*map(float, costs), issue_us=float(draw(some)) if hosted else 0.0)

    names = [f"device:{i}" for i in range(n)]
    devices = tuple(Device(name, speed=draw(st.sampled_from([1.0, 1.0, 2.0, 0.5]))) for name in names)
    ends = [(a, b) for a in names for b in names if a != b]
    own = draw(st.lists(st.sampled_from(ends), max_size=3, unique=True)) if ends else []
    return Cluster(devices, link(), {pair: link() for pair in own}, parallel_transfers=draw(st.booleans()))


def cases() -> st.SearchStrategy[tuple[OpGraph, Cluster]]:
    """A graph and a cluster."""
    return st.tuples(graphs(), clusters())
