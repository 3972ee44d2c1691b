"""Profile: measured costs per op, with the raw samples; `attach_costs` puts them on a graph."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from baechi_ext.errors import ProfileError
from baechi_ext.ir.files import SCHEMA_VERSION
from baechi_ext.ir.made_by import Saved, load_as
from baechi_ext.ir.numbers import MOST_BYTES, as_bytes, as_number, require_finite
from baechi_ext.ir.op_graph import OpGraph
from baechi_ext.ir.plan import require_same_graph

_SIZES = ("output_bytes", "temporary_bytes", "persistent_bytes")


@dataclass(frozen=True, slots=True)
class OpProfile:
    """Measured costs of one op. `samples_us` are the timed repeats, warm-up left out."""

    samples_us: tuple[float, ...]
    output_bytes: int | float = 0
    temporary_bytes: int | float = 0
    persistent_bytes: int | float = 0
    contended_us: tuple[float, ...] = ()
    """The same, while other devices were at work; empty where none was."""
    issue_us: float = 0.0
    """Time that it took the host to give it to a device that works by itself, the median; 0 where that is part of the samples."""

    @property
    def min_us(self) -> float:
        return min(self.samples_us)

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


@dataclass(frozen=True, slots=True)
class Contention:
    """Whole passes while `devices` devices ran the step at once, each its own, in microseconds of wall time without waits for a core.

    Devices of one host share its memory, and threads the interpreter: what they wait for is in no op's own clock, but in the pass.
    """

    devices: int
    pass_us: tuple[float, ...]


@dataclass(frozen=True)
class Profile(Saved):
    """The costs of every op of one graph, keyed by op id, and how they were measured."""

    graph_fingerprint: str
    op_digests: Mapping[str, str]
    clock: str
    """"thread_cpu" (CPU time of the op's thread) or "cuda_event"."""
    warmup: int
    ops: Mapping[str, OpProfile]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    contention: Contention | None = None
    pass_us: tuple[float, ...] = ()
    """Whole passes with no other device at work, in microseconds, where these are not the sums of their ops; empty where they are."""
    by_op: bool = False
    """The step can be no CUDA graph, although one was wanted: a thread gives devices its ops one by one."""

    def to_json(self) -> dict[str, Any]:
        contention = self.contention
        return {
            "schema_version": SCHEMA_VERSION,
            "graph_fingerprint": self.graph_fingerprint,
            "clock": self.clock,
            "warmup": self.warmup,
            "contention": None if contention is None else {"devices": contention.devices, "pass_us": list(contention.pass_us)},
            **({"pass_us": list(self.pass_us)} if self.pass_us else {}),
            **({"by_op": True} if self.by_op else {}),
            "metadata": dict(self.metadata),
            "op_digests": dict(self.op_digests),
            "ops": {
                id_: {
                    "compute_us": p.min_us,
                    "median_us": p.median_us,
                    "samples_us": list(p.samples_us),
                    **({"contended_us": list(p.contended_us)} if p.contended_us else {}),
                    **({"issue_us": p.issue_us} if p.issue_us else {}),
                    **{name: getattr(p, name) for name in _SIZES},
                }
                for id_, p in self.ops.items()
            },
        }

    @classmethod
    def from_json(cls, value: dict[str, Any], graph: OpGraph) -> "Profile":
        """The profile in a parsed profile file.

        Raises ProfileError where it breaks a rule, MismatchError where it is of another graph than `graph`.
        """
        ops = value.get("ops")
        if not isinstance(ops, dict):
            raise ProfileError('the profile has no object "ops"')
        require_same_graph(graph, value, "profile", ops)
        metadata = value.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise ProfileError(f'the profile\'s "metadata" is {metadata!r}; expected an object')
        require_finite(metadata, 'the profile\'s "metadata"', ProfileError)
        profile = cls(
            graph_fingerprint=graph.fingerprint,
            op_digests=dict(zip(graph.index, graph.op_digests, strict=True)),
            clock=str(value.get("clock", "")),
            warmup=int(as_number(value.get("warmup", 0), "warmup", ProfileError)),
            ops={op.id: _op_from_json(op.id, ops[op.id]) for op in graph.ops},
            metadata=metadata or {},
            contention=_contention_from_json(value.get("contention")),
            pass_us=_passes_from_json(value.get("pass_us", []), "the profile"),
            by_op=value.get("by_op", False) is True,
        )
        without = next((id_ for id_, p in profile.ops.items() if not p.contended_us), None)
        if profile.contention is not None and without is not None:
            raise ProfileError(f'the profile has "contention", but op {without!r} has no "contended_us"; profile again')
        return profile

    def compute_us(self, *, graphs: bool = True) -> dict[str, float]:
        """Time of each op on a device that works alone: the least of its samples, times what a typical pass takes over the sum of
        the least times: no pass has every op at its best, and a step is a pass; a CUDA graph where such were timed and `graphs`."""
        if self.pass_us and graphs:
            return self._scaled({id_: p.min_us for id_, p in self.ops.items()}, self.pass_us)
        columns = [p.samples_us for p in self.ops.values()]
        passes = [sum(one_pass) for one_pass in zip(*columns, strict=True)] if len(set(map(len, columns))) == 1 else []
        return self._scaled({id_: p.min_us for id_, p in self.ops.items()}, passes)

    def contended_us(self, *, graphs: bool = True) -> dict[str, float]:
        """Time of each op while other devices are at work; as if alone where that was not profiled. See `compute_us`."""
        if self.contention is None or (self.pass_us and not graphs):
            return self.compute_us(graphs=graphs)
        return self._scaled({id_: min(p.contended_us) for id_, p in self.ops.items()}, self.contention.pass_us)

    @staticmethod
    def _scaled(least_us: dict[str, float], passes_us: Sequence[float]) -> dict[str, float]:
        total = sum(least_us.values())
        scale = statistics.median(passes_us) / total if passes_us and total > 0 else 1.0
        return {id_: us * scale for id_, us in least_us.items()}

    @classmethod
    def load(cls, path: str | Path, graph: OpGraph) -> "Profile":
        """Raises FileError, ProfileError or MismatchError."""
        return load_as(path, "profile", lambda value: cls.from_json(value, graph))


def _contention_from_json(value: Any) -> Contention | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("pass_us"), list) or not value["pass_us"]:
        raise ProfileError(f'the profile\'s "contention" is {value!r}; expected an object with "devices" and "pass_us"')
    passes = _passes_from_json(value["pass_us"], "the profile's contention")
    return Contention(int(as_number(value.get("devices", 0), "the devices of the profile's contention", ProfileError)), passes)


def _passes_from_json(value: Any, what: str) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ProfileError(f'"pass_us" of {what} is {value!r}; expected a list; profile again')
    return tuple(as_number(us, f"a pass of {what}", ProfileError) for us in value)


def _op_from_json(id_: str, value: Any) -> OpProfile:
    if not isinstance(value, dict):
        raise ProfileError(f"the profile of op {id_!r} is {value!r}; expected an object")
    samples = value.get("samples_us")
    if not isinstance(samples, list) or not samples:
        raise ProfileError(f'the profile of op {id_!r} has no "samples_us"; profile again')
    sizes = {name: as_bytes(value.get(name, 0), f"{name} of op {id_!r}", ProfileError, most=MOST_BYTES) for name in _SIZES}
    contended = value.get("contended_us", [])
    if not isinstance(contended, list):
        raise ProfileError(f'"contended_us" of op {id_!r} is {contended!r}; expected a list; profile again')
    alone_us, contended_us = (tuple(as_number(s, f"a sample of op {id_!r}", ProfileError) for s in x) for x in (samples, contended))
    issue_us = as_number(value.get("issue_us", 0.0), f"issue_us of op {id_!r}", ProfileError)
    profile = OpProfile(alone_us, **sizes, contended_us=contended_us, issue_us=issue_us)
    if value.get("compute_us") is None:
        raise ProfileError(f'the profile of op {id_!r} has no "compute_us"; profile again')
    compute_us = as_number(value["compute_us"], f"compute_us of op {id_!r}", ProfileError)
    if not math.isclose(compute_us, profile.min_us, rel_tol=1e-9):
        raise ProfileError(
            f"compute_us of op {id_!r} is {compute_us:g} and the least of its samples {profile.min_us:g}; change both, or neither"
        )
    return profile


Host = Literal["none", "one", "each"]
"""The threads that give ops to devices while a step runs: none, since it is one launch; one for all of them; or one for each."""


def attach_costs(graph: OpGraph, profile: Profile, *, contended: bool = False, host: Host = "none") -> OpGraph:
    """The graph with each op's time and bytes from `profile`; with `contended` the times beside other devices at work. `host`: one
    thread is a limit of all ops together, also where no graph can be made; one for each device makes an op take as long as it takes the
    host, at least.

    Times are built on the least samples, which repeat best from run to run because other programs only ever add to a sample.
    Raises ProfileError where an op has no profile.
    """
    missing = next((op.id for op in graph.ops if op.id not in profile.ops), None)
    if missing is not None:
        raise ProfileError(f"the profile has no op {missing!r}; profile this graph again")
    if host == "none" and profile.by_op:
        host = "one"
    graphs = host == "none"
    times = profile.contended_us(graphs=graphs) if contended else profile.compute_us(graphs=graphs)
    sizes = {id_: {name: getattr(costs, name) for name in _SIZES} for id_, costs in profile.ops.items()}
    if host == "each":
        times = {id_: max(us, profile.ops[id_].issue_us) for id_, us in times.items()}
    issue = {id_: costs.issue_us if host == "one" else 0.0 for id_, costs in profile.ops.items()}
    return graph.replace_ops([replace(op, compute_us=times[op.id], issue_us=issue[op.id], **sizes[op.id]) for op in graph.ops])
