"""The Run of what a user has: a module with inputs, the name of a built-in model, or a graph."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import MissingBackendError, OptionError
from baechi_ext.ir import Cluster, Device, OpGraph
from baechi_ext.ir.cluster import DEFAULT_LINK
from baechi_ext.ir.numbers import device_count
from baechi_ext.options import PlanOptions
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.host.frameworks import TENSORFLOW, framework_of
from baechi_runtime.library.run import Run, changed
from baechi_runtime.library.steps import Step, of_graph, of_model, of_module
from baechi_runtime.models.registry import ModelOptions, find_model

if TYPE_CHECKING:
    from baechi_ext.place.common import PlanResult
    from baechi_runtime.torch.calls.parallelize import ParallelizeOptions

Devices = int | Sequence[str] | Cluster
_OF_ALL = ("method", "device_memory", "pins", "seed", "time_limit")
_OF_GRAPHS, _OF_MODULES, _OF_MODELS = (*_OF_ALL, "link"), (*_OF_ALL, "cache"), (*_OF_ALL, "optimizer")
_SIZES = tuple(field.name for field in fields(ModelOptions) if field.name != "num_devices")


def plan(target: Any, inputs: Any, devices: Devices, options: PlanOptions) -> Run:
    """See `baechi_ext.plan`."""
    if not isinstance(devices, (Cluster, list, tuple)):
        devices = device_count(devices)
    if isinstance(target, OpGraph):
        return _of_graph(target, inputs, devices, _known(options, _OF_GRAPHS, "a graph"))
    if isinstance(target, str):
        find_model(target)
    elif framework_of(target) == TENSORFLOW:
        raise OptionError(
            "plan() takes modules of PyTorch; baechi_ext.parallelize places a TensorFlow step, and baechi train plans a script's"
        )
    try:
        import torch
    except ImportError as e:
        raise MissingBackendError(f"planning a module or a model needs torch 2.11 or newer ({e}); install baechi-ext[torch]") from e
    given: PlanOptions
    if isinstance(target, str):
        given = _known(options, _OF_MODELS, "a built-in model")
        step, result = _of_model(target, inputs, devices, given)
        return _run(step, result, given)
    if not isinstance(target, torch.nn.Module):
        raise OptionError(f"plan() takes an nn.Module, the name of a built-in model or an OpGraph, not a {type(target).__name__}")
    if inputs is None:
        raise OptionError(
            f"plan({type(target).__name__}) needs the inputs of a training call: a tuple of arguments, or a dict of keyword arguments"
        )
    given = _known(options, _OF_MODULES, "a module")
    step, result = of_module(target, inputs, _parallelize_options(devices, given))
    return _run(step, result, given)


def _known(options: PlanOptions, names: Sequence[str], what: str) -> PlanOptions:
    if unknown := [name for name in options if name not in names]:
        raise OptionError(f"unknown option {unknown[0]!r} of plan() for {what}; it takes devices, {', '.join(names)}")
    return options


def _request(options: PlanOptions) -> PlanRequest:
    pins, seed, limit = options.get("pins", ()), options.get("seed", 0), options.get("time_limit")
    return PlanRequest.of(options.get("method", "auto"), pins=pins, seed=seed, time_limit=limit)


def _of_graph(graph: OpGraph, inputs: Any, devices: Devices, options: PlanOptions) -> Run:
    if inputs is not None:
        raise OptionError("a graph has no inputs; leave them out")
    step, request = of_graph(graph), _request(options)
    cluster = _cluster(devices, options)
    return Run(step, request, step.plan(request, cluster))


def _cluster(devices: Devices, options: PlanOptions) -> Cluster:
    """The devices of a graph. Raises OptionError, or ClusterError."""
    if isinstance(devices, int):
        devices = Cluster.uniform(devices, link=DEFAULT_LINK)
    elif not isinstance(devices, Cluster):
        devices = Cluster(tuple(map(Device, devices)), DEFAULT_LINK)
    return changed(devices, options.get("link"), options.get("device_memory"))


def _parallelize_options(devices: Devices, options: PlanOptions) -> "ParallelizeOptions":
    """The options of `parallelize` that say the same."""
    from baechi_runtime.torch.calls.parallelize import ParallelizeOptions

    chosen: dict[str, Any] = {name: value for name, value in options.items() if name != "optimizer"}
    if isinstance(devices, Cluster):
        chosen["cluster"], devices = devices, len(devices)
    return ParallelizeOptions(devices=devices, **chosen)


def _of_model(name: str, sizes: Any, devices: Devices, options: PlanOptions) -> "tuple[Step, PlanResult]":
    if not isinstance(sizes or {}, Mapping) or (unknown := [size for size in sizes or {} if size not in _SIZES]):
        wrong = repr(unknown[0]) if isinstance(sizes, Mapping) else f"a {type(sizes).__name__}"
        raise OptionError(
            f"the inputs of a built-in model are its sizes, such as {{'batch_size': 8}}, not {wrong}; known are {', '.join(_SIZES)}"
        )
    request = _parallelize_options(devices, options).request()
    model_options = ModelOptions(**dict(sizes or {}), num_devices=request.num_devices)
    return of_model(replace(request, model=name, model_options=model_options, optimizer=options.get("optimizer", "sgd"), cache=None))


def _run(step: Step, result: "PlanResult", options: PlanOptions) -> Run:
    request = _request(options)
    return Run(step, request if "time_limit" in options else request.worthwhile(), result)
