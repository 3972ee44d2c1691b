"""The forward pass of a module in blocks: each runs on its device's thread, with an autograd graph of its own.

What goes into a block is cut off from the graph that made it. The code between the blocks runs in the caller's thread and has a graph,
too, from what blocks handed out to what others take in. `block_backward` goes back through both. A block's result is handed to the
next block before it is there, so independent branches run at the same time; the caller waits where its own code looks at one.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baechi_ext.capture.torch_modules import forwards_replaced
from baechi_ext.capture.torch_private import nest_of, parts_of
from baechi_ext.errors import ExecutionError
from runtime.calls.blocks.pending import Pending, settled
from runtime.calls.blocks.threads import BlockThreads, inside_a_block


class Boundary(torch.autograd.Function):
    """The same tensor behind a node: unlike a leaf it may be changed in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(eq=False)
class Block:
    """A submodule and its device."""

    name: str
    module: nn.Module
    device: int
    draws: bool = False
    """It draws random numbers, so it waits for the block before it that does."""
    shape_of_results: Any = None
    """What the last call returned, tensors apart: known before the next one ends. None: not known, or more than tensors."""


@dataclass(eq=False)
class Slot:
    """A tensor that a block handed out."""

    call: "BlockCall"
    value: Tensor
    """Without a graph, on the block's device."""
    differentiable: bool
    tensor: Tensor | None = None
    """What the caller's code sees of it."""
    leaf: Tensor | None = None
    """The end of the graph of what the caller's code does with it."""

    def settle(self, tape: "Tape") -> Tensor:
        """The tensor for the caller's code, which may change it: blocks that read it are done. From now on it is the code's."""
        if self.tensor is None:
            for reader in self.call.readers:
                reader.done.wait(tape.timeout_seconds)
            value = self.value if tape.home is None else self.value.to(tape.home)
            if self.differentiable:
                self.leaf = value.detach().requires_grad_()
                tape.slots[id(self.leaf)] = self
                with torch.enable_grad():
                    value = Boundary.apply(self.leaf)
            self.tensor = value
        return self.tensor


@dataclass
class Profile:
    """What a call was seen to take."""

    forward_us: float = 0.0
    backward_us: float = 0.0
    saved_bytes: int = 0
    """Held between its forward and its backward pass."""


class BlockCall:
    """One call of a block."""

    def __init__(self, tape: "Tape", block: Block, given: Any) -> None:
        self.tape = tape
        self.block = block
        self.order = len(tape.calls)
        self.modes = _Modes()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.profile = Profile()
        self.readers: list[BlockCall] = []
        """Calls that were given a result of this one before it was there."""
        self.before: BlockCall | None = None
        self.sources: list[Slot | None] = []
        """For each input with a gradient, the slot that it is; None for a tensor that the caller's code has, which is in `roots`."""
        self.reads: list[Slot] = []
        """All slots among its arguments, with gradients or not, that the caller's code has not seen."""
        self.inner: list[Tensor] = []
        """For each input with a gradient, the leaf that stands for it."""
        self.roots: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.slots: list[Slot] = []
        self.parameters: list[Tensor] = []
        """The leaves of its graph that are no inputs of it: mostly its parameters."""
        self.shape: Any = None
        """What it returned, tensors apart; None where that is more than tensors."""
        self._returned: tuple[Any, list[Any]] = (None, [])
        leaves, self._kind = parts_of(given)
        self._given = [self._looked_at(leaf) for leaf in leaves]
        self._versions = [(leaf, leaf._version) for leaf in self._given if isinstance(leaf, Tensor)]

    def _looked_at(self, leaf: Any) -> Any:
        """An argument; of a tensor that the caller's code has, the graph as it is now, which the code may go on to change."""
        if type(leaf) is Pending:
            call, number = leaf.source
            unseen = not (call.done.is_set() and call.error is None and call.slots[number].tensor is not None)
            if call.tape is self.tape and unseen:
                call.readers.append(self)
                return leaf
            leaf = leaf.settle()
        if isinstance(leaf, Tensor) and leaf.requires_grad and self.modes.grad:
            return Boundary.apply(leaf)
        return leaf

    @property
    def rewritten(self) -> bool:
        """Whether an argument was changed in place since the call had it."""
        return any(tensor._version != version for tensor, version in self._versions)

    def wait(self) -> None:
        """Returns when the call is done; raises what it raised, and ExecutionError where it takes too long."""
        if not self.done.wait(self.tape.timeout_seconds):
            device = self.tape.threads.devices[self.block.device].name
            late = f"device {device} has not done {self.block.name!r} within {self.tape.timeout_seconds:g} s"
            raise ExecutionError(f"{late}; raise the time-out")
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """On the device's thread."""
        try:
            if self.before is not None:
                self.before.wait()
            device = self.tape.threads.devices[self.block.device]
            args, kwargs = nest_of(self._kind, [self._taken(leaf, device.torch_device) for leaf in self._given])
            start = device.mark()
            with self.modes.entered(), _counting_saved(self):
                value = self.tape.forwards[self.block.module](*args, **kwargs)
            end = device.mark()
            device.synchronize()
            self.profile.forward_us = device.elapsed_us(start, end)
            self._hand_out(value)
            if self.rewritten:
                raise ExecutionError(f"an argument of {self.block.name} was changed in place while it ran")
        except BaseException as e:  # noqa: BLE001 - raised in the caller's thread
            self.error = e
        finally:
            self.done.set()

    def _taken(self, leaf: Any, device: torch.device) -> Any:
        """An argument as the block gets it: on its device, and cut off from the graph that made it."""
        slot = None
        if type(leaf) is Pending:
            call, number = leaf.source
            call.wait()
            slot = call.slots[number]
            self.reads.append(slot)
            self._versions.append((slot.value, slot.value._version))
        elif not isinstance(leaf, Tensor):
            return leaf
        value = (leaf if slot is None else slot.value).detach().to(device)
        if not (self.modes.grad and (leaf.requires_grad if slot is None else slot.differentiable)):
            return value
        self.inner.append(value.requires_grad_())
        self.sources.append(slot)
        if slot is None:
            self.roots.append(leaf)
        with torch.enable_grad():
            return Boundary.apply(value)

    def _hand_out(self, value: Any) -> None:
        leaves, kind = parts_of(value)
        handed: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.outputs.append(leaf)
                self.slots.append(Slot(self, leaf.detach(), leaf.requires_grad))
                leaf = self.slots[-1]
            handed.append(leaf)
        inner = {id(leaf) for leaf in self.inner}
        self.parameters = [leaf for leaf in leaves_of(self.outputs) if id(leaf) not in inner]
        self._returned = kind, handed
        if all(leaf is None or isinstance(leaf, Slot) for leaf in handed):
            self.shape = kind, tuple(leaf is not None for leaf in handed)
        self.block.shape_of_results = self.shape

    def results(self) -> Any:
        """What the block returned, as the caller's code sees it; waits for it."""
        self.wait()
        kind, handed = self._returned
        return nest_of(kind, [leaf.settle(self.tape) if isinstance(leaf, Slot) else leaf for leaf in handed])

    def promised(self, shape: Any) -> Any:
        """The same before it is there, of the shape of an earlier call's results."""
        kind, tensors = shape
        count = 0
        leaves: list[Pending | None] = []
        for tensor in tensors:
            leaves.append(self._pending(count, shape) if tensor else None)
            count += tensor
        return nest_of(kind, leaves)

    def _pending(self, number: int, shape: Any) -> Pending:
        def settle() -> Tensor:
            self.wait()
            if self.shape != shape:
                raise ExecutionError(f"{self.block.name} returned another nest of tensors than before; it can't be placed on its own")
            return self.slots[number].settle(self.tape)

        return Pending(settle, (self, number))


class Tape:
    """One forward pass: the blocks' calls in their order, and what of the caller's code hangs between them."""

    def __init__(self, threads: BlockThreads, blocks: Sequence[Block], home: torch.device | None = None, *, lazy: bool = True) -> None:
        self.threads = threads
        self.blocks = tuple(blocks)
        self.home = home
        """The device of what the caller's code sees; None: it stays where it is (CPU devices share their memory)."""
        self.timeout_seconds = threads.timeout_seconds
        self.lazy = lazy
        """Hand out results before they are there."""
        self.profiles = False
        """Count what graphs hold."""
        self.calls: list[BlockCall] = []
        self.slots: dict[int, Slot] = {}
        """By id of the leaf."""
        self.inputs: list[tuple[Tensor, Tensor]] = []
        """Arguments of the pass that have gradients, and the leaves that stand for them."""
        self.forwards: Mapping[nn.Module, Callable[..., Any]] = {block.module: block.module.forward for block in blocks}
        self._last_drawing: BlockCall | None = None

    def leaves(self, roots: Iterable[Tensor]) -> list[Tensor]:
        """All that a backward pass from `roots` may have gradients for: parameters, and the leaves that stand for arguments."""
        between = leaves_of([*roots, *(root for call in self.calls for root in call.roots)])
        found = {id(leaf): leaf for leaf in (*between, *(p for call in self.calls for p in call.parameters))}
        return [leaf for key, leaf in found.items() if key not in self.slots]

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function returns, with the blocks on their devices; its tensors have the graph of the caller's code.

        Raises what the function or a block raises.
        """
        leaves, kind = parts_of((args, kwargs))
        args, kwargs = nest_of(kind, [self._cut_off(leaf) for leaf in leaves])
        try:
            with forwards_replaced({block.module: self._calling(block) for block in self.blocks}):
                value = function(*args, **kwargs)
            found, kind = parts_of(value)
            value = nest_of(kind, [settled(leaf) for leaf in found])
        finally:
            all(call.done.wait(self.timeout_seconds) for call in self.calls)  # up to the first that is late
        for call in self.calls:
            call.wait()
        return value

    def _cut_off(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        own = leaf.detach().requires_grad_()
        self.inputs.append((leaf, own))
        return Boundary.apply(own)

    def _calling(self, block: Block) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if inside_a_block():
                return self.forwards[block.module](*args, **kwargs)
            call = BlockCall(self, block, (args, kwargs))
            self.calls.append(call)
            if block.draws:
                call.before, self._last_drawing = self._last_drawing, call
            shape = block.shape_of_results
            self.threads.submit(block.device, call.order, call.run)
            return call.results() if shape is None or not self.lazy else call.promised(shape)

        return forward


class _Modes:
    """What is switched on in the caller's thread."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


def leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that the tensors' graphs end in, in a fixed order."""
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    pending: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            pending.append(tensor.grad_fn)
        elif tensor.requires_grad:
            found[id(tensor)] = tensor
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        pending.extend(following for following, _ in node.next_functions)
    return list(found.values())


@contextlib.contextmanager
def _counting_saved(call: BlockCall) -> Iterator[None]:
    """Where the tape profiles: how many bytes the block's graph holds on to, parameters apart."""
    if not call.tape.profiles:
        yield
        return
    known = {t.untyped_storage().data_ptr() for t in (*call.block.module.parameters(), *call.inner)}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            call.profile.saved_bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
