"""The predicted time of a split step: its calls on their parts, its messages, its update, and what running all this adds.

Each piece is measured once, while all processes do the same: calls on parts of their tensors (`PartTimes`), messages by size (`Links`), the
optimizer's update of all weights, and, as what the executor adds to a call, what the step that is not split takes beside its calls.
Nothing is taken to overlap: where processes are CPU cores, messages take the cores that would compute.
"""

import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import astuple
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.node import map_arg

from baechi_ext.errors import ShardError
from baechi_ext.shard.graph import Node, Strategy
from baechi_ext.shard.machine import Costs, Machine
from baechi_ext.shard.tables import Configurations, Tables
from baechi_ext.shard.terms import AllReduce, Shares
from baechi_runtime.models.training_step import TrainingStep
from baechi_runtime.report.report import Layer, StepParts
from baechi_runtime.sharding.binding import bind, lay_out
from baechi_runtime.sharding.calibration import Links, agreed, finish, probed_links, seconds_of
from baechi_runtime.sharding.captured import CapturedGraph, ForwardGraph
from baechi_runtime.sharding.counts import Traffic, counted
from baechi_runtime.sharding.execute import ShardedStep
from baechi_runtime.sharding.gradients import buckets
from baechi_runtime.sharding.layout import Layout, groups
from baechi_runtime.sharding.moves import part_shape
from baechi_runtime.sharding.program import Program, computes, differentiable, runner
from baechi_runtime.sharding.rules import arguments, is_plain, run_by_rule

_REPEATS, _ENOUGH_SECONDS = 4, 0.03
"""Number of times that a call is timed, unless it took so long already."""
_STEPS = 4
_SUM_BYTES = 1 << 12, 1 << 22
"""Sizes of the sums that tell how fast these go round."""
GRADIENT_SUM = "allreduce"
"""The kind that `counted` gives to messages by which gradients are added up."""
_OUTSIDE = ("output sum", "input gradient", "weight gradient")
"""The sums that calls leave to the executor; others are made inside of calls, and measured with them."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step's calls on their parts, moving parts, adding gradients of weights up, the update, and running it all.

    `layers`: what each call adds to these, and `traffic`, what a process sends, both where they are known: `torch`'s own steps are not
    looked into.
    """

    parts: StepParts
    layers: Sequence[Layer] = ()
    traffic: Traffic | None = None

    @property
    def step_us(self) -> float:
        return sum(astuple(self.parts))


class PartTimes:
    """Seconds of calls of a forward graph, by layout. Calls that do the same to tensors of the same shapes are measured once."""

    def __init__(self, forward: ForwardGraph, mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._gradients = differentiable(forward)
        self._known: dict[object, float] = {}
        self._sent: dict[object, Traffic] = {}

    def measure(self, layouts: Iterable[tuple[fx.Node, Layout]]) -> None:
        """Measures these, on all processes at once: every process has to ask for the same, and gets the same answers."""
        new: dict[object, tuple[fx.Node, Layout]] = {}
        for call, layout in layouts:
            new.setdefault(self._key(call, layout), (call, layout))
        new = {key: value for key, value in new.items() if key not in self._known}
        with torch.random.fork_rng():
            taken = torch.tensor([self._timed(*value) for value in new.values()], dtype=torch.float64, device=self._device)
        if len(taken):
            dist.all_reduce(taken)
        self._known |= dict(zip(new, (taken / dist.get_world_size()).tolist(), strict=True))

    def seconds(self, call: fx.Node, layout: Layout) -> float:
        """Seconds of a call that was measured in that layout."""
        return self._known[self._key(call, layout)]

    def traffic(self, call: fx.Node, layout: Layout) -> Traffic:
        """The traffic inside of a call that was measured in that layout, forward and backward."""
        return self._sent[self._key(call, layout)]

    def _key(self, call: fx.Node, layout: Layout) -> object:
        """A key that tells apart calls whose times may differ."""
        read = arguments(call)
        shapes = tuple(self._part(node, argument.placements) for node, argument in zip(read, layout.arguments, strict=True))
        names = iter(range(len(read)))
        rest = repr(map_arg((call.args, call.kwargs), lambda _: next(names)))
        return call.target, shapes, rest, None if run_by_rule(call) is None else layout

    def _part(self, node: fx.Node, placements: Any) -> tuple[tuple[int, ...], torch.dtype, bool] | None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        shape = part_shape(tuple(value.shape), placements, self._mesh)
        return shape, value.dtype, node in self._gradients and value.is_floating_point()

    def _timed(self, call: fx.Node, layout: Layout) -> float:
        wanted = iter(layout.arguments)
        leaves: list[Tensor] = []

        def part(node: fx.Node) -> Tensor:
            found = self._part(node, next(wanted).placements)
            if found is None:
                raise ShardError(f"{call.name} reads {node.name}, which is no tensor; it can't be timed by itself")
            shape, dtype, gradient = found
            numbers = torch.rand(shape, device=self._device)
            made = numbers.to(dtype)  # whole numbers are 0, a row and a class that everyone has
            leaves.extend([made.requires_grad_()] if gradient else [])
            return made

        args, kwargs = map_arg((call.args, call.kwargs), part)
        run, communicates = runner(call, layout, self._mesh), run_by_rule(call) is not None  # processes have to run these equally often
        grads: list[Tensor] = []
        with counted() as self._sent[self._key(call, layout)]:
            self._once(run, args, kwargs, leaves, grads)
        best, spent = float("inf"), 0.0
        for _ in range(_REPEATS):
            began = time.perf_counter()
            self._once(run, args, kwargs, leaves, grads)
            finish(self._device)
            taken = time.perf_counter() - began
            best, spent = min(best, taken), spent + taken
            if spent > _ENOUGH_SECONDS and not communicates:
                break
        return best

    def _once(self, run: Callable[..., Any], args: Any, kwargs: Any, leaves: Sequence[Tensor], grads: list[Tensor]) -> None:
        """Run forward and backward, with gradients of ones, which the first run makes."""
        results = run(*args, **kwargs)
        results = [r for r in (results if isinstance(results, list | tuple) else [results]) if isinstance(r, Tensor) and r.requires_grad]
        if results and leaves:
            grads.extend([] if grads else map(torch.ones_like, results))
            torch.autograd.grad(results, leaves, grads, allow_unused=True)


class Forecaster:
    """Forecasts of a model's step on a mesh. Every process has to make one, and to ask it the same; each gets the same answers."""

    def __init__(self, model: CapturedGraph, step: TrainingStep, mesh: DeviceMesh, device: torch.device) -> None:
        self.model, self.mesh, self.shape = model, mesh, tuple(mesh.shape)
        self.links: Links = probed_links(mesh, device)
        self._times = PartTimes(model.forward, mesh, device)
        self._bound = bind(model)
        self._weights = {name: p for name, p in step.module.named_parameters() if p.requires_grad}
        self._words = sum(p.numel() for p in self._weights.values())
        self._known: dict[tuple[tuple[int, ...], ...], Forecast] = {}
        self._calls = [call for call in model.forward.nodes if _is_measured(call)]
        self.update_seconds, whole_seconds = _whole_step(model, step, mesh, device)
        program = Program(model.forward, {}, mesh)
        self._times.measure((call, program.layout(call)) for call in self._calls)
        calls = sum(self._times.seconds(call, program.layout(call)) for call in self._calls)
        self.call_seconds = max(whole_seconds - calls, 0.0) / len(self._calls)
        """Seconds that the executor adds to a call, and that a call takes longer in a step than by itself."""

    def machine(self, tera_flops: float, optimizer_words: int, memory_bytes: int | None = None) -> Machine:
        """The processes as the search sees them: how fast each computes and what it may hold, how fast a sum goes round in a ring, and what
        a move takes as the latency of its two messages."""
        n = dist.get_world_size()
        if n == 1:
            return Machine(devices=1, tera_flops=tera_flops, optimizer_words=optimizer_words, memory_bytes=memory_bytes)
        small, large = (self.links.seconds("all_reduce", size, n) for size in _SUM_BYTES)
        sent = 2 * (n - 1) / n * (_SUM_BYTES[1] - _SUM_BYTES[0])
        move = self.links.seconds("all_gather", 0, n) + self.links.seconds("reduce_scatter_tensor", 0, n) + self.links.move_seconds
        return Machine(
            devices=n,
            tera_flops=tera_flops,
            gigabytes_per_second=sent / max(large - small, 1e-9) / 1e9,
            latency_us=move / 2 * 1e6,
            optimizer_words=optimizer_words,
            memory_bytes=memory_bytes,
        )

    def step(self, strategy: Strategy) -> Forecast:
        """The step of a strategy that can be run. Raises ShardError for another one."""
        key = tuple(map(tuple, strategy))
        if key not in self._known:
            layouts = lay_out(self.model, strategy, self.shape)
            self._known[key] = self._of(Program(self.model.forward, layouts, self.mesh))
        return self._known[key]

    def _of(self, program: Program) -> Forecast:
        pairs = [(call, program.layout(call)) for call in self._calls]
        self._times.measure(pairs)
        us: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        traffic = Traffic()

        def add(layer: str, part: str, seconds: float) -> None:
            us[layer][part] += 1e6 * seconds

        for call, layout in pairs:
            add(call.name, "calls_us", self._times.seconds(call, layout))
            add(call.name, "executor_us", self.call_seconds)
            traffic += self._times.traffic(call, layout)
        for planned in program.moves:
            add(planned.reader, "moves_us", self.links.move_seconds)
            for message in planned.messages:
                size = message.words * planned.number_bytes
                add(planned.reader, "moves_us", self.links.seconds(message.kind, size, message.processes))
                traffic.add(message.kind, size, message.processes)
        shapes = {n: part_shape(tuple(p.shape), program.placements(n), self.mesh) for n, p in self._weights.items()}
        for name, shape in shapes.items():
            add(program.readers.get(name, ""), "update_us", self.update_seconds * prod(shape) / self._words)
        for name, share in self._gradients(program, shapes, traffic).items():
            add(program.readers[name], "gradients_us", share)
        layers = [Layer(name=name, **parts) for name, parts in us.items()]
        whole = {part: sum(getattr(layer, part) for layer in layers) for part in StepParts.__struct_fields__}
        return Forecast(StepParts(**whole), layers, traffic)

    def _gradients(self, program: Program, shapes: dict[str, tuple[int, ...]], traffic: Traffic) -> dict[str, float]:
        """Seconds of adding up each weight's gradient: its part, by size, of those of its message. What is sent is added to `traffic`."""
        sizes = {name: (prod(shape) * self._weights[name].element_size(), self._weights[name].dtype) for name, shape in shapes.items()}
        over = {name: dims for name, dims in reversed(program.summed.items()) if dims and name in sizes}
        shares: dict[str, float] = {}
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
        layouts: list[list[Layout]] = []
        for node, space in zip(tables.graph.nodes, tables.spaces, strict=True):
            bound = self._bound[node.name]
            ways = space.tolist() if _is_measured(bound.call) else []
            layouts.append([bound.layout(bound.assignments(way, self.shape)[0]) for way in ways])
        calls = [self._bound[node.name].call for node in tables.graph.nodes]
        self._times.measure((call, layout) for call, ways in zip(calls, layouts, strict=True) for layout in ways)
        rate = tables.machine.tera_flops * 1e12
        known: dict[bytes, Costs] = {}
        found = []
        for node, space, call, ways in zip(tables.graph.nodes, tables.spaces, calls, layouts, strict=True):
            seconds = np.array([self._times.seconds(call, layout) for layout in ways] or 0.0)
            words = sum((w.words / w.parts(space) for w in node.weights), np.zeros(len(space)))
            costs = rate * (seconds + self.update_seconds * words / self._words) + _sums(node, space, tables.machine)
            found.append(known.setdefault(costs.tobytes(), costs))  # nodes that are alike share their tables
        return replace(tables, costs=tuple(found))


def _sums(node: Node, space: Configurations, machine: Machine) -> Costs:
    """Costs of the sums that a node leaves to the executor, by configuration."""
    by_size = replace(machine, latency_us=0.0)
    costs = np.zeros(len(space))
    for term in node.terms:
        if isinstance(term, AllReduce) and term.kind in _OUTSIDE:
            costs = costs + term.cost(Shares(node.sizes, space, by_size if term.hides else machine))
    return costs


def _is_measured(call: fx.Node) -> bool:
    return is_plain(call) and computes(call) and call.meta.get("val") is not None and call.target is not operator.getitem


def _whole_step(model: CapturedGraph, step: TrainingStep, mesh: DeviceMesh, device: torch.device) -> tuple[float, float]:
    """Seconds of the update of all weights, and of the rest of a step that every process runs whole."""
    sharded = ShardedStep(model.forward, step.module, {}, mesh)
    optimizer = step.optimizer.make([p for p in sharded.parts.values() if p.requires_grad])
    updates, rests = [], []
    for _ in range(_STEPS):
        rest, update = seconds_of(device, lambda: sharded.run_parts(*step.inputs), optimizer.step)
        rests.append(rest)
        updates.append(update)
    return agreed(min(updates[1:]), device), agreed(min(rests[1:]), device)
