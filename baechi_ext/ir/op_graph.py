"""OpGraph: the operators of one training step, their costs, and the tensors between them."""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baechi_ext.collector import without_collection
from baechi_ext.errors import GraphError
from baechi_ext.ir.files import SCHEMA_VERSION, write_json
from baechi_ext.ir.made_by import MadeBy, load_as, signed
from baechi_ext.ir.numbers import MOST_BYTES, MOST_DEVICES, as_bytes, as_number, is_plain_size

if TYPE_CHECKING:
    from baechi_ext.ir.columns import Columns

PHASES = ("forward", "backward", "update")
_FIELDS = ("id", "op", "phase", "compute_us", "persistent_bytes", "output_bytes", "temporary_bytes", "colocation", "expert")
"""Fields of every op in a graph file."""
_DEFAULTS = {"op": "", "phase": "forward", "persistent_bytes": 0, "output_bytes": 0, "temporary_bytes": 0} | {
    "colocation": None,
    "expert": None,
    "tensor": "",
}
"""Defaults of the optional fields of a graph file."""
_RARE: dict[str, Any] = {"forward_op": None, "module": None, "pin": None, "resident": False, "part": None}
_RARE |= {"flop": None, "moved_bytes": None, "issue_us": 0.0}
"""Fields that a graph file has only where they have another value than this one."""
_OF_EDGES = ("index", "order", "rank", "predecessors", "successors", "size")  # attributes that are derived from ids and edges alone


@dataclass(frozen=True, slots=True)
class Op:
    """One operator. Ops with the same `colocation` string run on the same device."""

    id: str
    op: str = ""
    """The operation, e.g. "aten.convolution"."""
    phase: str = "forward"
    """forward, backward or update."""
    compute_us: float = 0.0
    """Time on a device of speed 1."""
    persistent_bytes: int | float = 0
    """Held for the whole step: parameters, buffers, optimizer state."""
    output_bytes: int | float = 0
    """All outputs; what exceeds the op's tensors is held only while it runs."""
    temporary_bytes: int | float = 0
    """Held only while it runs."""
    colocation: str | None = None
    expert: int | None = None
    """A device index, taken modulo the number of devices."""
    forward_op: str | None = None
    """For a backward or update op, the forward op it belongs to (where known)."""
    module: str | None = None
    """The module whose code it comes from, by its name in the model ("" is the model itself), where known."""
    pin: int | None = None
    """The index of the device that it has to run on."""
    resident: bool = False
    """Its tensors are among its persistent bytes, as a parameter's are: where it runs they take no further memory, copies elsewhere do."""
    part: int | None = None
    """The part of the batch that it computes, where the step is captured over parts; its id is its name there, "@" and the part."""
    flop: int | float | None = None
    """Floating-point operations, where they were counted."""
    moved_bytes: int | float | None = None
    """Bytes that it reads and writes, where they were counted."""
    issue_us: float = 0.0
    """Time that it takes the host, where one thread gives all devices their ops, one after the other."""

    @property
    def name(self) -> str:
        """The id that all parts of the op have in common."""
        return self.id if self.part is None else self.id.removesuffix(f"@{self.part}")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One output of one op, and the ops that read it (indices into `OpGraph.ops`)."""

    producer: int
    name: str
    bytes: int | float
    readers: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class OpGraph:
    """A directed acyclic graph of ops. Build it with `from_edges` or `from_json`; both validate.

    The tables below are derived: `inputs[v]` and `outputs[v]` are tuples of indices into `tensors`, in file order.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    name: str = ""
    framework: str = ""
    given_fingerprint: str | None = None
    modules: tuple[str, ...] = ()
    """Names of all modules of the model that was captured, where known; those without an op of their own, too."""
    classes: tuple[str, ...] = ()
    """The class of each of `modules`, where known: one entry each, or none."""

    def __repr__(self) -> str:
        return f"<OpGraph {self.name or 'a graph'}: {len(self.ops)} ops, {len(self.tensors)} tensors>"

    @classmethod
    @without_collection()
    def from_edges(
        cls,
        ops: Sequence[Op],
        edges: Iterable[tuple[str, str, int | float, str]],
        *,
        name: str = "",
        framework: str = "",
        given_fingerprint: str | None = None,
    ) -> "OpGraph":
        """The graph of `ops` and `(source id, target id, bytes, tensor name)` edges, one per tensor and reader.

        Raises GraphError on a duplicate id, an unknown node, two sizes for one tensor, or a cycle.
        """
        index = _positions(ops)
        number: dict[tuple[int, str], int] = {}
        sizes: list[int | float] = []
        readers: list[list[int]] = []
        inputs: list[list[int]] = [[] for _ in ops]
        outputs: list[list[int]] = [[] for _ in ops]
        further: set[tuple[int, int]] = set()
        """Tensors and those of their readers that are not the first."""
        for source, target, size, tensor in edges:
            s, d = index.get(source), index.get(target)
            if s is None or d is None:
                raise _unknown_end(source, target, index)
            t = number.setdefault((s, tensor), len(sizes))
            if t == len(sizes):
                sizes.append(int(size) if float(size).is_integer() else size)
                readers.append([d])
                outputs[s].append(t)
                inputs[d].append(t)
                continue
            if sizes[t] != size:
                raise GraphError(
                    f"tensor {tensor!r} of op {source!r} has two sizes, {sizes[t]} and {size} bytes (edge to {target!r}); "
                    f"give its edges the same bytes or different tensor names"
                )
            if d != readers[t][0] and (t, d) not in further:
                further.add((t, d))
                readers[t].append(d)
                inputs[d].append(t)
        graph = cls(
            ops=tuple(ops),
            tensors=tuple(Tensor(s, tensor, sizes[t], tuple(readers[t])) for (s, tensor), t in number.items()),
            inputs=tuple(map(tuple, inputs)),
            outputs=tuple(map(tuple, outputs)),
            name=name,
            framework=framework,
            given_fingerprint=given_fingerprint,
        )
        if len(graph.order) != len(graph.ops):
            import networkx as nx

            cycle = [v for v, _ in nx.find_cycle(nx.DiGraph((t.producer, w) for t in graph.tensors for w in t.readers))]
            shown = " -> ".join([repr(graph.ops[v].id) for v in (*cycle, cycle[0])][:9]) + (" -> ..." if len(cycle) > 8 else "")
            raise GraphError(f"the graph has a cycle of {len(cycle)} op{'s' * (len(cycle) > 1)}: {shown}; remove one of its edges")
        return graph

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def index(self) -> dict[str, int]:
        """Op id -> position in `ops`."""
        return {op.id: v for v, op in enumerate(self.ops)}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Op positions in topological order (Kahn's algorithm, first in first out, sources in file order)."""
        missing = [len(i) for i in self.inputs]
        queue = deque(v for v, k in enumerate(missing) if k == 0)
        order: list[int] = []
        while queue:
            v = queue.popleft()
            order.append(v)
            for t in self.outputs[v]:
                for w in self.tensors[t].readers:
                    missing[w] -= 1
                    if missing[w] == 0:
                        queue.append(w)
        return tuple(order)

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """For each op, its place in `order`."""
        return tuple(sorted(range(len(self.ops)), key=self.order.__getitem__))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the distinct ops it reads from, in file order."""
        return tuple(tuple(dict.fromkeys(self.tensors[t].producer for t in i)) for i in self.inputs)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the distinct ops that read from it."""
        return tuple(tuple(dict.fromkeys(w for t in o for w in self.tensors[t].readers)) for o in self.outputs)

    @cached_property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Colocation string -> positions of its ops, in file order."""
        groups: dict[str, list[int]] = {}
        for v, op in enumerate(self.ops):
            if op.colocation is not None:
                groups.setdefault(op.colocation, []).append(v)
        return {name: tuple(members) for name, members in groups.items()}

    @cached_property
    def pins(self) -> dict[int, int]:
        """Position of a pinned op -> its device."""
        return {v: op.pin for v, op in enumerate(self.ops) if op.pin is not None}

    @cached_property
    def is_parted(self) -> bool:
        """True if there are ops of parts of a batch."""
        return any(op.part is not None for op in self.ops)

    def units(self, order: Sequence[int] | None = None) -> list[tuple[int, ...]]:
        """The parts that can be placed on their own: colocation groups, and ops without one; by their first op in `order`."""
        if not self.groups:
            return [(v,) for v in (self.order if order is None else order)]
        found: dict[int | str, list[int]] = {}
        for v in self.order if order is None else order:
            name = self.ops[v].colocation
            found.setdefault(v if name is None else name, []).append(v)
        return [tuple(unit) for unit in found.values()]

    def pinned(self, placement: Sequence[int]) -> tuple[int, ...]:
        """The placement with every pinned op on its device."""
        if not self.pins:
            return tuple(placement)
        return tuple(self.pins.get(v, d) for v, d in enumerate(placement))

    @cached_property
    def op_digests(self) -> tuple[str, ...]:
        """A short digest per op over its id, op, phase, colocation and in-edges with tensor and bytes; costs are left out."""
        digests = []
        for v, op in enumerate(self.ops):
            edges = [(self.ops[self.tensors[t].producer].id, self.tensors[t].name, self.tensors[t].bytes) for t in self.inputs[v]]
            text = json.dumps([op.id, op.op, op.phase, op.colocation, edges], ensure_ascii=True)
            digests.append(hashlib.sha256(text.encode()).hexdigest()[:12])
        return tuple(digests)

    @cached_property
    def fingerprint(self) -> str:
        """The one its file gave, else SHA-256 over the ops' digests in file order."""
        return self.given_fingerprint or hashlib.sha256(" ".join(self.op_digests).encode()).hexdigest()

    @cached_property
    def columns(self) -> "Columns":
        """Costs and edges as arrays."""
        from baechi_ext.ir.columns import columns  # loads numpy

        return columns(self.ops, self.tensors, self.inputs, self.outputs)

    @cached_property
    def size(self) -> int:
        """The size of the graph, in ops of up to three inputs each."""
        return max(len(self.ops), sum(map(len, self.inputs)) // 3)

    @cached_property
    def tails_us(self) -> tuple[float, ...]:
        """For each op, the longest compute-only path from its start to the end of the step, on devices of speed 1."""
        tails = [0.0] * len(self.ops)
        for v in reversed(self.order):
            after = 0.0
            for t in self.outputs[v]:
                for w in self.tensors[t].readers:
                    if tails[w] > after:
                        after = tails[w]
            tails[v] = self.ops[v].compute_us + after
        return tuple(tails)

    @cached_property
    def heads_us(self) -> tuple[float, ...]:
        """For each op, the longest compute-only path from the start of the step to its start, on devices of speed 1."""
        heads, ends = [0.0] * len(self.ops), [0.0] * len(self.ops)
        for v in self.order:
            heads[v] = max((ends[self.tensors[t].producer] for t in self.inputs[v]), default=0.0)
            ends[v] = heads[v] + self.ops[v].compute_us
        return tuple(heads)

    def total_compute_us(self) -> float:
        return sum(op.compute_us for op in self.ops)

    def total_issue_us(self) -> float:
        """No step takes less than its host."""
        return sum(op.issue_us for op in self.ops)

    def replace_ops(self, ops: Sequence[Op]) -> "OpGraph":
        """The same graph with other costs or colocation on the same op ids."""
        if [op.id for op in ops] != [op.id for op in self.ops]:
            raise GraphError("replace_ops needs the same op ids in the same order")
        same = all((a.colocation, a.op, a.phase) == (b.colocation, b.op, b.phase) for a, b in zip(ops, self.ops, strict=True))
        graph = replace(self, ops=tuple(ops), given_fingerprint=self.given_fingerprint if same else None)
        graph.__dict__.update((name, self.__dict__[name]) for name in _OF_EDGES if name in self.__dict__)
        return graph

    def to_json(self) -> dict[str, Any]:
        """networkx node-link JSON (DESIGN.md, "Graph file")."""
        nodes = []
        for op in self.ops:
            node = {key: getattr(op, key) for key in _FIELDS}
            node |= {key: value for key, default in _RARE.items() if (value := getattr(op, key)) != default}
            nodes.append(node)
        edges = []
        for v, op in enumerate(self.ops):
            for t in self.inputs[v]:
                tensor = self.tensors[t]
                source = self.ops[tensor.producer].id
                edges.append({"source": source, "target": op.id, "bytes": tensor.bytes, "tensor": tensor.name})
        return {
            "schema_version": SCHEMA_VERSION,
            "directed": True,
            "multigraph": True,
            "graph": {"name": self.name, "framework": self.framework, "fingerprint": self.fingerprint}
            | {name: list(names) for name, names in (("modules", self.modules), ("classes", self.classes)) if names},
            "nodes": nodes,
            "edges": edges,
        }

    @classmethod
    @without_collection()
    def from_json(cls, value: dict[str, Any]) -> "OpGraph":
        """The graph in a parsed graph file.

        Raises GraphError where a field is missing or wrong, or the graph breaks a rule.
        """
        if value.get("directed") is False:
            raise GraphError('the graph file says "directed": false; operator graphs are directed')
        attributes = value.get("graph", {})
        if not isinstance(attributes, dict):
            raise GraphError(f'"graph" is {attributes!r}; expected an object')
        for key in ("nodes", "edges"):
            if not isinstance(value.get(key), list):
                raise GraphError(f'the graph file has no list "{key}"; expected networkx node-link JSON with "nodes" and "edges"')
        fingerprint, modules, classes = (attributes.get(key) for key in ("fingerprint", "modules", "classes"))
        for key, names in (("modules", modules), ("classes", classes)):
            if not isinstance(names, list | None):
                raise GraphError(f'the graph file\'s "{key}" are {names!r}; expected a list of names')
        if classes and len(classes) != len(modules or ()):
            raise GraphError(f"the graph file has {len(classes)} classes for {len(modules or ())} modules; expected one each, or none")
        graph = cls.from_edges(
            [_op_from_json(node, position) for position, node in enumerate(value["nodes"])],
            [_edge_from_json(edge, position) for position, edge in enumerate(value["edges"])],
            name=str(attributes.get("name") or ""),
            framework=str(attributes.get("framework") or ""),
            given_fingerprint=fingerprint if isinstance(fingerprint, str) and fingerprint else None,
        )
        return replace(graph, modules=tuple(map(str, modules or ())), classes=tuple(map(str, classes or ())))

    def save(self, path: str | Path, made_by: MadeBy | None = None, *, compact: bool = False) -> None:
        """Writes the graph file, among whose graph's attributes is `made_by`, where that is given. Raises FileError.

        `compact`: without indentation, and without fields that have their default value.
        """
        value = self.to_json()
        value["graph"] = signed(value["graph"], made_by)
        if compact:
            value["nodes"] = [{key: v for key, v in node.items() if v != _DEFAULTS.get(key, ...)} for node in value["nodes"]]
            value["edges"] = [{key: v for key, v in edge.items() if v != _DEFAULTS.get(key, ...)} for edge in value["edges"]]
        write_json(path, value, compact=compact)

    @classmethod
    @without_collection()
    def load(cls, path: str | Path) -> "OpGraph":
        """Raises FileError or GraphError."""
        return load_as(path, "graph", cls.from_json)


def _positions(ops: Sequence[Op]) -> dict[str, int]:
    index = {op.id: position for position, op in enumerate(ops)}
    if len(index) < len(ops):
        again = next(op.id for position, op in enumerate(ops) if index[op.id] != position)
        first, second = [position for position, op in enumerate(ops) if op.id == again][:2]
        raise GraphError(
            f"op id {again!r} appears twice, at positions {first} and {second}; give every op its own id (ids are compared as strings)"
        )
    return index


def _unknown_end(source: str, target: str, index: Mapping[str, int]) -> GraphError:
    end, role = (source, "source") if source not in index else (target, "target")
    return GraphError(f"edge {source!r} -> {target!r}: its {role} {end!r} is not an op; add the op or drop the edge")


def _id_from_json(value: Any, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise GraphError(f"{what} is {value!r}; expected a string or an integer")
    return str(value)


def _op_from_json(node: Any, position: int) -> Op:
    if not isinstance(node, dict):
        raise GraphError(f"node {position} is {node!r}; expected an object")
    if "id" not in node:
        raise GraphError(f'node {position} has no "id"')
    id_ = _id_from_json(node["id"], f"the id of node {position}")
    if node.get("compute_us") is None:
        raise GraphError(f'op {id_!r} has no "compute_us"; every op needs its time in microseconds (0 if it takes none)')
    phase = node.get("phase") or "forward"
    if phase not in PHASES:
        raise GraphError(f"op {id_!r} has phase {phase!r}; expected one of {', '.join(PHASES)}")
    colocation, expert, forward_op = node.get("colocation"), node.get("expert"), node.get("forward_op")
    module, pin, resident, part = node.get("module"), node.get("pin"), node.get("resident", False), node.get("part")
    for key, device in (("expert", expert), ("pin", pin)):
        if device is not None and (isinstance(device, bool) or not isinstance(device, int)):
            raise GraphError(f'op {id_!r} has "{key}": {device!r}; expected a device index or null')
    if pin is not None and not 0 <= pin < MOST_DEVICES:
        raise GraphError(f'op {id_!r} has "pin": {pin!r}; expected the index of a device, from 0 to {MOST_DEVICES - 1}, or null')
    if not isinstance(resident, bool):
        raise GraphError(f'op {id_!r} has "resident": {resident!r}; expected true or false')
    if part is not None and (isinstance(part, bool) or not isinstance(part, int) or part < 0):
        raise GraphError(f'op {id_!r} has "part": {part!r}; expected the number of a part of the batch, from 0, or null')
    return Op(
        id=id_,
        op=str(node.get("op") or ""),
        phase=phase,
        compute_us=as_number(node["compute_us"], f"compute_us of op {id_!r}", GraphError),
        **{key: _bytes_from_json(node, key, id_) for key in ("persistent_bytes", "output_bytes", "temporary_bytes")},
        colocation=None if colocation is None else _id_from_json(colocation, f"colocation of op {id_!r}"),
        expert=expert,
        forward_op=None if forward_op is None else _id_from_json(forward_op, f"forward_op of op {id_!r}"),
        module=None if module is None else str(module),
        pin=pin,
        resident=resident,
        part=part,
        **{key: as_bytes(node[key], f"{key} of op {id_!r}", GraphError) for key in ("flop", "moved_bytes") if node.get(key) is not None},
        issue_us=as_number(node.get("issue_us") or 0.0, f"issue_us of op {id_!r}", GraphError),
    )


def _bytes_from_json(node: dict[str, Any], key: str, id_: str) -> int | float:
    size = node.get(key)
    if size is None or is_plain_size(size):
        return size or 0
    return as_bytes(size, f"{key} of op {id_!r}", GraphError, most=MOST_BYTES)


def _edge_from_json(edge: Any, position: int) -> tuple[str, str, int | float, str]:
    if not isinstance(edge, dict):
        raise GraphError(f"edge {position} is {edge!r}; expected an object")
    for key in ("source", "target", "bytes"):
        if edge.get(key) is None:
            raise GraphError(f'edge {position} ({edge.get("source")!r} -> {edge.get("target")!r}) has no "{key}"')
    source, target, size, tensor = edge["source"], edge["target"], edge["bytes"], edge.get("tensor")
    if type(source) is str and type(target) is str and is_plain_size(size) and (tensor is None or type(tensor) is str):
        return source, target, size, tensor or ""
    source = _id_from_json(source, f"the source of edge {position}")
    target = _id_from_json(target, f"the target of edge {position}")
    size = as_bytes(size, f"bytes of edge {source!r} -> {target!r}", GraphError, most=MOST_BYTES)
    return source, target, size, "" if tensor is None else _id_from_json(tensor, f"the tensor of edge {source!r} -> {target!r}")
