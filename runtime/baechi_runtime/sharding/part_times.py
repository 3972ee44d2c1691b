"""Measured times of calls on parts of their tensors: half of a matrix product may take more than half of its time."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.node import map_arg

from baechi_ext.errors import ShardError
from baechi_runtime.sharding.calibration import finish
from baechi_runtime.sharding.captured import ForwardGraph
from baechi_runtime.sharding.counts import Traffic, counted
from baechi_runtime.sharding.layout import Layout
from baechi_runtime.sharding.moves import part_shape
from baechi_runtime.sharding.program import differentiable, runner
from baechi_runtime.sharding.rules import arguments, run_by_rule

_REPEATS, _ENOUGH_SECONDS = 4, 0.03
"""Number of times that a call is timed, unless it took so long already."""


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
