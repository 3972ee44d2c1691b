"""How long calls take on parts of their tensors, measured: half of a matrix product may take more than half of its time."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.node import map_arg

from runtime.sharding.calibration import finish
from runtime.sharding.forward import ForwardGraph
from runtime.sharding.layout import Layout
from runtime.sharding.local_ops import as_is
from runtime.sharding.moves import part_shape
from runtime.sharding.program import differentiable, runner
from runtime.sharding.rules import arguments, rule_of
from runtime.sharding.traffic import Traffic, counted

_REPEATS, _ENOUGH_SECONDS = 4, 0.03
"""A call is timed so often, unless it took so long already."""


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
        """Of a call that was measured in that layout."""
        return self._known[self._key(call, layout)]

    def traffic(self, call: fx.Node, layout: Layout) -> Traffic:
        """What is sent inside of a call that was measured in that layout, forward and backward."""
        return self._sent.get(self._key(call, layout), Traffic())

    def _key(self, call: fx.Node, layout: Layout) -> object:
        """What tells calls apart that may take longer than one another."""
        read = arguments(call)
        shapes = tuple(self._part(node, argument.placements) for node, argument in zip(read, layout.arguments, strict=True))
        names = iter(range(len(read)))
        rest = repr(map_arg((call.args, call.kwargs), lambda _: next(names)))
        rule = rule_of(call)
        plain = rule is None or rule.run is as_is
        return call.target, shapes, rest, None if plain else layout

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
            shape, dtype, gradient = self._part(node, next(wanted).placements)
            numbers = torch.rand(shape, device=self._device)
            made = numbers.to(dtype)  # whole numbers are 0, a row and a class that everyone has
            leaves.extend([made.requires_grad_()] if gradient else [])
            return made

        args, kwargs = map_arg((call.args, call.kwargs), part)
        run = runner(call, layout, self._mesh)
        grads: list[Tensor] = []
        if _communicates(call):
            with counted() as self._sent[self._key(call, layout)]:
                self._once(run, args, kwargs, leaves, grads)
        else:
            self._once(run, args, kwargs, leaves, grads)
        best, spent = float("inf"), 0.0
        for _ in range(_REPEATS):
            began = time.perf_counter()
            self._once(run, args, kwargs, leaves, grads)
            finish(self._device)
            taken = time.perf_counter() - began
            best, spent = min(best, taken), spent + taken
            if spent > _ENOUGH_SECONDS and not _communicates(call):
                break
        return best

    def _once(self, run: Callable[..., Any], args: Any, kwargs: Any, leaves: Sequence[Tensor], grads: list[Tensor]) -> None:
        """Forward and backward, with gradients of ones, which the first time makes."""
        results = run(*args, **kwargs)
        results = [r for r in (results if isinstance(results, list | tuple) else [results]) if isinstance(r, Tensor) and r.requires_grad]
        if results and leaves:
            grads.extend([] if grads else map(torch.ones_like, results))
            torch.autograd.grad(results, leaves, grads, allow_unused=True)


def _communicates(call: fx.Node) -> bool:
    """Whether processes have to run it equally often."""
    rule = rule_of(call)
    return rule is not None and rule.run is not as_is
