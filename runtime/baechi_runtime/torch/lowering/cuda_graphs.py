"""CUDA graphs of a placed step: each device's runs of ops between transfers, replayed with one launch each (see
baechi_runtime.torch.lowering.graph_pieces).

The first steps run op by op: the first makes what ops make once (workspaces, optimizer states), the second is observed, and after
it every device captures its graphs, one device after the other. Capturing computes nothing, so no step is special: all of them are steps
of the training. Graphs of one device share a pool of memory, in which a tensor's place is used again as soon as the program frees it, as
torch's allocator would; what crosses a graph's border keeps its place for good.

See https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs for what a graph may hold.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from baechi_runtime.torch.lowering.graph_pieces import Access, Piece, Unit, pieces
from baechi_runtime.torch.lowering.ops import Action, LoweredProgram, Segment, Slots

WARM_UP_STEPS = 2


class CudaRecorder:
    """Captures what is given to the current stream, which must not be the default one; see torch.cuda.graph."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures what `work` gives to the device, and returns a function that does it again on the same tensors. `work` is called, but
        nothing is computed. Raises RuntimeError where that cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, for other devices.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # which says only that it failed
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Outline:
    """A tensor's type, device, shape and place in its storage."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    storage_bytes: int

    @classmethod
    def of(cls, value: torch.Tensor) -> "_Outline":
        storage = value.untyped_storage()
        return cls(value.dtype, value.device, value.size(), value.stride(), int(value.storage_offset()), storage.nbytes())

    def tensor(self) -> torch.Tensor:
        """A tensor of this outline, with a storage of its own, full of zeros."""
        storage = torch.zeros(self.storage_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)


def _like(outline: Any) -> Any:
    """A value of fixed tensors for an outline, or for several of one op's views; what is fixed already is taken as it is."""
    if isinstance(outline, tuple):
        return tuple(map(_like, outline))
    return outline.tensor() if isinstance(outline, _Outline) else outline


def _moving(outline: Any, value: Any) -> list[torch.Tensor]:
    """The tensors of a value (of that outline) that are not fixed by themselves."""
    if isinstance(outline, tuple):
        return [tensor for pair in zip(outline, value, strict=True) for tensor in _moving(*pair)]
    return [value] if isinstance(outline, _Outline) else []


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage: views may overlap, which no copy could fill."""
    storage = value.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage, 0, (storage.nbytes(),), (1,))


class _ObservedSlots(list[Any]):
    """Slots that note who reads, fills and empties them."""

    def __init__(self, size: int) -> None:
        super().__init__([None] * size)
        self.begin()

    def begin(self) -> None:
        self.reads: set[int] = set()
        self.fills: set[int] = set()
        self.empties: set[int] = set()

    def __getitem__(self, slot: Any) -> Any:
        self.reads.add(slot)
        return super().__getitem__(slot)

    def __setitem__(self, slot: Any, value: Any) -> None:
        (self.empties if value is None else self.fills).add(slot)
        super().__setitem__(slot, value)

    def end(self) -> Access:
        return Access(frozenset(self.reads), frozenset(self.fills), frozenset(self.empties))


@dataclass(frozen=True, slots=True)
class _Part:
    """The actions of a unit, as the capture needs them: apart."""

    head: tuple[Action, ...]
    body: tuple[Action, ...]
    tail: tuple[Action, ...]
    op: int | None = None
    capturable: bool = True

    @classmethod
    def of(cls, segment: Segment) -> "_Part":
        after, tail = ((), segment.after) if segment.departs else (segment.after, ())
        return cls(segment.arrivals, (*segment.views, segment.compute, *after), tail, segment.op, segment.capturable)


class GraphedProgram:
    """A device's program that turns into CUDA graphs after WARM_UP_STEPS runs. `fixed` are the storages, by their first address, that
    stay where they are: those of parameters and buffers."""

    def __init__(self, program: LoweredProgram, recorder: Callable[[], CudaRecorder], fixed: Collection[int]) -> None:
        self.program = program
        self._num_ops = len(program.segments)
        self.graphs = 0
        """Number of graphs captured."""
        self.ops_in_graphs = 0
        self.reason = ""
        """Why nothing could be captured; empty unless that was tried in vain."""
        self._recorder = recorder
        self._fixed = fixed
        self._runs = 0
        self._parts = [*map(_Part.of, program.segments)]
        if program.epilogue:
            self._parts.append(_Part((), program.epilogue, ()))
        self._accesses: list[list[Access]] = []
        """For each part, the accesses of its head, body and tail in the observed run."""
        self._outlines: dict[int, Any] = {}
        """For each slot, the outline of its value, or the value itself if it stays where it is."""

    @property
    def due(self) -> bool:
        """True if `capture` is to be called before the next run."""
        return self._runs == WARM_UP_STEPS and bool(self._accesses)

    def run(self) -> Slots:
        """One step; see LoweredProgram.run."""
        self._runs += 1
        return self._observed().run(_ObservedSlots(self.program.num_slots)) if self._runs == WARM_UP_STEPS else self.program.run()

    def _observed(self) -> LoweredProgram:
        """The program, each of its parts watched."""
        accesses = self._accesses = [[Access()] * 3 for _ in self._parts]

        def watched(i: int, which: int, actions: tuple[Action, ...]) -> tuple[Action, ...]:
            def act(slots: Slots) -> None:
                observed = cast(_ObservedSlots, slots)
                observed.begin()
                _do(actions, slots)
                accesses[i][which] = observed.end()
                for slot in accesses[i][which].fills:
                    self._outlines[slot] = self._outline(list.__getitem__(slots, slot))

            return (act,) if actions else ()

        segments = []
        for i, segment in enumerate(self.program.segments):
            part = self._parts[i]
            (body,) = watched(i, 1, part.body)
            segments.append(Segment(segment.op, watched(i, 0, part.head), (), body, watched(i, 2, part.tail)))
        last = len(self._parts) - 1
        return replace(self.program, segments=tuple(segments), epilogue=watched(last, 1, self.program.epilogue))

    def _units(self) -> list[Unit]:
        return [
            Unit(head if part.head else None, body, tail if part.tail else None, part.capturable, len(part.body) if part.op is None else 1)
            for part, (head, body, tail) in zip(self._parts, self._accesses, strict=True)
        ]

    def _outline(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(self._outline, value))
        if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() in self._fixed:
            return value
        return _Outline.of(value)

    def capture(self) -> None:
        """Captures the graphs, in the device's thread. Where something cannot be captured the program goes on op by op, and `reason`
        says why."""
        units, kept = self._units(), () if self.program.loss_slot is None else (self.program.loss_slot,)
        try:
            with torch.no_grad():
                program = self._captured(units, pieces(units, kept))
        except RuntimeError as e:
            self.reason, self.graphs, self.ops_in_graphs = (str(e).splitlines() or [type(e).__name__])[0], 0, 0
        else:
            self.program = program
        self._accesses = []

    def _captured(self, units: Sequence[Unit], found: Sequence[Piece]) -> LoweredProgram:
        recorder = self._recorder()
        slots: Slots = [None] * self.program.num_slots
        inputs: dict[int, Any] = {}
        """Fixed values for slots that graphs read and others fill; a later graph reads them where the first one does."""
        segments: list[Segment] = []
        epilogue = self.program.epilogue
        for piece in found:
            here, parts = units[piece.first : piece.end], self._parts[piece.first : piece.end]
            if not piece.captured:
                self._skip(slots, *(access for unit in here for access in (unit.head, unit.body, unit.tail)))
                segments += self.program.segments[piece.first : piece.end]
                continue
            self._skip(slots, here[0].head)
            inputs |= {slot: _like(self._outlines[slot]) for slot in piece.copied}
            for slot in {slot for unit in here for slot in unit.body.reads} & inputs.keys():
                slots[slot] = inputs[slot]
            graph = recorder.capture(partial(_do, [action for part in parts for action in part.body], slots))
            replay = self._replay(graph, piece, inputs, {slot: slots[slot] for slot in piece.handed_out})
            self._skip(slots, here[-1].tail)
            ops = [part.op for part in parts if part.op is not None]
            self.graphs += 1
            self.ops_in_graphs += len(ops)
            if ops:
                segments.append(Segment(ops[0], parts[0].head, (), replay, parts[-1].tail))
            if parts[-1].op is None:
                epilogue = () if ops else (replay,)
        return replace(self.program, segments=tuple(segments), epilogue=epilogue)

    def _replay(self, graph: Callable[[], None], piece: Piece, inputs: Mapping[int, Any], results: Mapping[int, Any]) -> Action:
        copied = []
        for slot in piece.copied:
            outline = self._outlines[slot]
            if into := [_bytes_of(tensor) for tensor in _moving(outline, inputs[slot])]:
                copied.append((slot, outline, into))
        handed_out, emptied = tuple(results.items()), piece.emptied

        def replay(slots: Slots) -> None:
            for slot, outline, into in copied:
                for target, tensor in zip(into, _moving(outline, slots[slot]), strict=True):
                    target.copy_(_bytes_of(tensor))
            graph()
            for slot, value in handed_out:
                slots[slot] = value
            for slot in emptied:
                slots[slot] = None

        return replay

    @staticmethod
    def _skip(slots: Slots, *accesses: Access | None) -> None:
        """Let go of the tensors that these accesses empty: what is not captured does nothing else now."""
        for access in accesses:
            for slot in access.empties if access is not None else ():
                slots[slot] = None

    def note(self, device: str) -> str:
        """The outcome of capturing, in words."""
        if self.reason:
            return f"{device}: no CUDA graphs, since {self.reason}"
        return f"{device}: {self.graphs} CUDA graphs of {self.ops_in_graphs} of its {self._num_ops} ops"


def _do(actions: Sequence[Action], slots: Slots) -> None:
    for action in actions:
        action(slots)

