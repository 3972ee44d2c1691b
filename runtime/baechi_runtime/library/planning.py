"""The Run of what a user has: a module or a TensorFlow step with inputs, the name of a built-in model, or a graph."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import ValidationError, convert, defstruct
from msgspec.structs import asdict

from baechi_ext.capture.tensorflow_private import tensorflow
from baechi_ext.cost.hardware import HARDWARE, Hardware
from baechi_ext.errors import MissingBackendError, OptionError
from baechi_ext.ir import Cluster, Device, OpGraph
from baechi_ext.ir.checked import Count, Index, Share
from baechi_ext.ir.cluster import DEFAULT_LINK
from baechi_ext.ir.numbers import device_count
from baechi_ext.options import PlanOptions
from baechi_runtime.drivers.call_options import require_known
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.frameworks import TENSORFLOW, framework_of
from baechi_runtime.library.run import Run, changed, on_hardware
from baechi_runtime.library.steps import of_function, of_graph, of_model, of_module
from baechi_runtime.models.registry import ModelOptions, find_model

if TYPE_CHECKING:
    from baechi_runtime.tensorflow.calls.parallelize import ParallelizeOptions as TensorFlowOptions
    from baechi_runtime.torch.calls.parallelize import ParallelizeOptions

_Devices = int | Sequence[str] | Cluster
_DEVICES = "2"
"""So many of published hardware where no number is given."""
_GRAPH, _MODULE, _FUNCTION, _MODEL = "a graph", "a module", "a TensorFlow step", "a built-in model"
_OF_ALL = ("method", "device_memory", "pins", "seed", "time_limit")
_OPTIONS = {_GRAPH: (*_OF_ALL, "link"), _MODULE: (*_OF_ALL, "cache"), _FUNCTION: (*_OF_ALL, "workers"), _MODEL: (*_OF_ALL, "optimizer")}
_RANGES: dict[Any, Any] = {int: Index, int | None: Count | None, float | None: Share | None}
_CheckedOptions = defstruct("ModelOptions", [(of.name, _RANGES.get(of.type, of.type), of.default) for of in fields(ModelOptions)])
"""The options of models, with the ranges that the command line's flags have."""
_SIZES = tuple(field.name for field in fields(ModelOptions) if field.name != "num_devices")


def plan(target: Any, inputs: Any, devices: _Devices, options: PlanOptions) -> Run:
    """See `baechi_ext.plan`."""
    kind = _kind(target, inputs)
    require_known(options, ("devices", *_OPTIONS[kind]), f"plan() for {kind}")
    request = _request(options)
    hardware = None
    if isinstance(devices, str):
        devices, hardware = _named(devices)
    elif not isinstance(devices, (Cluster, list, tuple)):
        devices = device_count(devices)
    if hardware is not None:
        return on_hardware(_graph_of(kind, target, inputs, devices, options), request, hardware, _cluster(devices, options))
    if kind == _GRAPH:
        step = of_graph(target)
        return Run(step, request, step.plan(request, _cluster(devices, options)))
    if kind == _MODULE:
        step, result = of_module(target, inputs, _parallelize_options(devices, options))
    elif kind == _FUNCTION:
        step, result = of_function(target, inputs, _tensorflow_options(devices, options))
    else:
        step, result = of_model(_model_request(target, inputs, devices, options))
    return Run(step, request if "time_limit" in options else request.worthwhile(), result)


def _kind(target: Any, inputs: Any) -> str:
    """The kind of what is to be planned. Raises OptionError for what can't be, or for inputs that are none of it, MissingBackendError
    without PyTorch where that is needed."""
    if isinstance(target, OpGraph):
        if inputs is not None:
            raise OptionError("a graph has no inputs; leave them out")
        return _GRAPH
    if isinstance(target, str):
        find_model(target)
    elif framework_of(target) == TENSORFLOW:
        tensorflow()
        return _FUNCTION
    try:
        import torch
    except ImportError as e:
        raise MissingBackendError(f"planning a module or a model needs torch 2.11 or newer ({e}); install baechi-ext[torch]") from e
    if isinstance(target, str):
        return _MODEL
    if not isinstance(target, torch.nn.Module):
        known = "an nn.Module, a TensorFlow step, the name of a built-in model or an OpGraph"
        raise OptionError(f"plan() takes {known}, not a {type(target).__name__}")
    if inputs is None:
        raise OptionError(
            f"plan({type(target).__name__}) needs the inputs of a training call: a tuple of arguments, or a dict of keyword arguments"
        )
    return _MODULE


def _named(devices: str) -> tuple[Cluster, Hardware | None]:
    """The cluster in that file; or one of published hardware, and that: "h100", "8xh100". Raises OptionError for neither, and what reading
    a file raises."""
    count, x, name = devices.partition("x")
    if not (x and count.isdecimal()):
        count, name = _DEVICES, devices
    if name in HARDWARE:
        return HARDWARE[name].cluster(device_count(int(count))), HARDWARE[name]
    if not Path(devices).is_file():
        known = ", ".join(HARDWARE)
        raise OptionError(
            f"devices={devices!r} is no cluster file and no published hardware ({known}; eight of them: '8xh100'); CUDA devices are "
            "named in a list, as ['cuda:0', 'cuda:1']"
        )
    return Cluster.load(devices), None


def _graph_of(kind: str, target: Any, inputs: Any, devices: _Devices, options: PlanOptions) -> OpGraph:
    """The graph of what is planned for devices that are not here, with the counts that its costs there are made of. A built-in model is
    captured without values, so that it need not fit into memory. Raises what capturing raises."""
    if kind == _GRAPH:
        graph: OpGraph = target
        return graph
    if kind == _FUNCTION:
        raise OptionError("a TensorFlow step has no counts to cost it by; give devices as a number or a Cluster")
    if kind == _MODULE:
        single = _parallelize_options(1, {"method": "single", "cache": options.get("cache", True)})
        return of_module(target, inputs, single)[0].graph
    from baechi_runtime.torch.plan_only import valueless_graph

    return valueless_graph(_model_request(target, inputs, devices, options))


def _request(options: PlanOptions) -> PlanRequest:
    pins, seed, limit = options.get("pins", ()), options.get("seed", 0), options.get("time_limit")
    return PlanRequest.of(options.get("method", "auto"), pins=pins, seed=seed, time_limit=limit)


def _cluster(devices: _Devices, options: PlanOptions) -> Cluster:
    """The devices of a graph. Raises OptionError, or ClusterError."""
    if isinstance(devices, int):
        devices = Cluster.uniform(devices, link=DEFAULT_LINK)
    elif not isinstance(devices, Cluster):
        devices = Cluster(tuple(map(Device, devices)), DEFAULT_LINK)
    return changed(devices, options.get("link"), options.get("device_memory"))


def _parallelize_options(devices: _Devices, options: PlanOptions) -> "ParallelizeOptions":
    """The options of `parallelize` that say the same."""
    from baechi_runtime.torch.calls.parallelize import ParallelizeOptions

    chosen: dict[str, Any] = {name: value for name, value in options.items() if name != "optimizer"}
    if isinstance(devices, Cluster):
        chosen["cluster"], devices = devices, len(devices)
    return ParallelizeOptions(devices=devices, **chosen)


def _tensorflow_options(devices: _Devices, options: PlanOptions) -> "TensorFlowOptions":
    from baechi_runtime.tensorflow.calls.parallelize import ParallelizeOptions

    chosen: dict[str, Any] = dict(options)
    if not isinstance(devices, (int, Cluster)):
        raise OptionError(f"a TensorFlow step is planned for so many servers of this machine, or for a Cluster, not for {devices!r}")
    if isinstance(devices, Cluster):
        chosen["cluster"], devices = devices, len(devices)
    return ParallelizeOptions(devices=devices, **chosen)


def _model_request(name: str, sizes: Any, devices: _Devices, options: PlanOptions) -> TrainRequest:
    if not isinstance(sizes or {}, Mapping) or (unknown := [size for size in sizes or {} if size not in _SIZES]):
        wrong = repr(unknown[0]) if isinstance(sizes, Mapping) else f"a {type(sizes).__name__}"
        raise OptionError(
            f"the inputs of a built-in model are its sizes, such as {{'batch_size': 8}}, not {wrong}; known are {', '.join(_SIZES)}"
        )
    request = _parallelize_options(devices, options).request()
    try:
        model_options = ModelOptions(**asdict(convert({**(sizes or {}), "num_devices": request.num_devices}, _CheckedOptions)))
    except ValidationError as e:
        raise OptionError(f"the sizes of {name}: {e}") from e
    return replace(request, model=name, model_options=model_options, optimizer=options.get("optimizer", "sgd"), cache=None)
