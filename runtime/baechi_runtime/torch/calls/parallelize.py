"""Placing a module in the caller's own training loop: `baechi_ext.parallelize`."""

import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from baechi_ext.errors import CaptureError, OptionError
from baechi_ext.ir import Cluster
from baechi_ext.ir.hints import DeviceMap, Pin
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import METHODS
from baechi_runtime.drivers.pipeline import MAPPED, PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.cache_folder import cache_folder
from baechi_runtime.report.call_report import CallReport
from baechi_runtime.torch.calls.call_report import report_of
from baechi_runtime.torch.calls.fragments import Settings
from baechi_runtime.torch.calls.module_call import ModuleCall, call_of, place_in, take_out
from baechi_runtime.torch.calls.workers import join_workers, several_workers
from baechi_runtime.torch.lowering.devices import CudaDevice, TorchDevice, cpu_devices, cuda_devices
from baechi_runtime.torch.threads.executor import ThreadExecutor

_EXECUTORS: dict[tuple[str, ...], ThreadExecutor] = {}
CUDA_IN_ONE_PROCESS = "a module of your own runs on all CUDA devices of a machine from one process; start it without torchrun"


@dataclass(frozen=True)
class ParallelizeOptions:
    """The options of `parallelize`."""

    devices: int | Sequence[str | torch.device] = 2
    """Number of CPU workers, each a thread on a core of its own; or names of devices: ["cuda:0", "cuda:1"]. If torchrun started several
    processes: their number, as each of them is a CPU worker."""
    method: str = "auto"
    """The placement method; `baechi place --help` lists all."""
    verify_steps: int = 2
    """Number of calls of each fragment that are also run as they are, with everything compared; later ones are too, more and more seldom,
    within 1% of the time. 0: none."""
    strict: bool = False
    """Raise an error for what can't be placed, or differs; otherwise the module goes on as it is, and says so on stderr once."""
    keep_placed: bool = False
    """Stay placed without asking whether that is faster; otherwise placed and plain steps take turns, and the slower is dropped."""
    device_memory: int | None = None
    """Bytes of every device; by default an equal part of what the process may use, or all of a CUDA device's."""
    microbatches: int | Sequence[int] | str = 1
    """The parts that a call's batch is split into, each with ops of its own that are placed: how many, or their sizes; "auto": one for each
    device, where that is predicted to be faster. Where it is not proven to compute the same, the batch stays whole."""
    batch_norm: str = "whole"
    """"per_part": BatchNorm may normalise over each part of the batch by itself, as DistributedDataParallel does it."""
    time_limit: float | None = None
    """Seconds that a search or solver may take."""
    seed: int = 0
    cluster: Cluster | None = None
    """The devices as the placer is to see them, instead of what is found and probed."""
    pins: Sequence[str] = ()
    """Ops pinned to devices: "encoder.*=0", as for --pin."""
    device_map: Mapping[str, int | str] | None = None
    """Devices by module, as accelerate has them: method "expert" does what it says, "auto" and "refine" start from it."""
    timeout_seconds: float = 300.0
    """Time that a device may take to answer."""
    cache: bool = True
    """Keep plans, costs and the outcome of turns for later runs in $BAECHI_CACHE, else `baechi` in $XDG_CACHE_HOME or ~/.cache."""

    def request(self) -> TrainRequest:
        """The options as a run's request. Raises OptionError for an unknown method, a malformed pin, a device map for another method, or
        an unknown way of BatchNorm."""
        if self.batch_norm not in ("whole", "per_part"):
            raise OptionError(f"batch_norm={self.batch_norm!r} is neither 'whole' nor 'per_part'")
        if self.method not in METHODS:
            raise OptionError(f"unknown method {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.device_map is not None and self.method not in MAPPED:
            raise OptionError(f"device_map is only for the methods {', '.join(MAPPED)}; drop it or choose one of them")
        device_map = None if self.device_map is None else DeviceMap("device_map", dict(self.device_map))
        devices = self._devices()
        options = PlaceOptions(seed=self.seed, time_limit_seconds=self.time_limit or METHODS[self.method].time_limit_seconds)
        plan = PlanRequest(method=self.method, options=options, pins=tuple(map(Pin.parse, self.pins)), device_map=device_map)
        return TrainRequest(
            model="",
            plan=plan if self.time_limit is not None else plan.worthwhile(),
            num_devices=len(devices),
            cuda=devices[0].torch_device.type == "cuda",
            cluster=self.cluster,
            device_memory=self.device_memory,
            microbatches=self._parts(),
            batch_norm_per_part=self.batch_norm == "per_part",
            timeout_seconds=self.timeout_seconds,
            cache=cache_folder() if self.cache else None,
        )

    def settings(self) -> Settings:
        """The settings of a session. Raises OptionError, and what `executor_of` and `join_workers` raise."""
        request = self.request()
        if not several_workers():
            executor = executor_of(self._devices(), self.timeout_seconds)
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
        if isinstance(self.devices, int):
            if self.devices < 1:
                raise OptionError(f"devices={self.devices} is not a number of devices; give 1 or more")
            return cpu_devices(self.devices)
        named = [torch.device(d) for d in self.devices]
        kinds = {d.type for d in named}
        if kinds == {"cpu"}:
            return cpu_devices(len(named))
        if kinds != {"cuda"}:
            raise OptionError(f"devices={[str(d) for d in named]} are not all CUDA devices or all CPU workers; name devices of one kind")
        cuda_devices(1 + max(d.index or 0 for d in named))  # raises where there are fewer
        return [CudaDevice(d.index or 0) for d in named]


def executor_of(devices: Sequence[TorchDevice], timeout_seconds: float) -> ThreadExecutor:
    """The process's executor for these devices; all placed modules share their threads."""
    key = (*(d.name for d in devices), str(timeout_seconds))
    if key not in _EXECUTORS:
        threads = torch.get_num_threads()
        _EXECUTORS[key] = ThreadExecutor(devices, timeout_seconds)
        for index in range(len(devices)):
            _EXECUTORS[key].call(index, lambda: None)
        torch.set_num_threads(threads)  # which the devices' threads set for themselves, and for all threads to come
    return _EXECUTORS[key]


def parallelize(model: Any, example_inputs: Any, options: Mapping[str, Any]) -> Any:
    """See `baechi_ext.parallelize`."""
    chosen = options_of(options)
    if isinstance(model, nn.Module):
        return _placed(model, example_inputs, chosen)
    chosen.request()
    if model is None:
        return lambda target: _decorated(target, example_inputs, chosen)
    return _decorated(model, example_inputs, chosen)


def options_of(given: Mapping[str, Any]) -> ParallelizeOptions:
    """The options as given. Raises OptionError for an unknown one."""
    known = [f.name for f in fields(ParallelizeOptions)]
    if unknown := [name for name in given if name not in known]:
        raise OptionError(f"unknown option {unknown[0]!r} of parallelize; it takes {', '.join(known)}")
    return ParallelizeOptions(**given)


def report(module: nn.Module) -> CallReport:
    """See `baechi_ext.report`."""
    return report_of(_known(module).session)


def unplace(module: nn.Module) -> nn.Module:
    """See `baechi_ext.unplace`."""
    take_out(module)
    return module


def _known(module: nn.Module) -> ModuleCall:
    found = call_of(module)
    if found is None:
        raise OptionError(f"{type(module).__name__} is not placed; call baechi_ext.parallelize(model) first")
    return found


def _placed(module: nn.Module, example_inputs: Any, options: ParallelizeOptions) -> nn.Module:
    if call_of(module) is not None:
        raise OptionError("the module is placed already; call baechi_ext.unplace(model) first")
    calls = place_in(module, options.settings())
    if example_inputs is not None:
        args, kwargs = _examples(example_inputs)
        try:
            calls.prepare(args, kwargs)
        except CaptureError:
            if options.strict:
                raise
    return module


def _examples(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
            return _placed(target(*args, **kwargs), example_inputs, options)

        return make
    raise OptionError(f"parallelize takes an nn.Module, a class of modules or a function that makes one, not a {type(target).__name__}")


def _placed_class(target: type[nn.Module], options: ParallelizeOptions) -> type[nn.Module]:
    """The class itself, whose modules place their own calls."""
    ordinary = target.__call__
    known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self not in known:
            known.add(self)
            place_in(self, options.settings())
        return ordinary(self, *args, **kwargs)

    target.__call__ = call  # type: ignore[method-assign]
    return target
