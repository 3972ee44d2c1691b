"""Kernels for the pretended CUDA devices: each op of ATen computes on the CPU, in its stream's turn, in the device's memory.

An op allocates its outputs from torch's own allocator when it is called, as on a GPU, and knows its operands by address only: what the host
frees, or uses again, before the op's turn comes is wrong then as it would be on a GPU. `install()` takes the place of torch's kernels; one
that is launched all the same is an error that names it.
"""

import ctypes
import itertools
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._meta_registrations
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

KEPT = {
    "empty.memory_format", "empty_strided", "resize_", "record_stream", "is_pinned", "_pin_memory", "is_set_to", "_local_scalar_dense",
    "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
}  # fmt: skip
"""Ops that compute nothing: torch's own."""
ADDED = ["convolution", "convolution_backward"]
"""Ops without a kernel of their own for CUDA, which choose one of cuDNN's."""

runtime = ctypes.CDLL("libcudart.so.13")
runtime.cuda_stub_launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
waiting: dict[int, tuple[Callable[[], None], bool]] = {}
"""Number -> a kernel that was launched, and whether it is part of a graph, which may run it again."""
numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a device, as a kernel knows it."""

    address: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor) -> "Operand":
        return cls(value.data_ptr(), value.dtype, value.size(), value.stride())

    def tensor(self) -> torch.Tensor:
        if 0 in self.size:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        count = extent(self.size, self.stride)
        memory = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype, count=count).as_strided(self.size, self.stride)


def extent(size: torch.Size, stride: tuple[int, ...]) -> int:
    """The number of elements from the first to the last one of a tensor."""
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def run(number: int) -> int:
    """A kernel's turn has come."""
    work, again = waiting[number]
    if not again:
        del waiting[number]
    try:
        with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
            work()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:  # whoever waits for the device has it
        print(f"cuda stub: a kernel failed: {type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0


def launch(device: int, work: Callable[[], None]) -> None:
    number = next(numbers)
    stream = torch.cuda.current_stream(device).cuda_stream
    waiting[number] = work, torch.cuda.is_current_stream_capturing()
    error = runtime.cuda_stub_launch(stream, device, ctypes.cast(run, ctypes.c_void_p), number)
    if error:
        raise RuntimeError(f"CUDA error: {error} from the stub")


def is_cuda(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def on_meta(value: Any) -> Any:
    if is_cuda(value):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def as_operand(value: Any) -> Any:
    if is_cuda(value):
        return Operand.of(value)
    if isinstance(value, torch.Tensor):
        return value.clone()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def on_host(value: Any) -> Any:
    return value.tensor() if isinstance(value, Operand) else value


def device_of(op: Any, arguments: Any) -> int:
    devices = {value.device.index for value in tree_leaves(arguments) if is_cuda(value)}
    if len(devices) > 1:
        raise RuntimeError(f"{op}: expected all tensors to be on the same device, but found cuda:{sorted(devices)}")
    named = [value.index for value in tree_leaves(arguments) if isinstance(value, torch.device)]
    found = [*devices, *named, None][0]
    return torch.cuda.current_device() if found is None else found


Draws = list[tuple[torch.Generator, deque[int]]]
capturing = threading.local()
"""Where a thread captures: `draws`, the ops of its graph that take random numbers."""


def taken(generator: torch.Generator) -> int:
    """A seed from the state of a device's generator, which goes on."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)
    return int((seed * 1000003 + offset) % 2**63)


def draws(op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """True if this call takes random numbers; attention does so only where it drops something, which `attention` refuses."""
    given = {a.name: a.default_value for a in op._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return torch.Tag.nondeterministic_seeded in op.tags and given.get("dropout_p") != 0


def drawing(op: Any, device: int, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Prepares the random numbers of an op: others for each call, the same for the same state of the device's generator. An op of a graph
    takes its numbers whenever the graph is replayed."""
    if not draws(op, args, kwargs):
        return lambda: None
    generator = kwargs.pop("generator", None) or torch.cuda.default_generators[device]
    seeds: deque[int] = deque()
    if torch.cuda.is_current_stream_capturing():
        capturing.draws.append((generator, seeds))
    else:
        seeds.append(taken(generator))
    return lambda: torch.default_generator.manual_seed(seeds.popleft())


class Graph(torch.cuda.CUDAGraph):
    """torch's graph, which draws for its ops when it is replayed."""

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self.draws: Draws = []
        capturing.draws = self.draws
        super().capture_begin(*args, **kwargs)

    def replay(self) -> None:
        for generator, seeds in self.draws:
            seeds.append(taken(generator))
        super().replay()


def computed(op: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an op, that `compute` computes on tensors of the host."""
    returns_arguments = all(r.alias_info is not None for r in op._schema.returns)
    returns = [str(r.type) for r in op._schema.returns]
    shaped = torch._decomp.meta_table.get(op, op)
    on_the_spot = any("Tensor" not in kind for kind in returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = device_of(op, (args, kwargs))
        draw = drawing(op, device, args, kwargs)
        given = tree_map(as_operand, (args, kwargs))

        def on_cpu() -> Any:
            draw()
            there_args, there_kwargs = tree_map(on_host, given)
            return compute(*there_args, **there_kwargs)

        if on_the_spot:
            torch.cuda.current_stream(device).synchronize()
            return on_cpu()
        if returns_arguments:
            fit(op, args, kwargs)
            given = tree_map(as_operand, (args, kwargs))
            launch(device, lambda: (on_cpu(), None)[1])
            return written(op, args, kwargs)
        meta_args, meta_kwargs = tree_map(on_meta, (args, kwargs))
        try:
            like = shaped(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):  # the size of the outputs depends on the operands' values, or nobody wrote this down
            torch.cuda.current_stream(device).synchronize()
            values = tree_leaves(on_cpu())
            made = tree_map(lambda value: allocated(value, device), tuple(values))
            for output, value in zip(made, values, strict=True):
                if value is not None:
                    output.copy_(value)
            return made[0] if len(returns) == 1 else made
        made = tree_map(lambda value: allocated(value, device), like)
        outputs = [Operand.of(value) for value in tree_leaves(made)]

        def work() -> None:
            for output, value in zip(outputs, tree_leaves(on_cpu()), strict=True):
                if value is not None and value.numel():
                    output.tensor().copy_(value)

        launch(device, work)
        return made

    return kernel


def allocated(value: Any, device: int) -> torch.Tensor:
    if value is None:  # what nobody asked for: no tensor in C++, which Python cannot return
        return torch.empty(0, device=torch.device("cuda", device))
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=torch.device("cuda", device))


def fit(op: Any, args: Any, kwargs: Any) -> None:
    """Gives the outputs of an op (out=...) that are empty the size that they should have."""
    outputs = {a.name: kwargs[a.name] for a in op._schema.arguments if a.is_out}
    if any(is_cuda(value) and not value.numel() for value in outputs.values()):
        meta_args, meta_kwargs = tree_map(on_meta, (args, kwargs))
        op(*meta_args, **meta_kwargs)
        for name, value in outputs.items():
            value.resize_(meta_kwargs[name].size())


def written(op: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an op writes to, which it returns."""
    if not op._schema.returns:
        return None
    found = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs[argument.name])
    return found[0] if len(op._schema.returns) == 1 else tuple(found[: len(op._schema.returns)])


def calls() -> dict[str, int]:
    """The number of calls so far of each function of the runtime that counts them."""
    found: dict[str, int] = {}

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
    def tell(name: bytes, count: int) -> None:
        found[name.decode()] = count

    runtime.cuda_stub_counts(tell)
    return found


def order(seed: int | None) -> None:
    """From now on tasks are done in an order by chance, once somebody waits; None: at once. See device.c."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)
    runtime.cuda_stub_order(ctypes.c_long(-1 if seed is None else seed))


HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def copy(keys: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copies between tensors: torch's own way wherever it copies memory, also between devices; else the way of a kernel."""
    op = torch.ops.aten.copy_.default
    plain = to.dtype == source.dtype and to.size() == source.size() and to.stride() == source.stride()
    plain = plain and (to.numel() == 0 or to.numel() == extent(to.size(), to.stride()))
    if plain or to.device.type != source.device.type:
        op.redispatch(HOST, to, source, non_blocking)
    elif to.device == source.device:
        here, there = Operand.of(to), Operand.of(source)
        launch(to.device.index, lambda: (here.tensor().copy_(there.tensor()), None)[1])
    else:  # a kernel of the source's device, on its stream; here as a dense copy, and one of memory
        dense = torch.empty_like(to, device=source.device)
        dense.copy_(source)
        if dense.stride() == to.stride():
            to.copy_(dense, non_blocking)
        else:
            to.copy_(torch.empty_like(dense, device=to.device).copy_(dense, non_blocking))
    return to


def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, epsilon: float) -> Any:
    found = torch.ops.aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, epsilon)
    return *found, torch.empty(0, dtype=torch.uint8)


def batch_norm_backward(
    x: Any, grad: Any, weight: Any, mean: Any, var: Any, saved_mean: Any, saved_var: Any, epsilon: float, reserve: Any
) -> Any:
    known = (weight, mean, var, saved_mean, saved_var)
    return torch.ops.aten.native_batch_norm_backward(grad, x, *known, True, epsilon, [True, True, True])


def attention(q: Any, k: Any, v: Any, bias: Any, log_sums: bool, dropout: float = 0.0, causal: bool = False, *, scale: Any = None) -> Any:
    if dropout:
        raise NotImplementedError("attention with dropout")
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, torch.zeros(()), torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def attention_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, log_sums: Any, seed: Any, offset: Any, dropout: float, mask: Any,
    causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    if dropout or mask[3]:
        raise NotImplementedError("attention with dropout, or a bias that has a gradient")
    aten = torch.ops.aten
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    known = (grad.contiguous(), q, k, v, out, sums, 0.0, causal)
    return *aten._scaled_dot_product_flash_attention_for_cpu_backward(*known, attn_mask=bias, scale=scale), None


OWN: dict[str, Callable[..., Any]] = {
    "cudnn_batch_norm": batch_norm,
    "cudnn_batch_norm_backward": batch_norm_backward,
    "_scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_efficient_attention_backward": attention_backward,
}
"""Ops that the CPU does not have."""


library = torch.library.Library("aten", "IMPL")


def untraced(code: CodeType) -> None:
    """TorchDynamo is not to look at what this code, and that of functions inside, does: of torch's own kernels it sees nothing."""
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            untraced(inner)


def install() -> None:
    """Takes the place of torch's kernels for CUDA, in this process."""
    runtime.cuda_stub_compute(1)
    for function in (*vars(Operand).values(), *vars(Graph).values(), *globals().values()):
        if isinstance(function, FunctionType) and function.__module__ == __name__:
            untraced(function.__code__)
    torch.cuda.CUDAGraph = Graph
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for full in torch._C._dispatch_get_all_op_names():
            name = full.removeprefix("aten::")
            if name == full or name in KEPT:
                continue
            if name not in ADDED and not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA"):
                continue
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            returned = op._schema.returns
            if any(r.alias_info is not None and not r.alias_info.is_write for r in returned):
                continue  # a view
            library.impl(name, computed(op, OWN.get(name, op)), "CUDA", allow_override=True)
        library.impl("copy_", copy, "CUDA", with_keyset=True, allow_override=True)
        library.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "CUDA", allow_override=True)
