"""The parts of torch that are not its public interface, behind names of the project's own: all that it uses, but for those of
TorchDynamo, which are in torch_dynamo.py.

What stands here may change with any release of torch: tests/test_layers.py wants no private name of torch anywhere else,
and `make test-compat` runs the torch tests with another release than `make test` does.
"""

import contextlib
import copy
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from baechi_ext.errors import MissingBackendError

if TYPE_CHECKING:
    import torch
    from torch import fx
    from torch.distributed.device_mesh import DeviceMesh

DRAWS = "draws random numbers"
"""The mark of nodes that do so by a function of ours."""
TRIED_WITH = ("2.11", "2.13", "2.14", "2.15")
"""The releases that the tests were run with: 2.11 and 2.14 on Python 3.12, 2.13 on Python 3.11 and 2.15 on Python 3.14."""


def joint_graph(module: "torch.nn.Module", inputs: "Sequence[torch.Tensor]") -> "fx.GraphModule":
    """AOTAutograd's graph of forward and backward together. The module must return its outputs as tensors; those that need a gradient
    get a tangent as a further input. What is raised while the module's forward is traced passes. Raises MissingBackendError."""
    with needed("capturing a step"):
        from torch._functorch import config
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

        # As loss.backward() runs, behind a `with autocast`.
        without_autocast = config.patch(backward_pass_autocast="off")
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(without_autocast)
        stack.enter_context(_recurrent_layers_written_out())
        stack.enter_context(lstm_states_as_they_are())
        stack.enter_context(_ops_as_they_are())
        return aot_export_joint_with_descriptors(stack, module, tuple(inputs)).graph_module


@contextlib.contextmanager
def casts_kept(weights: "Iterable[torch.Tensor]", *, kept: bool) -> Iterator[None]:
    """Within, in a trace, autocast casts each of these inputs once for all that read it, as it does leaves of autograd without a trace,
    so that gradients are added up in the lower precision: a trace's inputs are no leaves, and its casts are not kept. `kept` is
    False where the script asks for that (cache_enabled=False): each reader casts anew."""
    import torch

    in_traces = torch.is_autocast_cache_enabled()
    for weight in weights:
        if weight.grad_fn is not None and not weight.grad_fn.next_functions:  # otherwise it is a copy, made as the step changes the weight
            weight.detach_().requires_grad_()
    torch.set_autocast_cache_enabled(kept)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(in_traces)


@contextlib.contextmanager
def _recurrent_layers_written_out() -> Iterator[None]:
    """A recurrent layer for a GPU is traced step by step: as one call of cuDNN it would look at its weights' memory."""
    import torch

    cudnn: Any = torch.backends.cudnn
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


def without_values(tensors: "Iterable[torch.Tensor]", device: str) -> "list[torch.Tensor]":
    """Tensors like these on that kind of device, which take no memory: good for tracing alone. Raises MissingBackendError."""
    import torch

    fakes = valueless()

    def like(tensor: "torch.Tensor") -> "torch.Tensor":
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    with fakes:
        return [like(tensor) for tensor in tensors]


def moved_to(
    module: "torch.nn.Module", inputs: "Sequence[torch.Tensor]", device: str
) -> "tuple[torch.nn.Module, Sequence[torch.Tensor]]":
    """A copy of the module, and its inputs, as they are after `.to(device)`, but without values: no memory is taken there."""
    state = [*module.parameters(), *module.buffers()]
    moved = without_values([*state, *inputs], device)
    known: dict[int, Any] = {id(old): new for old, new in zip(state, moved, strict=False)}
    return copy.deepcopy(module, known), moved[len(state) :]


@contextlib.contextmanager
def lstm_states_as_they_are() -> Iterator[None]:
    """While an LSTM is traced, its last states have the shape of the first ones; 2.11 gives them a dimension too many where it writes the
    layer out. Raises MissingBackendError."""
    with needed("capturing an LSTM"):
        from torch._decomp import decompositions

        layer: Callable[..., Any] = decompositions.one_layer_lstm

    def shaped(x: "torch.Tensor", first: "Sequence[torch.Tensor]", *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        found, last = layer(x, first, *args, **kwargs)
        return found, tuple(after if after.shape == before.shape else after.squeeze(0) for after, before in zip(last, first, strict=True))

    decompositions.one_layer_lstm = shaped  # type: ignore[assignment]  # it takes whatever the original takes
    try:
        yield
    finally:
        decompositions.one_layer_lstm = layer


_WHOLE = "multi_margin_loss multilabel_margin_loss_forward upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
_WHOLE += "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
"""Ops that torch writes out in a trace so that they compute something else: losses of labels behind the first -1, gradients of ties, and
interpolation where the size stays, or doubles, by a scale that is not 1 or 2."""


@contextlib.contextmanager
def _ops_as_they_are() -> Iterator[None]:
    """While a step is traced, ops stay whole that would compute something else then, and dropout returns its input itself where it drops
    nothing, and draws nothing where it drops all, as without a trace. Raises MissingBackendError."""
    import torch

    def dropout(value: "torch.Tensor", p: float, train: bool) -> Any:
        if not train or p == 0:
            return value
        return value * value.new_zeros(()) if p == 1 else written_out(value, p, train)

    with contextlib.ExitStack() as stack:
        with needed("capturing a step"):
            keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
            of_dropout: Any = torch.ops.aten.dropout.default
            written_out = of_dropout.py_kernels.get(keys[1])
            stack.enter_context(_kernels(of_dropout, dict.fromkeys(keys, dropout)))
            for packet in (getattr(torch.ops.aten, name) for name in _WHOLE.split()):
                for overload in packet.overloads():
                    stack.enter_context(_kernels(getattr(packet, overload), dict.fromkeys(keys)))
        yield


@contextlib.contextmanager
def _kernels(op: Any, others: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """Within, an op has others of those kernels that are written in Python and that it has; None: none."""
    before = {key: op.py_kernels.pop(key) for key in others if key in op.py_kernels}
    op.py_kernels.update({key: others[key] for key in before if others[key] is not None})
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


def descriptors() -> ModuleType:
    """The classes of `node.meta["desc"]`, which say what the graph's inputs and outputs stand for. Raises MissingBackendError."""
    with needed("capturing a step"):
        from torch._functorch._aot_autograd import descriptors
    return descriptors


@contextlib.contextmanager
def with_node_notes() -> Iterator[None]:
    """Nodes that are traced by running another graph keep what is noted on the nodes of that: the module that they come from."""
    with needed("capturing a call"):
        from torch.fx.traceback import preserve_node_meta
    with preserve_node_meta():
        yield


_LOCK = threading.Lock()
_CHECKED: list[bool] = []


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """torch.distributions checks values by branches, on which nothing that it computes depends; behind this it does so as before. Threads
    may be in here at once: the last one to leave puts back what the first one found."""
    from torch.distributions import Distribution

    with _LOCK:
        _CHECKED.append(Distribution._validate_args)
        Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        with _LOCK:
            checked = _CHECKED[0]
            _CHECKED.pop()
            if not _CHECKED:
                Distribution.set_default_validate_args(checked)


def casts_all(graph: "fx.GraphModule") -> bool:
    """True if no region of a traced function switches autocast off."""
    import torch

    return all(node.args[2] for node in graph.graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast))


def arguments_by_name(node: "fx.Node") -> dict[str, Any]:
    """A call's arguments by their names in the op's schema, defaults included; none where it has no schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return defaults | dict(zip(defaults, node.args, strict=False)) | node.kwargs


def draws(node: "fx.Node") -> bool:
    """True if the node draws random numbers."""
    import torch

    if node.meta.get(DRAWS):
        return True
    # Attention and dropout that drop nothing draw nothing.
    rate = "p" if node.target is torch.ops.aten.native_dropout.default else "dropout_p"
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and arguments_by_name(node).get(rate) != 0


def is_foreign(target: Any) -> bool:
    """True for ops of another library than torch's and ours, and for those that take functions, as torch.cond: nobody says whether they
    draw random numbers."""
    namespace = getattr(target, "namespace", None) or str(getattr(target, "_qualified_op_name", "")).partition("::")[0]
    return namespace not in ("", "aten", "prim", "prims", "baechi")


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and what puts them together again with `tree_unflatten`."""
    import torch
    from torch.utils import _pytree

    return _pytree.tree_flatten(value, is_leaf=lambda x: isinstance(x, torch.Size))  # which is put together as a plain tuple


def tree_unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """See `tree_flatten`."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


@contextlib.contextmanager
def as_if_recording() -> Iterator[None]:
    """Ops compute what their backward ops need, as where gradients are recorded, and none are."""
    import torch

    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def backward_again() -> bool:
    """True in a backward pass that was told to keep the graph for another one (retain_graph)."""
    import torch

    return torch._C._autograd._get_current_graph_task_keep_graph()


def inside_backward() -> bool:
    """True if the calling thread is in a backward pass, as where what was not kept is computed once more."""
    return backward_pass() != -1


def backward_pass() -> int:
    """A number of the backward pass that the calling thread is in; -1: in none."""
    import torch

    return torch._C._current_graph_task_id()


def are_batched(tensors: "Iterable[torch.Tensor | None]") -> bool:
    """True if any of the tensors stands for several at once: in a backward pass under torch.func.vmap or with is_grads_batched=True."""
    import torch

    functorch = torch._C._functorch
    return any(functorch.is_legacy_batchedtensor(t) or functorch.is_batchedtensor(t) for t in tensors if t is not None)


@contextlib.contextmanager
def outside_vmap() -> Iterator[None]:
    """Ops on plain tensors run as outside of torch.func.vmap, random ones too. Raises MissingBackendError."""
    with needed("running a call once more"):
        import torch
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    mode: Any = torch._C._parse_dispatch_key("VmapMode")
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(mode)):
        yield


def reaches(node: Any) -> bool:
    """True in a backward pass that comes to `node`, which is behind the ops that it went through: false of one that is only to make some
    gradients (torch.autograd.grad), and needs no others for that."""
    import torch

    return torch._C._will_engine_execute_node(node)  # as register_multi_grad_hook asks


def is_traced() -> bool:
    """True if the caller records or changes ops rather than runs them."""
    import torch

    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # documented, but not in __all__
    return torch.compiler.is_compiling() or tracing or torch._C._len_torch_dispatch_stack() > 0


def no_view(tensor: "torch.Tensor") -> "torch.Tensor":
    """The same memory as a tensor that autograd does not take for a view."""
    import torch

    return tensor if tensor._base is None else torch.ops.aten._unsafe_view.default(tensor, tensor.shape)


def dense_parts(tensor: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    """The tensors whose memory it looks at: indices and values of a sparse one, otherwise itself."""
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def copy_together(to: "list[torch.Tensor]", source: "list[torch.Tensor]") -> None:
    """Copies dense tensors of one device, in a few kernels for all of them."""
    import torch

    torch._foreach_copy_(to, source)


def memory_profile() -> "torch.profiler.profile":
    """A profile of the host that records memory, to be entered. Told to keep all events, 2.11 does not warn that it might not."""
    import torch

    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def profiler_events(profiler: "torch.profiler.profile") -> list[Any]:
    """The events that a finished profile recorded, those of memory included; each has name(), start_ns(), duration_ns() and nbytes()."""
    with needed("profiling memory"):
        recorded: Any = profiler.profiler
        events: list[Any] = recorded.kineto_results.events()
    return events


def hold_stream(stream: "torch.cuda.Stream", cycles: int) -> None:
    """A kernel on the stream that does nothing for so many cycles of its device's clock."""
    import torch

    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def abort_process_group() -> None:
    """Ends all communicators of this process at once, without their peers. Raises MissingBackendError."""
    with needed("leaving a group of workers"):
        from torch.distributed.distributed_c10d import _abort_process_group
    _abort_process_group()


def take_groups_from_meshes() -> None:
    """Takes their process groups from all device meshes, which the caches of DTensor keep as long as the process lives."""
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is not None:
        gc.collect()
        for mesh in gc.get_objects():
            if type(mesh) is module.DeviceMesh:
                mesh._pg_registry.clear()


@contextlib.contextmanager
def dispatched(handle: Callable[[Any, Any, Any, dict[str, Any]], Any]) -> Iterator[None]:
    """Every op that is called inside goes through `handle(op, types, args, kwargs)`, which returns its value. Raises MissingBackendError.
    """
    with needed("looking at a step's ops"):
        from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handle(func, types, args, kwargs or {})

    with Mode():  # type: ignore[no-untyped-call]  # the constructor is torch's
        yield


@contextlib.contextmanager
def collectives(seen: Callable[[str, int, int], None]) -> Iterator[None]:
    """Calls `seen(name, bytes, processes)` for each collective that is started inside, DTensor's too: the bytes of the larger of what goes
    in and comes out of one process, and how many take part. Raises MissingBackendError."""
    with needed("counting bytes"):
        import torch
        from torch.distributed.tensor import DTensor

    def counted(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what DTensor does for it comes here again
        result = func(*args, **kwargs)
        kind = _collective(func)
        if kind is not None:
            tensors = [[t for t in tree_flatten(v)[0] if isinstance(t, torch.Tensor)] for v in (args[:1], args[1:2], result)]
            seen(kind, max(sum(t.nbytes for t in group) for group in tensors), _processes(args))
        return result

    with dispatched(counted):
        yield


def collective_of(node: "fx.Node") -> tuple[str, int] | None:
    """(kind, processes that take part) of a traced call that starts a collective, as `collectives` says it; None of another call."""
    kind = _collective(node.target)
    return None if kind is None else (kind, _processes(node.args))


def _collective(op: Any) -> str | None:
    namespace, _, name = str(getattr(op, "_schema", op)).partition("(")[0].partition("::")
    if namespace not in ("_c10d_functional", "c10d", "_dtensor") or name.startswith(("wait_tensor", "barrier")):
        return None
    return name.partition(".")[0].strip("_")


def _processes(arguments: Sequence[Any]) -> int:
    """The number of processes in the group among a collective's arguments; 1 where there is none."""
    import torch
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    for argument in reversed(arguments):
        if isinstance(argument, str):
            return _resolve_process_group(argument).size()  # type: ignore[arg-type]  # a GroupName, which 2.11 has not, is a str
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return ProcessGroup.unbox(argument).size()
    return 1


def free_workspaces() -> None:
    """Gives back what torch keeps for cuBLAS on each stream: a graph has to be captured with its own, since others free what they share.
    Raises MissingBackendError."""
    with needed("capturing a CUDA graph"):
        from torch._C import _cuda_clearCublasWorkspaces
    _cuda_clearCublasWorkspaces()


def give_up_capture(device: int, pool: "tuple[int, int]") -> None:
    """Has the allocator of a CUDA device end a capture that CUDA has refused: earlier torch than 2.14 does not by itself, and keeps what is
    freed amid a capture until the last one is over. Raises MissingBackendError."""
    with needed("giving up a CUDA graph"):
        from torch._C import _cuda_endAllocateToPool
    with contextlib.suppress(RuntimeError):  # it has ended
        _cuda_endAllocateToPool(device, pool)


def valueless() -> Any:
    """A context in which tensors are made without values. Raises MissingBackendError."""
    with needed("tracing how parts of tensors move"):
        from torch._subclasses.fake_tensor import FakeTensorMode
    return FakeTensorMode()


def traced(function: "Callable[[torch.Tensor], torch.Tensor]", value: "torch.Tensor") -> "fx.GraphModule":
    """The ops that a function runs on a tensor like `value`, DTensor's and autograd's included. Raises MissingBackendError."""
    with needed("tracing how parts of tensors move"):
        from torch.fx.experimental.proxy_tensor import make_fx
    return make_fx(lambda given: function(given))(value)  # a method has an argument too many for it


def flatten_mesh(mesh: "DeviceMesh", dims: Sequence[int]) -> "DeviceMesh":
    """The mesh of several dimensions as one, which DTensor then also uses itself. Raises MissingBackendError."""
    names = mesh.mesh_dim_names or ()
    with needed("splitting a step"):
        return mesh[tuple(names[d] for d in dims)]._flatten()


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
    """Raises MissingBackendError, which names the releases that were tried, where this torch has not what is used inside."""
    try:
        yield
    except (ImportError, AttributeError) as e:
        raise MissingBackendError(f"{what} needs torch, a release like {' or '.join(TRIED_WITH)}{_found()} ({e}); {_ADVICE}") from e


_ADVICE = f"install it with: pip install 'torch=={TRIED_WITH[-1]}.*'"


def _found() -> str:
    try:
        import torch
    except ImportError:
        return ""
    return f", not {torch.__version__}"
