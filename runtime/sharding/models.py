"""Models to be sharded: the registry's, or a module with inputs, captured and described."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from runtime.models.registry import ModelOptions, chosen_options, find_model, make_step
from runtime.sharding.captured import CapturedGraph, captured_graph
from runtime.sharding.forward import ForwardGraph, forward_graph
from runtime.sharding.measured import Measured, measured_costs
from runtime.step import optimizer_spec


@dataclass(frozen=True)
class ShardedModel:
    """A captured step's forward graph, its shard graph, the examples of a step, and how long capturing took; what was `measured` of its
    costs, where there is a profile.
    """

    forward: ForwardGraph
    captured: CapturedGraph
    batch: int
    seconds: float
    measured: Measured | None = None

    @property
    def unknown_share(self) -> float:
        """The share of the step's operations that ops make that are not known."""
        return self.captured.unknown_flop / self.captured.flop if self.captured.flop else 0.0

    def facts(self) -> dict[str, str]:
        """For a person."""
        captured = self.captured
        calls = f"{len(captured.graph.nodes)} calls, {captured.flop:.4g} FLOP on one device, in {self.seconds:.3g} s"
        ops = ", ".join(f"{name} ({count})" for name, count in Counter(captured.unknown.values()).most_common())
        number = f"{len(captured.unknown)} of {len(captured.graph.nodes)} calls, {self.unknown_share:.2%} of the FLOP"
        unknown = f"{number}: {ops}; every device computes them whole" if ops else "none of the calls"
        return {"captured": calls, "not known": unknown, **({} if self.measured is None else {"costs": self.measured.fact()})}

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        captured = self.captured
        facts = {"calls": len(captured.graph.nodes), "flop": captured.flop, "seconds": self.seconds}
        measured = None if self.measured is None else self.measured.to_json()
        return {**facts, "unknown": captured.unknown, "unknown_flop_share": self.unknown_share, "measured": measured}


def model_of(
    name: str, options: ModelOptions, *, splits_images: bool = False, cost_path: str | None = None, tera_flops: float = 10.0
) -> ShardedModel:
    """A built-in model, captured. `cost_path`: a profile of its step, whose times become operations of a device of so many `tera_flops`.

    Raises OptionError for options it can't take, CaptureError, and what `measured_costs` raises.
    """
    model = find_model(name)
    code = import_module(model.module)
    batch = code.Options(**chosen_options(name, options)).batch_size
    step = make_step(name, options, optimizer_spec("sgd", 0.01))
    found = module_of(step.module, step.inputs, name=name, batch=batch, splits_images=splits_images)
    if cost_path is None:
        return found
    captured, measured = measured_costs(found.captured, found.forward, step, cost_path, tera_flops)
    return replace(found, captured=captured, measured=measured)


def module_of(
    module: nn.Module, inputs: Sequence[Tensor], *, name: str, batch: int | None = None, splits_images: bool = False
) -> ShardedModel:
    """A module that returns its loss, captured. `batch`: so many examples, by default as long as the first input is."""
    started = time.perf_counter()
    forward = forward_graph(module, inputs, name)
    captured = captured_graph(forward, batch=batch, splits_images=splits_images)
    return ShardedModel(forward, captured, batch or inputs[0].shape[0], time.perf_counter() - started)
