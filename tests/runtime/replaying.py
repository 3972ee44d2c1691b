"""Stand-ins for CUDA devices on the host: devices whose copies are late, and a recorder of steps, which notes calls of torch with the
tensors they work on, and does them again in place."""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from baechi_runtime.torch.lowering.devices import CudaDevice, TorchDevice

Call = tuple[Callable[..., Any], tuple, dict[str, Any], list[torch.Tensor]]


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


class _Notes(TorchFunctionMode):
    """As a CUDA stream that captures, it computes nothing: new tensors hold nothing of use, and none is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, function: Callable[..., Any], types: Iterable[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__") or not tensors_in(args):
            return function(*args, **kwargs)
        if name.split(".")[0].endswith("_") and (name.startswith("_foreach_") or not name.startswith("_")):
            self.calls.append((function, args, kwargs, []))
            return args[0]
        result = function(*args, **kwargs)
        read = {t.untyped_storage().data_ptr() for t in tensors_in(args)}
        made = [t for t in tensors_in(result) if t.untyped_storage().data_ptr() not in read]
        for tensor in made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        if made:
            self.calls.append((function, args, kwargs, tensors_in(result)))
        return result


class HostRecorder:
    """See baechi_runtime.torch.streams.step_graph.CudaRecorder."""

    graphs = 0

    def __init__(self, *_: object) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        state = torch.get_rng_state()
        with _Notes() as notes:
            work()
        torch.set_rng_state(state)
        HostRecorder.graphs += 1

        def replay() -> None:
            with torch.no_grad():
                for function, args, kwargs, made in notes.calls:
                    result = function(*args, **kwargs)
                    for old, new in zip(made, tensors_in(result) if made else [], strict=True):
                        old.copy_(new)

        return replay


class LateCopy:
    """A copy that is done only when somebody waits for it: what it copies has to be there then."""

    def __init__(self, value: torch.Tensor, into: torch.Tensor) -> None:
        self._value, self._into = weakref.ref(value), into

    def finish(self) -> None:
        if self._into is not None:
            value = self._value()
            assert value is not None, "a tensor was let go of before its copy was done"
            self._into.copy_(value)
        self._into = None  # type: ignore[assignment]


class HostStream:
    """Computes at once, and waits for copies."""

    def wait_event(self, event: LateCopy | None) -> None:
        if event is not None:
            event.finish()

    def record_event(self) -> None:
        return None

    def synchronize(self) -> None:
        pass


class HostDevice(CudaDevice):
    """The host in the place of a CUDA device."""

    clock_name = "thread_cpu"

    def __init__(self, index: int) -> None:
        TorchDevice.__init__(self, f"twin:{index}", torch.device("cpu"))
        self.compute = self.copy = self.outgoing = HostStream()  # type: ignore[assignment]

    def enter(self) -> None:
        TorchDevice.enter(self)

    def begin(self) -> None:
        pass

    def take_turn(self, _: object = None) -> None:
        pass

    def take_in(self, value: torch.Tensor, source: CudaDevice) -> tuple[torch.Tensor, Any]:
        here = torch.zeros_like(value)
        return here, LateCopy(value, here)

    def mark(self) -> Any:
        return time.perf_counter_ns()

    def elapsed_us(self, start: Any, end: Any) -> float:
        return (end - start) / 1000

    def hold(self, us: float) -> None:
        pass

    def peak_bytes(self) -> None:
        return None


def host_devices(count: int) -> list[CudaDevice]:
    return [HostDevice(i) for i in range(count)]
