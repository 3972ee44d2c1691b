"""What a split step is predicted to take: its calls on their parts, its messages, its update, and what running all this adds.

Each piece is measured once, while all processes do the same: calls on parts of their tensors (`PartTimes`), messages by size (`Links`), the
optimizer's update of all weights, and, as what the executor adds to a call, what the step that is not split takes beside its calls.
Nothing is taken to overlap: where processes are CPU cores, messages take the cores that would compute.
"""

import operator
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from baechi_ext.shard.graph import Node, Strategy
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.space import Configurations
from baechi_ext.shard.tables import Tables
from baechi_ext.shard.terms import AllReduce, Shares
from runtime.sharding.align import lay_out
from runtime.sharding.binding import bind
from runtime.sharding.calibration import agreed, finish
from runtime.sharding.execute import ShardedStep
from runtime.sharding.gradients import buckets
from runtime.sharding.layout import Placements
from runtime.sharding.links import Links, probed_links
from runtime.sharding.mesh import groups
from runtime.sharding.models import ShardedModel
from runtime.sharding.moves import part_shape
from runtime.sharding.part_times import PartTimes
from runtime.sharding.program import Program, computes
from runtime.sharding.rules import arguments
from runtime.sharding.traffic import Traffic
from runtime.step import TrainingStep

_STEPS = 4
PARTS = ("calls_us", "moves_us", "gradients_us", "update_us", "executor_us")
GRADIENT_SUM = "allreduce"
"""What `counted` calls the messages by which gradients are added up."""
_OUTSIDE = ("output sum", "input gradient", "weight gradient")
"""The sums that calls leave to the executor; others are made inside of calls, and measured with them."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Microseconds of a step: calls on their parts, moving parts, adding gradients of weights up, the update, and running it all.

    `layers`: what each call adds to these, and `traffic`, what a process sends, both where they are known: `torch`'s own steps are not
    looked into.
    """

    calls_us: float
    moves_us: float = 0.0
    gradients_us: float = 0.0
    update_us: float = 0.0
    executor_us: float = 0.0
    layers: Mapping[str, "Forecast"] = field(default_factory=dict)
    traffic: Traffic | None = None

    @property
    def step_us(self) -> float:
        return sum(self.to_json().values())

    def to_json(self) -> dict[str, float]:
        """The parts that add up to the step."""
        return {part: getattr(self, part) for part in PARTS}


class Forecaster:
    """Forecasts of a model's step on a mesh. Every process has to make one, and to ask it the same; each gets the same answers."""

    def __init__(self, model: ShardedModel, step: TrainingStep, mesh: DeviceMesh, device: torch.device) -> None:
        self.model, self.mesh, self.shape = model, mesh, tuple(mesh.shape)
        self.links: Links = probed_links(mesh, device)
        self._times = PartTimes(model.forward, mesh, device)
        self._bound = bind(model.forward, model.captured)
        self._weights = {name: p for name, p in step.module.named_parameters() if p.requires_grad}
        self._known: dict[tuple[tuple[int, ...], ...], Forecast] = {}
        self._calls = [call for call in model.forward.nodes if _is_measured(call)]
        self.update_seconds, whole_seconds = _whole_step(model, step, mesh, device)
        program = Program(model.forward, {}, mesh)
        self._times.measure((call, program.layout(call)) for call in self._calls)
        calls = sum(self._times.seconds(call, program.layout(call)) for call in self._calls)
        self.call_seconds = max(whole_seconds - calls, 0.0) / len(self._calls)
        """What the executor adds to a call, and what a call takes longer in a step than by itself."""

    def machine(self, machine: Machine) -> Machine:
        """The machine with what a move takes as the latency of its two messages."""
        if machine.devices == 1:
            return machine
        small = self.links.seconds("all_gather", 0, machine.devices) + self.links.seconds("reduce_scatter_tensor", 0, machine.devices)
        return replace(machine, latency_us=(small + self.links.move_seconds) / 2 * 1e6)

    def step(self, strategy: Strategy) -> Forecast:
        """The step of a strategy that can be run. Raises ShardError for another one."""
        key = tuple(map(tuple, strategy))
        if key not in self._known:
            layouts = lay_out(self.model.forward, self.model.captured, strategy, self.shape)
            self._known[key] = self._of(Program(self.model.forward, layouts, self.mesh))
        return self._known[key]

    def _of(self, program: Program) -> Forecast:
        pairs = [(call, program.layout(call)) for call in self._calls]
        self._times.measure(pairs)
        seconds: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
        traffic = Traffic()
        for call, layout in pairs:
            seconds["calls_us"][call.name] += self._times.seconds(call, layout)
            seconds["executor_us"][call.name] += self.call_seconds
            traffic += self._times.traffic(call, layout)
        for planned in program.moves:
            seconds["moves_us"][planned.reader] += self.links.move_seconds
            for message in planned.messages:
                seconds["moves_us"][planned.reader] += self.links.of(message, planned.number_bytes)
                traffic.add(message.kind, message.words * planned.number_bytes, message.processes)
        shapes = {n: part_shape(tuple(p.shape), self._places(program, n), self.mesh) for n, p in self._weights.items()}
        for name, shape in shapes.items():
            seconds["update_us"][program.readers.get(name, "")] += self.update_seconds * prod(shape) / self._words
        for name, share in self._gradients(program, shapes, traffic).items():
            seconds["gradients_us"][program.readers[name]] += share
        names = dict.fromkeys(name for part in seconds.values() for name in part)
        layers = {name: Forecast(*(1e6 * seconds[part][name] for part in PARTS)) for name in names}
        return Forecast(*(1e6 * seconds[part].total() for part in PARTS), layers, traffic)

    def _places(self, program: Program, name: str) -> Placements:
        return program.held.get(name, program.whole)

    def _gradients(self, program: Program, shapes: dict[str, tuple[int, ...]], traffic: Traffic) -> dict[str, float]:
        """Seconds of adding up each weight's gradient: its part, by size, of those of its message. What is sent is added to `traffic`."""
        sizes = {name: (prod(shape) * self._weights[name].element_size(), self._weights[name].dtype) for name, shape in shapes.items()}
        over = {name: dims for name, dims in reversed(program.summed.items()) if dims and name in sizes}
        shares = {}
        for names, dims in buckets(sizes, over):
            size = sum(sizes[name][0] for name in names)
            seconds = self.links.copy_seconds * size * (len(names) > 1)
            for group in groups(self.mesh, dims):
                seconds += self.links.seconds("all_reduce", size, group.size())
                traffic.add(GRADIENT_SUM, size, group.size())
            shares |= {name: seconds * sizes[name][0] / size for name in names}
        return shares

    def tables(self, tables: Tables) -> Tables:
        """The tables of what can be run, with measured times of calls and updates in place of counted operations.

        A message about a weight's gradient counts by its size alone: many go together.
        """
        layouts = [
            [bound.layout(bound.assignments(row, self.shape)[0]) for row in space.tolist()]
            for bound, space in zip(map(self._bound.__getitem__, (n.name for n in tables.graph.nodes)), tables.spaces, strict=True)
        ]
        calls = [self._bound[node.name].call for node in tables.graph.nodes]
        measured = [_is_measured(call) for call in calls]
        self._times.measure((c, layout) for c, ways, m in zip(calls, layouts, measured, strict=True) if m for layout in ways)
        rate, known = tables.machine.tera_flops * 1e12, {}
        found = []
        for node, space, call, ways, m in zip(tables.graph.nodes, tables.spaces, calls, layouts, measured, strict=True):
            seconds = np.array([self._times.seconds(call, layout) if m else 0.0 for layout in ways])
            costs = rate * (seconds + self._update_share(node, space)) + _sums(node, space, tables.machine)
            found.append(known.setdefault(costs.tobytes(), costs))  # nodes that are alike share their tables
        return replace(tables, costs=tuple(found))

    def _update_share(self, node: Node, space: Configurations) -> Costs:
        """Seconds of the update of a node's weights, by configuration."""
        words = sum(w.words / space[:, [a for axes in w.axes for a in axes]].prod(axis=1) for w in node.weights)
        return self.update_seconds * words / self._words + np.zeros(len(space))

    @cached_property
    def _words(self) -> int:
        return sum(p.numel() for p in self._weights.values())


def _sums(node: Node, space: Configurations, machine: Machine) -> Costs:
    """What the sums cost that a node leaves to the executor."""
    by_size = replace(machine, latency_us=0.0)
    costs = np.zeros(len(space))
    for term in node.terms:
        if isinstance(term, AllReduce) and term.kind in _OUTSIDE:
            costs = costs + term.cost(Shares(node.sizes, space, by_size if term.hides else machine))
    return costs


def _is_measured(call: fx.Node) -> bool:
    plain = all(isinstance(node.meta.get("val"), Tensor) for node in arguments(call))
    return plain and computes(call) and call.meta.get("val") is not None and call.target is not operator.getitem


def _whole_step(model: ShardedModel, step: TrainingStep, mesh: DeviceMesh, device: torch.device) -> tuple[float, float]:
    """Seconds of the update of all weights, and of the rest of a step that every process runs whole."""
    sharded = ShardedStep(model.forward, step.module, {}, mesh)
    optimizer = step.optimizer.make([p for p in sharded.parts.values() if p.requires_grad])
    updates, rests = [], []
    for _ in range(_STEPS):
        dist.barrier()
        times = [time.perf_counter()]
        for action in (lambda: sharded.run_parts(*step.inputs), optimizer.step):
            action()
            finish(device)
            times.append(time.perf_counter())
        rests.append(times[1] - times[0])
        updates.append(times[2] - times[1])
    return agreed(min(updates[1:]), device), agreed(min(rests[1:]), device)
