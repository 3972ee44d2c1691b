"""A recorder that works on the host: calls of torch are noted with the tensors they work on, and done again in place."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
        if name.split(".")[0].endswith("_") and not name.startswith("_"):
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
    """See baechi_runtime.torch.lowering.cuda_graphs.CudaRecorder."""

    graphs = 0

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
