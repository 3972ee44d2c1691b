"""Placing a module in the caller's own training loop: `baechi_ext.parallelize`."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from baechi_ext.errors import OptionError
from baechi_ext.ir import Cluster
from baechi_ext.ir.device_map import DeviceMap
from baechi_ext.ir.pins import Pin
from baechi_ext.ir.plan import Plan
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import METHODS
from runtime.calls.call_report import CallReport
from runtime.calls.placed_calls import PlacedCalls, Settings
from runtime.calls.workers import join_workers, several_workers
from runtime.pipeline import MAPPED, PlanRequest
from runtime.thread_executor import ThreadExecutor
from runtime.torch_devices import CudaDevice, TorchDevice, cpu_devices, cuda_devices
from runtime.train_request import TrainRequest

_CALLS = "_placed_calls"
"""Where a module of a decorated class keeps its PlacedCalls."""
_EXECUTORS: dict[tuple[str, ...], ThreadExecutor] = {}
CUDA_IN_ONE_PROCESS = "a module of your own runs on all CUDA devices of a machine from one process; start it without torchrun"


@dataclass(frozen=True)
class ParallelizeOptions:
    """The options of `parallelize`."""

    devices: int | Sequence[str | torch.device] = 2
    """So many CPU workers, each a thread on a core of its own; or names of devices: ["cuda:0", "cuda:1"]. Where torchrun started several
    processes: so many, each of them a CPU worker."""
    method: str = "auto"
    """How to place; `baechi place --help` lists all methods."""
    verify_steps: int = 2
    """So many calls of each shape are run as they are, too, and everything is compared; a difference is a ParityError."""
    fallback: bool = False
    """Where a call can't be captured or placed, or differs: go on with the module as it is, and say so on stderr."""
    device_memory: int | None = None
    """Bytes of every device; by default an equal part of what the process may use, or all of a CUDA device's."""
    time_limit: float | None = None
    """Seconds that a search or solver may take."""
    seed: int = 0
    cluster: Cluster | None = None
    """The devices as the placer is to see them, instead of what is found and probed."""
    pins: Sequence[str] = ()
    """What stays where: "encoder.*=0", as for --pin."""
    device_map: Mapping[str, int | str] | None = None
    """Devices by module, as accelerate has them: method "expert" does what it says, "auto" and "refine" start from it."""
    timeout_seconds: float = 300.0
    """How long a device may take to answer."""

    def request(self) -> TrainRequest:
        """The same as a run's request. Raises OptionError for an unknown method, what is no pin, and a device map for another method."""
        if self.method not in METHODS:
            raise OptionError(f"unknown method {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.device_map is not None and self.method not in MAPPED:
            raise OptionError(f"device_map is only for the methods {', '.join(MAPPED)}; drop it or choose one of them")
        device_map = None if self.device_map is None else DeviceMap("device_map", dict(self.device_map))
        devices = self._devices()
        options = PlaceOptions(seed=self.seed, time_limit_seconds=self.time_limit or METHODS[self.method].time_limit_seconds)
        return TrainRequest(
            model="",
            plan=PlanRequest(method=self.method, options=options, pins=tuple(map(Pin.parse, self.pins)), device_map=device_map),
            num_devices=len(devices),
            cuda=devices[0].torch_device.type == "cuda",
            cluster=self.cluster,
            device_memory=self.device_memory,
            timeout_seconds=self.timeout_seconds,
        )

    def settings(self) -> Settings:
        """Raises what `executor_of` and `join_workers` raise."""
        request = self.request()
        if not several_workers():
            return Settings(request, executor_of(self._devices(), self.timeout_seconds), self.verify_steps, self.fallback)
        if request.cuda:
            raise OptionError(CUDA_IN_ONE_PROCESS)
        workers = join_workers(request.num_devices, self.timeout_seconds)
        return Settings(replace(request, workers="process"), workers, self.verify_steps, self.fallback)

    def _devices(self) -> list[TorchDevice]:
        if isinstance(self.devices, int):
            if self.devices < 1:
                raise OptionError(f"devices={self.devices} is no number of devices; give 1 or more")
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


class PlacedModule(nn.Module):
    """A module whose training calls run placed. Parameters, buffers, children and their names are the module's own; whatever else it is
    asked for, it asks the module for."""

    _OWN = frozenset({"_placed", "_examples"})

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """isinstance(placed, Net) holds for a placed Net."""
        placed = self.__dict__.get("_placed")
        return PlacedModule if placed is None else type(placed.given)

    def __init__(self, module: nn.Module, settings: Settings, examples: tuple[tuple, dict] | None) -> None:
        super().__init__()
        for kind in ("_parameters", "_buffers", "_modules"):
            self.__dict__[kind] = module.__dict__[kind]
        self.__dict__["_placed"] = PlacedCalls(module, module.__call__, settings)
        self.__dict__["_examples"] = examples
        self.__dict__.pop("training", None)

    @property
    def plan(self) -> Plan | None:
        """The plan of the first call; made now, where example inputs were given. None where there is none yet, or none can be had."""
        return _plan(self._placed, self._examples)

    def report(self) -> CallReport:
        """What was placed, and what it takes: predicted, and measured so far."""
        _prepare(self._placed, self._examples)
        return CallReport.of(self._placed)

    def unplace(self) -> nn.Module:
        """The ordinary module, with all that was trained; this one runs unplaced from now on."""
        self._placed.drop()
        return self._placed.given

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._placed(*args, **kwargs)

    def train(self, mode: bool = True) -> "PlacedModule":
        self._placed.given.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._placed.given.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self._placed.given.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:
            raise AttributeError(name)
        return getattr(self._placed.given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._placed.given, name, value) if "_placed" in self.__dict__ else super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._placed.given, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy, as of averaged weights, is an ordinary module."""
        import copy

        return copy.deepcopy(self._placed.given, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the ordinary module."""
        return self._placed.given.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"placed {self._placed.given!r}"


def parallelize(model: Any, example_inputs: Any, options: Mapping[str, Any]) -> Any:
    """See `baechi_ext.parallelize`."""
    known = [f.name for f in fields(ParallelizeOptions)]
    if unknown := [name for name in options if name not in known]:
        raise OptionError(f"unknown option {unknown[0]!r} of parallelize; it takes {', '.join(known)}")
    chosen = ParallelizeOptions(**options)
    if isinstance(model, nn.Module):
        if type(model) is PlacedModule:
            raise OptionError("the module is placed already; call its unplace() first")
        return PlacedModule(model, chosen.settings(), _examples(example_inputs))
    chosen.request()
    if model is None:
        return lambda target: _decorated(target, example_inputs, chosen)
    return _decorated(model, example_inputs, chosen)


def _examples(given: Any) -> tuple[tuple, dict] | None:
    """(args, kwargs) of what was given: a dict of keyword arguments, a tuple or list of arguments, or the only one."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given), {}) if isinstance(given, (tuple, list)) else ((given,), {})


def _decorated(target: Any, example_inputs: Any, options: ParallelizeOptions) -> Any:
    if inspect.isclass(target) and issubclass(target, nn.Module):
        return _placed_class(target, example_inputs, options)
    if callable(target):

        @functools.wraps(target)
        def make(*args: Any, **kwargs: Any) -> PlacedModule:
            return PlacedModule(target(*args, **kwargs), options.settings(), _examples(example_inputs))

        return make
    raise OptionError(f"parallelize takes an nn.Module, a class of modules or a function that makes one, not a {type(target).__name__}")


def _placed_class(target: type[nn.Module], example_inputs: Any, options: ParallelizeOptions) -> type[nn.Module]:
    """The class itself: its modules place their own calls, and have plan, report and unplace, where the class has none of these."""
    ordinary, examples = target.__call__, _examples(example_inputs)

    def placed_of(module: nn.Module) -> PlacedCalls:
        if vars(module).get(_CALLS) is None:
            vars(module)[_CALLS] = PlacedCalls(module, functools.partial(ordinary, module), options.settings())
        return vars(module)[_CALLS]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return placed_of(self)(*args, **kwargs)

    def unplace(self: nn.Module) -> nn.Module:
        placed_of(self).drop()
        return self

    def report(self: nn.Module) -> CallReport:
        _prepare(placed_of(self), examples)
        return CallReport.of(placed_of(self))

    def plan(self: nn.Module) -> Plan | None:
        return _plan(placed_of(self), examples)

    target.__call__ = call  # type: ignore[method-assign]
    for name, member in (("plan", property(plan)), ("report", report), ("unplace", unplace)):
        if not hasattr(target, name):
            setattr(target, name, member)
    return target


def _prepare(calls: PlacedCalls, examples: tuple[tuple, dict] | None) -> None:
    if examples is not None and not calls.calls and not calls.refusal:
        calls.prepare(*examples)


def _plan(calls: PlacedCalls, examples: tuple[tuple, dict] | None) -> Plan | None:
    _prepare(calls, examples)
    return calls.calls[0].placement.result.plan if calls.calls else None
