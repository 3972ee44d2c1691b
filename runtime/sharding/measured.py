"""What calls were measured to take, in place of what is counted for them.

A profile (`baechi train --costgen`) is of the joint graph of forward and backward pass, in other ops than a forward graph has; what both
know is which module an op is of. So the time of a module's ops, both passes together, is shared out over the module's calls by their
operations, and split over devices it is taken to shrink as these do. Updates of parameters are no part of it. Calls of modules without a
measured op keep what is counted for them, and time of ops that are no module's is nobody's; the report says how much.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from baechi_ext.capture.module_names import known_model
from baechi_ext.capture.torch_joint import INPUT, UPDATE, CaptureOptions, capture_joint
from baechi_ext.cost import Profile
from baechi_ext.shard.graph import Node
from baechi_ext.shard.terms import Compute
from runtime.sharding.captured import CapturedGraph, node_flop
from runtime.sharding.forward import ForwardGraph
from runtime.step import TrainingStep


@dataclass(frozen=True)
class Measured:
    """How much of a step's time went to calls, in microseconds, of how much in all, and how many calls that are."""

    us: float
    all_us: float
    calls: int

    def fact(self) -> str:
        """For a person."""
        return (
            f"{self.us / 1000:.4g} ms of {self.all_us / 1000:.4g} ms measured, by module, for {self.calls} calls; the others' are counted"
        )

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return {"us": self.us, "all_us": self.all_us, "calls": self.calls}


def measured_costs(
    captured: CapturedGraph, forward: ForwardGraph, step: TrainingStep, path: str, tera_flops: float
) -> tuple[CapturedGraph, Measured]:
    """The graph with costs of the profile in that file, as operations of a device that makes so many (10^12) a second.

    Raises FileError, ProfileError, and MismatchError where the profile is of another step.
    """
    options = CaptureOptions(step.optimizer.name, step.optimizer.slots)
    graph, _ = capture_joint(step.module, step.inputs, options, step.name)
    times = Profile.load(path, graph).compute_us()
    of_module: Counter[str] = Counter()
    all_us = 0.0
    for op in graph.ops:
        if op.op == INPUT or op.phase == UPDATE:
            continue
        all_us += times[op.id]
        if op.module is not None:
            of_module[op.module] += times[op.id]
    prefix = known_model(step.module)[1]
    modules = {call.name: _module_of(call, prefix) for call in forward.nodes}
    counted: Counter[str | None] = Counter()
    for node in captured.graph.nodes:
        counted[modules[node.name]] += node_flop(node)
    scales = {m: us * tera_flops * 1e6 / counted[m] for m, us in of_module.items() if counted[m]}
    nodes = tuple(_scaled(node, scales, modules[node.name]) for node in captured.graph.nodes)
    known = Measured(sum(of_module[m] for m in scales), all_us, sum(modules[n.name] in scales and node_flop(n) > 0 for n in nodes))
    return replace(captured, graph=replace(captured.graph, nodes=nodes)), known


def _module_of(call: fx.Node, prefix: str) -> str | None:
    """The innermost module that a call is of, by its name in the model; None for the code around it."""
    stack = list((call.meta.get("nn_module_stack") or {}).values())
    name = stack[-1][0] if stack else ""
    if not name.startswith(prefix):
        return "" if f"{name}." == prefix else None
    return name.removeprefix(prefix)


def _scaled(node: Node, scales: Mapping[str, float], module: str | None) -> Node:
    if module not in scales:
        return node
    terms = (replace(t, flop=t.flop * scales[module]) if isinstance(t, Compute) else t for t in node.terms)
    return replace(node, terms=tuple(terms))
