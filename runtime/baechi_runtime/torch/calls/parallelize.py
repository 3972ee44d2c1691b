"""Placing a module in the caller's own training loop: `baechi_ext.parallelize`; or planning its call before it runs, and placing it by a
plan that is there already: `baechi_ext.plan`."""

import atexit
import functools
import inspect
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from baechi_ext.cost import attach_costs
from baechi_ext.errors import CaptureError, MismatchError, MissingBackendError, OptionError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.ir.hints import DeviceMap
from baechi_ext.ir.numbers import bytes_of, device_count
from baechi_runtime.drivers.call_options import chosen, require_sound
from baechi_runtime.drivers.costing import host_of
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest, refuse
from baechi_runtime.host.cache_folder import cache_folder
from baechi_runtime.host.generators import python_generators_kept
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.torch.calls.call_report import report_of
from baechi_runtime.torch.calls.fragments import Settings
from baechi_runtime.torch.calls.module_call import ModuleCall, call_of, compiled_by_others, place_in, take_out
from baechi_runtime.torch.calls.workers import join_workers, several_workers
from baechi_runtime.torch.lowering.devices import CudaDevice, TorchDevice, cpu_devices, cuda_found
from baechi_runtime.torch.streams.executor import executor_of as streams_or_threads
from baechi_runtime.torch.streams.step_graph import CudaRecorder
from baechi_runtime.torch.threads.executor import ThreadExecutor

M = TypeVar("M", bound=nn.Module)
_one_at_a_time = threading.Lock()
"""Profiling has the cores to itself, and a thread that traces is the only one."""
_EXECUTORS: dict[tuple[str, ...], ThreadExecutor] = {}
_LAST_SECONDS = 1.5
"""Time for each device to finish what Ctrl-C left it with: Python ends a thread in the midst of an op of torch by abort()."""
CUDA_IN_ONE_PROCESS = "a module of your own runs on all CUDA devices of a machine from one process; start it without torchrun"


@dataclass(frozen=True)
class ParallelizeOptions:
    """The options of `parallelize`, with their defaults; baechi_ext.options says what each is."""

    devices: int | Sequence[str | torch.device] = 2
    method: str = "auto"
    verify_steps: int = 2
    strict: bool = False
    keep_placed: bool = False
    device_memory: int | str | None = None
    microbatches: int | Sequence[int] | str = 1
    batch_norm: str = "whole"
    time_limit: float | None = None
    seed: int = 0
    cluster: Cluster | None = None
    pins: Sequence[str] = ()
    device_map: Mapping[str, int | str | torch.device] | None = None
    timeout_seconds: float = 300.0
    cache: bool = True
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        """Raises OptionError for what would fail in a training call."""
        require_sound(self.verify_steps, self.cluster)

    def request(self) -> TrainRequest:
        """The options as a run's request. Raises OptionError for an unknown method, a malformed pin, a device map for another method, an
        unknown way of BatchNorm, or CUDA graphs of CPU workers; MissingBackendError for a CUDA device that is not there."""
        if self.batch_norm not in ("whole", "per_part"):
            raise OptionError(f"batch_norm={self.batch_norm!r} is neither 'whole' nor 'per_part'")
        device_map = None if self.device_map is None else DeviceMap("device_map", _named(self.device_map))
        plan = PlanRequest.of(self.method, pins=self.pins, device_map=device_map, seed=self.seed, time_limit=self.time_limit)
        devices = self._devices()
        cuda = devices[0].torch_device.type == "cuda"
        refuse(self.cuda_graphs and not cuda, "cuda_graphs=True needs CUDA devices, such as devices=['cuda:0']; drop it, or name some")
        return TrainRequest(
            model="",
            plan=plan if self.time_limit is not None else plan.worthwhile(),
            num_devices=len(devices),
            cuda=cuda,
            cuda_graphs=self.cuda_graphs,
            cluster=self.cluster,
            device_memory=None if self.device_memory is None else bytes_of(self.device_memory, "device_memory"),
            microbatches=self._parts(),
            batch_norm_per_part=self.batch_norm == "per_part",
            timeout_seconds=self.timeout_seconds,
            cache=cache_folder() if self.cache else None,
        )

    def settings(self) -> Settings:
        """The settings of a session. Raises OptionError, and what `executor_of` and `join_workers` raise."""
        request = self.request()
        if not several_workers():
            executor = executor_of(self._devices(), self.timeout_seconds, graphs=request.as_graphs)
            return Settings(request, executor, self.verify_steps, self.strict, self.keep_placed)
        if request.cuda:
            raise OptionError(CUDA_IN_ONE_PROCESS)
        workers = join_workers(request.num_devices, self.timeout_seconds)
        return Settings(replace(request, workers="process"), workers, self.verify_steps, self.strict, self.keep_placed)

    def _parts(self) -> int | tuple[int, ...] | None:
        given = self.microbatches
        if given == "auto":
            return None
        sizes: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) else (given,)
        if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
            raise OptionError(f"microbatches={given!r} is neither a number of parts nor their sizes, nor 'auto'; give 1 or more")
        parts: int | tuple[int, ...] = sizes[0] if len(sizes) == 1 else sizes
        return parts

    def _devices(self) -> list[TorchDevice]:
        if not isinstance(self.devices, (list, tuple)):
            return cpu_devices(device_count(self.devices))
        try:
            named = [torch.device(d) for d in self.devices]
        except (RuntimeError, TypeError) as e:
            raise OptionError(f"devices={list(self.devices)} are no devices of PyTorch; name them as 'cuda:0', or give their number") from e
        kinds = {d.type for d in named}
        if kinds == {"cpu"}:
            return cpu_devices(len(named))
        if kinds != {"cuda"}:
            raise OptionError(f"devices={[str(d) for d in named]} are not all CUDA devices or all CPU workers; name devices of one kind")
        here = cuda_found()
        if missing := [str(d) for d in named if (d.index or 0) >= here]:
            raise MissingBackendError(f"{missing[0]} is not on this machine, which has {here} CUDA device{'s' * (here != 1)}")
        return [CudaDevice(d.index or 0) for d in named]


def _named(device_map: Mapping[str, int | str | torch.device]) -> dict[str, int | str]:
    """A device map as its file has it."""
    return {name: str(device) if isinstance(device, torch.device) else device for name, device in device_map.items()}


def executor_of(devices: Sequence[TorchDevice], timeout_seconds: float, *, graphs: bool = False) -> ThreadExecutor:
    """The process's executor for these devices, which makes CUDA graphs where `graphs`; all placed modules share their threads."""
    key = (*(d.name for d in devices), str(timeout_seconds), str(graphs))
    if key not in _EXECUTORS:
        threads = torch.get_num_threads()
        _EXECUTORS[key] = streams_or_threads(devices, timeout_seconds, CudaRecorder if graphs else None)
        atexit.register(_EXECUTORS[key].close, _LAST_SECONDS)
        for index in range(len(devices)):
            _EXECUTORS[key].call(index, lambda: None)
        torch.set_num_threads(threads)  # which the devices' threads set for themselves, and for all threads to come
    return _EXECUTORS[key]


def parallelize(model: Any, example_inputs: Any, options: Mapping[str, Any]) -> Any:
    """See `baechi_ext.parallelize`."""
    found = options_of(options)
    if isinstance(model, nn.Module):
        return placed(model, example_inputs, found)
    found.request()
    if model is None:
        return lambda target: _decorated(target, example_inputs, found)
    return _decorated(model, example_inputs, found)


def options_of(given: Mapping[str, Any]) -> ParallelizeOptions:
    """The options as given. Raises OptionError for an unknown one."""
    return chosen(ParallelizeOptions, given, "parallelize")


def report(module: nn.Module) -> CallReport:
    """See `baechi_ext.report`."""
    return report_of(_known(module).session)


def unplace(module: nn.Module) -> nn.Module:
    """See `baechi_ext.unplace`."""
    if not isinstance(module, nn.Module):
        raise OptionError(f"unplace takes an nn.Module, not a {type(module).__name__}")
    take_out(module)
    return module


def _known(module: nn.Module) -> ModuleCall:
    found = call_of(module) if isinstance(module, nn.Module) else None
    if found is None:
        raise OptionError(f"{type(module).__name__} is not placed; call baechi_ext.parallelize(model) first")
    return found


def placed(module: nn.Module, example_inputs: Any, options: ParallelizeOptions, plan: Placement | None = None) -> nn.Module:
    """The module, whose calls run placed from now on; by `plan`, if that is of their ops. Raises OptionError where it is placed already."""
    if call_of(module) is not None:
        raise OptionError("the module is placed already; call baechi_ext.unplace(model) first")
    calls = place_in(module, replace(options.settings(), planned=plan))
    if example_inputs is not None:
        try:
            calls.prepare(*arguments_of(example_inputs))
        except CaptureError:
            if options.strict:
                raise
    return module


def arguments_of(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of what was given: a dict of keyword arguments, a tuple or list of arguments, or the only one."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given), {}) if isinstance(given, (tuple, list)) else ((given,), {})


def _decorated(target: Any, example_inputs: Any, options: ParallelizeOptions) -> Any:
    if inspect.isclass(target) and issubclass(target, nn.Module):
        return _placed_class(target, options)
    if callable(target):

        @functools.wraps(target)
        def make(*args: Any, **kwargs: Any) -> nn.Module:
            return placed(target(*args, **kwargs), example_inputs, options)

        return make
    raise OptionError(f"parallelize takes an nn.Module, a class of modules or a function that makes one, not a {type(target).__name__}")


def _placed_class(target: type[nn.Module], options: ParallelizeOptions) -> type[nn.Module]:
    """The class itself, whose modules place their own calls."""
    ordinary = target.__call__
    known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self not in known:
            known.add(self)
            if options.strict or not compiled_by_others(self):  # the class that it comes from may have been given, too
                place_in(self, options.settings())
        return ordinary(self, *args, **kwargs)

    target.__call__ = call  # type: ignore[method-assign]
    return target


def plan_call(module: nn.Module, example_inputs: Any, options: ParallelizeOptions) -> tuple[OpGraph, Placement]:
    """The graph of the module's call with these inputs, with the costs of devices side by side, and its plan. Forward runs twice for that;
    buffers and random generators are put back, and the module is left as it was.

    Raises CaptureError where the call can't be placed, OptionError for a module that is placed, and what placing raises.
    """
    if call_of(module) is not None:
        raise OptionError("the module is placed already; call baechi_ext.unplace(model) first")
    with _one_at_a_time, python_generators_kept():
        calls = place_in(module, replace(options.settings(), verify_steps=0, strict=True, keep_placed=True))
        try:
            calls.prepare(*arguments_of(example_inputs))
            first, *others = calls.session.groups
        finally:
            take_out(module)
    pieces = f"graph breaks leave {len(others) + 1} pieces that nothing ties together, and this is the plan of the first" if others else ""
    placement = functools.reduce(Placement.noting, filter(None, (first.note, pieces)), first.placement)
    if placement.profile is None:
        raise CaptureError(f"{type(module).__name__} is planned in one process; start it without torchrun")
    several = len(placement.result.plan.cluster) > 1
    return attach_costs(placement.graph, placement.profile, contended=several, host=host_of(options.request())), placement


def apply_plan(module: M, example_inputs: Any, options: ParallelizeOptions, plan: Placement) -> M:
    """The module, whose calls run by the plan from now on, as `parallelize` has them run.

    Raises MismatchError where its call with these inputs has other ops than the plan, and what `parallelize` raises.
    """
    placed(module, example_inputs, options, plan)
    call = call_of(module)
    groups = [] if call is None else call.session.groups
    if groups and groups[0].placement is not plan:
        take_out(module)
        raise MismatchError(
            f"the call of {type(module).__name__} has other ops than the plan, which is of an earlier state of it; plan it again"
        )
    return module
