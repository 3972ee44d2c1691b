"""Graphs shaped like training steps, for the tests of this folder: drawn by hypothesis, and chains written by hand."""

from collections.abc import Iterable, Sequence

from hypothesis import settings
from hypothesis import strategies as st

from baechi_ext.ir.op_graph import Op, OpGraph

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)
SIZES = st.integers(0, 50)


def small(edges: str, labels: dict[str, str] | None = None, **costs: dict[str, float]) -> OpGraph:
    """A graph from "a>b b>c:8:name": source>target, then bytes (1) and tensor name (""); costs by field name and op."""
    parsed = []
    for edge in edges.split():
        ends, *rest = edge.split(":", 2)
        parsed.append((*ends.split(">"), int(rest[0]) if rest else 1, rest[1] if len(rest) > 1 else ""))
    ids = dict.fromkeys(end for source, target, _, _ in parsed for end in (source, target))
    labels = labels or {}
    ops = [Op(i, colocation=labels.get(i), **{k: by_op[i] for k, by_op in costs.items() if i in by_op}) for i in ids]
    return OpGraph.from_edges(ops, parsed)


def names(graph: OpGraph, groups: Iterable[Sequence[int]]) -> list[list[str]]:
    """Groups of op positions as sorted lists of op ids."""
    return sorted([graph.ops[v].id for v in group] for group in groups)


def chain(layers: int, *, activations: bool = True, update: bool = True) -> OpGraph:
    """conv1 -> relu1 -> ... -> loss and back; convN, its backward op and its update share the colocation string "wN".

    Every op takes 1 us, every tensor 4 bytes, every parameter 100 bytes; `activations`: backward ops also read forward tensors.
    """
    ops, edges = [], []
    layer = [(kind, i) for i in range(1, layers + 1) for kind in ("conv", "relu")]
    forward = [f"{kind}{i}" for kind, i in layer]
    for kind, i in layer:
        held = {"persistent_bytes": 100, "colocation": f"w{i}"} if kind == "conv" else {}
        ops.append(Op(f"{kind}{i}", kind, compute_us=1.0, **held))
    ops.append(Op("loss", "loss", compute_us=1.0))
    edges += zip(forward, [*forward[1:], "loss"], strict=True)
    upstream = "loss"
    for position in reversed(range(len(layer))):
        kind, i = layer[position]
        name, group = f"{kind}{i}_bw", f"w{i}" if kind == "conv" else None
        ops.append(Op(name, f"{kind}_bw", "backward", 1.0, colocation=group, forward_op=forward[position]))
        edges.append((upstream, name))
        if activations and position:
            edges.append((forward[position - 1], name))
        if kind == "conv" and update:
            ops.append(Op(f"update{i}", "sgd", "update", 1.0, colocation=group))
            edges.append((name, f"update{i}"))
        upstream = name
    return OpGraph.from_edges(ops, [(s, d, 4, "grad" if d.startswith("update") else "out") for s, d in edges])


@st.composite
def training_graphs(draw: st.DrawFn, max_layers: int = 7) -> OpGraph:
    """A forward graph of any shape, its mirror image backward with sums where gradients meet, updates, tied parameters."""
    layers = draw(st.integers(1, max_layers))
    reads = [sorted(draw(st.sets(st.integers(0, f - 1), min_size=1, max_size=3))) if f else [] for f in range(layers)]
    parameter = [draw(st.sampled_from([None, f"w{f}", "tied"])) for f in range(layers)]
    anonymous = draw(st.booleans())
    ops, edges = [], []

    def add(id_: str, phase: str, label: str | None, forward_op: str | None = None) -> None:
        sizes = [draw(SIZES) for _ in range(4)]
        costs = dict(zip(("compute_us", "persistent_bytes", "output_bytes", "temporary_bytes"), sizes, strict=True))
        expert = draw(st.sampled_from([None, None, 0, 1, 7]))
        ops.append(Op(id_, id_[:2], phase, **costs, colocation=label, expert=expert, forward_op=forward_op))

    for f in range(layers):
        add(f"f{f}", "forward", parameter[f])
        edges += [(f"f{p}", f"f{f}", "out") for p in reads[f]]
    gradients: dict[str, list[str]] = {}
    for f in reversed(range(layers)):
        sources = [f"b{r}" for r in range(layers) if f in reads[r]] or [f"f{f}"]
        if len(sources) > 1:
            add(f"sum{f}", "backward", None)
            edges += [(s, f"sum{f}", f"to{f}") for s in sources]
            sources = [f"sum{f}"]
        add(f"b{f}", "backward", parameter[f], None if anonymous and draw(st.booleans()) else f"f{f}")
        edges += [(s, f"b{f}", f"to{f}" if s[0] == "b" else "out") for s in sources]
        edges += [(f"f{p}", f"b{f}", "out") for p in reads[f]]
        if parameter[f] is not None:
            gradients.setdefault(parameter[f], []).append(f"b{f}")
    for label, sources in gradients.items():
        add(f"u_{label}", "update", label)
        edges += [(s, f"u_{label}", "weight") for s in sources]
    return _sized(draw, ops, edges)


@st.composite
def any_graphs(draw: st.DrawFn, max_ops: int = 12) -> OpGraph:
    """An acyclic graph with colocation strings and phases in no order at all, in an order of ops that is not topological."""
    n = draw(st.integers(1, max_ops))
    labels = draw(st.sampled_from([[None, "a", "b", "c"], ["a", "b"], ["a"]]))
    ops = [
        Op(
            f"op{v}",
            phase=draw(st.sampled_from(["forward", "backward", "update"])),
            compute_us=draw(SIZES),
            persistent_bytes=draw(SIZES),
            output_bytes=draw(SIZES),
            temporary_bytes=draw(SIZES),
            colocation=draw(st.sampled_from(labels)),
        )
        for v in range(n)
    ]
    edges = [
        (f"op{s}", f"op{d}", draw(st.sampled_from(["", "x"])))
        for s in range(n)
        for d in sorted(draw(st.sets(st.integers(s + 1, n), max_size=3)) - {n})
    ]
    return _sized(draw, draw(st.permutations(ops)), edges)


def _sized(draw: st.DrawFn, ops: list[Op], edges: list[tuple[str, str, str]]) -> OpGraph:
    sizes = {(source, tensor): draw(SIZES) for source, _, tensor in edges}
    return OpGraph.from_edges(ops, [(s, d, sizes[s, tensor], tensor) for s, d, tensor in edges])
