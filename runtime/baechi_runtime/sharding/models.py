"""The models that `baechi pase` captures: built-in ones, with measured costs where there is a profile, and those of training scripts.

A profile (`baechi train --costgen`) is of the joint graph of forward and backward pass, in other ops than a forward graph has; what both
know is which module an op is of. So the time of a module's ops, both passes together, is shared out over the module's calls by their
operations, and split over devices it is taken to shrink as these do. Updates of parameters are no part of it. Calls of modules without a
measured op keep what is counted for them, and time of ops that are no module's is nobody's; the report says how much.

A script runs to the first training call of a module that is large enough. Its own use of the module's outputs is not captured: their mean
stands for the loss, unless the module returns one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from baechi_ext.capture.module_names import known_model
from baechi_ext.capture.torch_joint import INPUT, UPDATE, CaptureOptions, capture_joint
from baechi_ext.capture.torch_private import tree_flatten, tree_unflatten
from baechi_ext.cost import Profile
from baechi_ext.errors import CaptureError
from baechi_ext.shard.graph import Node
from baechi_ext.shard.terms import Compute
from baechi_runtime.host.as_main import EndedError, run_as_main
from baechi_runtime.models.registry import make_step
from baechi_runtime.models.training_step import TrainingStep, optimizer_spec
from baechi_runtime.report.progress import progress
from baechi_runtime.sharding.captured import CapturedGraph, Measured, captured_module
from baechi_runtime.sharding.pase import PaseRequest
from baechi_runtime.torch.calls.module_calls import LARGE_ENOUGH, Call, never_trained, outermost_calls, trained_size


def captured_model(request: PaseRequest) -> CapturedGraph | None:
    """The model that is to be sharded: a script's, or a built-in one; None for a graph made by hand.

    Raises OptionError for options that the model can't take, CaptureError, and what `with_measured_costs` raises.
    """
    if request.script is not None:
        return _script_model(request.script, request)
    if request.model_options is None:
        return None
    with progress(f"capturing the training step of {request.graph}"):
        step = make_step(request.graph, request.model_options, optimizer_spec("sgd", 0.01))
        found = captured_module(step.module, step.inputs, name=step.name, batch_dim=step.batch_dim, splits_images=request.splits_images)
        if request.cost_path is None:
            return found
        return with_measured_costs(found, step, request.cost_path, request.machine.tera_flops)


def with_measured_costs(captured: CapturedGraph, step: TrainingStep, path: str, tera_flops: float) -> CapturedGraph:
    """The graph with costs of the profile in that file, as operations of a device that makes so many (10^12) a second.

    Raises FileError, ProfileError, and MismatchError where the profile is of another step.
    """
    options = CaptureOptions(step.optimizer.name, step.optimizer.slots)
    graph, _ = capture_joint(step.module, step.inputs, options, step.name)
    times = Profile.load(path, graph).compute_us()
    of_module: dict[str, float] = defaultdict(float)
    all_us = 0.0
    for op in graph.ops:
        if op.op == INPUT or op.phase == UPDATE:
            continue
        all_us += times[op.id]
        if op.module is not None:
            of_module[op.module] += times[op.id]
    prefix = known_model(step.module)[1]
    modules = {call.name: _module_of(call, prefix) for call in captured.forward.nodes}
    counted: dict[str | None, float] = defaultdict(float)
    for node in captured.graph.nodes:
        counted[modules[node.name]] += node.flop()
    scales = {m: us * tera_flops * 1e6 / counted[m] for m, us in of_module.items() if counted[m]}
    nodes = tuple(_scaled(node, scales, modules[node.name]) for node in captured.graph.nodes)
    known = Measured(sum(of_module[m] for m in scales), all_us, sum(modules[n.name] in scales and n.flop() > 0 for n in nodes))
    return replace(captured, graph=replace(captured.graph, nodes=nodes), measured=known)


def _module_of(call: fx.Node, prefix: str) -> str | None:
    """The innermost module that a call is of, by its name in the model; None for the code around it."""
    stack = list((call.meta.get("nn_module_stack") or {}).values())
    name = stack[-1][0] if stack else ""
    if not name.startswith(prefix):
        return "" if f"{name}." == prefix else None
    return name.removeprefix(prefix)


def _scaled(node: Node, scales: Mapping[str, float], module: str | None) -> Node:
    if module is None or module not in scales:
        return node
    terms = (replace(t, flop=t.flop * scales[module]) if isinstance(t, Compute) else t for t in node.terms)
    return replace(node, terms=tuple(terms))


def _script_model(path: str, request: PaseRequest) -> CapturedGraph:
    """The module of the script's first training call, captured. The script goes no further than that call.

    Raises CaptureError where it ends before, or the module can't be captured.
    """
    script = Path(path)
    try:
        with outermost_calls(_stopping):
            code = run_as_main(script, request.script_arguments)
    except _FoundError as found:
        leaves, spec = tree_flatten(found.arguments)
        inputs = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        called = _Called(found.module, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        return captured_module(called, inputs, name=script.stem, splits_images=request.splits_images)
    raise never_trained(path, code)


def _stopping(module: nn.Module, ordinary: Call) -> Call:
    """Return the function to run for a module's call: the first training call of one that is large enough ends the script."""
    if trained_size(module) < LARGE_ENOUGH:
        return ordinary

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _FoundError(getattr(module, "_orig_mod", module), (args, kwargs))

    return stop


class _FoundError(EndedError):
    """The script's module, where it is called."""

    def __init__(self, module: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.module = module
        self.arguments = arguments


_TENSOR = object()
"""Stands for a tensor among the arguments of a call."""


class _Called(nn.Module):
    """A module with the arguments of a call, but for tensors, and a loss."""

    baechi_model = "model"

    def __init__(self, model: nn.Module, leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.model = model
        self._leaves, self._spec = leaves, spec

    def forward(self, *tensors: Tensor) -> Tensor:
        given = iter(tensors)
        args, kwargs = tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in self._leaves], self._spec)
        found = tree_flatten(self.model(*args, **kwargs))[0]
        trained = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not trained:
            raise CaptureError("what the module returns holds no tensor with a gradient; return tensors, tuples, lists or dicts")
        means = [t.mean() for t in trained]
        return next((t for t in trained if not t.dim()), means[0] if len(means) == 1 else torch.stack(means).sum())
